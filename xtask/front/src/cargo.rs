//! Cargo, and the workspace's folders.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Arguments of cargo for the features that the whole workspace needs, so that builds of different packages
/// compile dependencies once.
pub const WORKSPACE_FEATURES: [&str; 3] = [
    "-Zfeature-unification",
    "--config",
    "resolver.feature-unification='workspace'",
];

/// Cargo of the toolchain that built this program. It runs in the user's folder, to which paths among the
/// arguments are relative.
pub fn cargo() -> Command {
    Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// The workspace's folder.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}

/// Folder that cargo, run in the workspace's root, builds into: `CARGO_TARGET_DIR`, or `target`.
pub fn target_dir() -> PathBuf {
    root().join(env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}
