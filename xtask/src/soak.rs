//! `cargo xtask soak`: runs `ferry-tests soak`, with GPU support where GPUs are asked for.

use anyhow::Result;
use xshell::{Shell, cmd};

use crate::Places;

/// Builds and runs the soak with these arguments. In the simulator arithmetic is checked for
/// overflow, as in tests.
pub(crate) fn run(places: &Places, arguments: &[String]) -> Result<()> {
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    let package = ["--package", "ferry-tests"];
    let mut on_gpus = None;
    if wants_gpus(arguments) {
        on_gpus = Some(["--release", "--features", "cuda"]);
    }
    let on_gpus = on_gpus.into_iter().flatten();
    let commit = commit(&shell);
    cmd!(
        shell,
        "cargo run --quiet {package...} {on_gpus...} -- soak --commit {commit} {arguments...}"
    )
    .quiet()
    .run()?;
    Ok(())
}

/// The commit, with a mark where something else than the log differs from it.
fn commit(shell: &Shell) -> String {
    let head = cmd!(shell, "git rev-parse --short=12 HEAD")
        .quiet()
        .ignore_stderr();
    let but_log = ":!tests/soak.log";
    let changes = cmd!(shell, "git status --porcelain -- . {but_log}")
        .quiet()
        .ignore_stderr();
    match (head.read(), changes.read()) {
        (Ok(head), Ok(changes)) if changes.is_empty() => head,
        (Ok(head), _) => head + "+",
        (Err(_), _) => String::from("unknown"),
    }
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
