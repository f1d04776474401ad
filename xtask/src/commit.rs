//! Names the commit that was built.

use xshell::{Shell, cmd};

/// The commit, with a `+` if the tree differs from it elsewhere than in the soak's log.
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
