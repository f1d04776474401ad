//! `cargo xtask demo`: runs `ferry-tests demo`, with GPU support only where there is a driver.

use anyhow::Result;
use xshell::{Shell, cmd};

use crate::Places;

/// Builds and runs the demo with these arguments.
pub(crate) fn run(places: &Places, arguments: &[String]) -> Result<()> {
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    let mut features = None;
    if wants_gpus(arguments) && has_driver() {
        features = Some("--features=cuda");
    }
    cmd!(
        shell,
        "cargo run --quiet --release --package ferry-tests {features...} -- demo {arguments...}"
    )
    .quiet()
    .run()?;
    Ok(())
}

/// Whether `--gpus none` is not among the arguments.
fn wants_gpus(arguments: &[String]) -> bool {
    let pair = arguments
        .windows(2)
        .any(|pair| pair[0] == "--gpus" && pair[1] == "none");
    !pair && !arguments.iter().any(|argument| argument == "--gpus=none")
}

/// Whether there is a driver.
fn has_driver() -> bool {
    // SAFETY: the driver library's constructors touch nothing of this program.
    unsafe { libloading::Library::new("libcuda.so.1") }.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_none_is_understood_in_both_spellings() {
        let wants = |text: &str| wants_gpus(&text.split(' ').map(String::from).collect::<Vec<_>>());
        assert!(wants("--ranks 4") && wants("--gpus auto") && wants("--gpus 2 --text none"));
        assert!(!wants("--ranks 4 --gpus none") && !wants("--gpus=none"));
    }
}
