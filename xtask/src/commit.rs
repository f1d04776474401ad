//! What was built.

use xshell::{Shell, cmd};

/// The commit, with a mark where something else than the soak's log differs from it.
pub(crate) fn name(shell: &Shell) -> String {
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
