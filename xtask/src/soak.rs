//! `cargo xtask soak`: runs `ferry-tests soak`, with GPU support where GPUs are asked for.

use anyhow::Result;
use xshell::{Shell, cmd};

use crate::{Places, cuda_stub};

/// Builds and runs the soak with these arguments. In the simulator arithmetic is checked for overflow, as in tests.
pub(crate) fn run(places: &Places, arguments: &[String]) -> Result<()> {
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    let package = ["--package", "ferry-tests"];
    let mut on_gpus = None;
    if wants_gpus(arguments) {
        shell.set_var(cuda_stub::VARIABLE, cuda_stub::folder(places)?);
        on_gpus = Some(["--release", "--features", "cuda"]);
    }
    let on_gpus = on_gpus.into_iter().flatten();
    // The tree's state, with a mark where it is not what was committed.
    let commit = cmd!(
        shell,
        "git describe --always --dirty=+ --abbrev=12 --exclude=*"
    );
    let commit = commit
        .quiet()
        .ignore_stderr()
        .read()
        .unwrap_or_else(|_| "unknown".into());
    cmd!(
        shell,
        "cargo run --quiet {package...} {on_gpus...} -- soak --commit {commit} {arguments...}"
    )
    .quiet()
    .run()?;
    Ok(())
}

/// Whether GPUs are asked for.
fn wants_gpus(arguments: &[String]) -> bool {
    let is_gpus = |argument: &String| argument == "--gpus" || argument.starts_with("--gpus=");
    arguments.iter().any(is_gpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_understood_in_both_spellings() {
        let wants = |text: &str| wants_gpus(&text.split(' ').map(String::from).collect::<Vec<_>>());
        assert!(wants("--gpus 4") && wants("--seconds 9 --gpus=2"));
        assert!(!wants("--seconds 60"));
    }
}
