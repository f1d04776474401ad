//! Files that are generated and committed.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};

/// Paths below the workspace, and texts.
pub(crate) type Files = [(String, String)];

/// The first file whose committed text is another one.
pub(crate) fn stale<'a>(root: &Path, files: &'a Files) -> Option<&'a str> {
    let is_stale = |(path, text): &&(String, String)| {
        fs::read_to_string(root.join(path)).ok().as_ref() != Some(text)
    };
    files.iter().find(is_stale).map(|(path, _)| path.as_str())
}

/// The complaint about a file that is stale.
pub(crate) fn complaint(path: &str, command: &str) -> String {
    format!("{path} is stale; renew it with `{command}`")
}

/// Writes the files that `command` generates, or with `check` fails if one is stale.
pub(crate) fn renew(root: &Path, files: &Files, check: bool, command: &str) -> Result<()> {
    if let (true, Some(path)) = (check, stale(root, files)) {
        bail!(complaint(path, command));
    }
    for (path, text) in files {
        if !check {
            fs::write(root.join(path), text).with_context(|| format!("cannot write {path}"))?;
        }
        println!("{path} is {}", if check { "fresh" } else { "written" });
    }
    Ok(())
}
