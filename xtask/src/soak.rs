//! `cargo xtask soak`: runs `ferry-tests soak`, with GPU support if the arguments ask for GPUs.

use anyhow::Result;
use xshell::{Shell, cmd};

use crate::commit;
use crate::places::Places;

/// Builds and runs the soak with these arguments: without GPUs in the dev profile, which checks arithmetic
/// for overflow.
pub(crate) fn run(places: &Places, arguments: &[String]) -> Result<()> {
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    let package = ["--package", "ferry-tests"];
    let mut on_gpus = None;
    if wants_gpus(arguments) {
        on_gpus = Some(["--release", "--features", "cuda"]);
    }
    let on_gpus = on_gpus.into_iter().flatten();
    let commit = commit::name(&shell);
    cmd!(
        shell,
        "cargo run --quiet {package...} {on_gpus...} -- soak --commit {commit} {arguments...}"
    )
    .quiet()
    .run()?;
    Ok(())
}

/// Whether the arguments ask for a group's ranks, which may have GPUs.
fn wants_gpus(arguments: &[String]) -> bool {
    let flag = |argument: &String| argument.split('=').next().unwrap_or_default().to_owned();
    let flags = ["--gpus", "--ranks", "--group", "--share-gpus"];
    arguments
        .iter()
        .any(|argument| flags.contains(&flag(argument).as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_understood_in_both_spellings() {
        let wants = |text: &str| wants_gpus(&text.split(' ').map(String::from).collect::<Vec<_>>());
        assert!(wants("--gpus 4") && wants("--seconds 9 --gpus=2"));
        assert!(wants("--share-gpus --seconds 9") && wants("--ranks=4") && wants("--group node"));
        assert!(!wants("--seconds 60"));
    }
}
