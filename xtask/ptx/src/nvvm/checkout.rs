//! The user's checkout of rust-cuda.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ferry_build::{Error, FileContext, Result};

/// The commit of rust-cuda that Ferry was tested with: the head of its pull request 375, "llvm19".
pub const TESTED_COMMIT: &str = "ebfe81ba0a4e113a3bfb1e4b050dcc2cc8d26f99";

/// The toolchain that the checkout's compiler plugs into.
pub(super) const TOOLCHAIN: &str = "nightly-2026-04-02";

/// Stands for a commit that git cannot name.
const UNKNOWN: &str = "a commit unknown to git";

/// The reason why a checkout was not built.
#[derive(Debug, thiserror::Error)]
pub enum CheckoutError {
    /// The folder lacks something.
    #[error("{path} {problem}; get a checkout that works with `{get}`", path = path.display())]
    Unfit {
        /// The folder.
        path: PathBuf,
        /// The missing part.
        problem: String,
        /// The command that makes one.
        get: String,
    },
    /// A tool is missing or failed.
    #[error(transparent)]
    Build(#[from] Error),
}

/// A checkout with everything needed.
#[derive(Clone, Debug)]
pub(super) struct Checkout {
    path: PathBuf,
    commit: String,
    is_changed: bool,
}

impl Checkout {
    /// Checks that the folder is rust-cuda, supports LLVM 19 and is for the toolchain.
    pub(super) fn open(path: &Path) -> Result<Self, CheckoutError> {
        let read = |name: &str| fs::read_to_string(path.join(name)).unwrap_or_default();
        let refuse = |problem: String| {
            Err(CheckoutError::Unfit {
                path: path.into(),
                problem,
                get: get_command(),
            })
        };
        let manifest = read("crates/rustc_codegen_nvvm/Cargo.toml");
        if manifest.is_empty() {
            return refuse("has no crates/rustc_codegen_nvvm".into());
        }
        if !has_feature(&manifest, "llvm19") {
            return refuse("has a rustc_codegen_nvvm without the feature llvm19".into());
        }
        match channel(&read("rust-toolchain.toml")) {
            Some(found) if found == TOOLCHAIN => {}
            found => {
                let found = found.unwrap_or("no toolchain");
                return refuse(format!("is for {found}, not for {TOOLCHAIN}"));
            }
        }
        let git = |arguments: &[&str]| {
            let output = Command::new("git")
                .arg("-C")
                .arg(path)
                .args(arguments)
                .output()
                .ok()?;
            let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            output.status.success().then_some(text)
        };
        let changes = git(&["status", "--porcelain", "--untracked-files=no"]);
        Ok(Self {
            path: path.into(),
            commit: git(&["rev-parse", "HEAD"]).unwrap_or_else(|| UNKNOWN.into()),
            is_changed: changes != Some(String::new()),
        })
    }

    /// Whether it is [`TESTED_COMMIT`], without changes.
    pub(super) fn is_tested(&self) -> bool {
        self.commit == TESTED_COMMIT && !self.is_changed
    }

    pub(super) fn commit(&self) -> &str {
        &self.commit
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of one of its crates.
    pub(super) fn crate_folder(&self, name: &str) -> PathBuf {
        self.path.join("crates").join(name)
    }

    /// Puts its lock file into another workspace, so that the same dependencies are used there.
    pub(super) fn copy_lock(&self, workspace: &Path) -> Result<()> {
        let from = self.path.join("Cargo.lock");
        fs::copy(&from, workspace.join("Cargo.lock")).file("copy", &from)?;
        Ok(())
    }
}

/// The commands that make a tested checkout.
fn get_command() -> String {
    format!(
        "git clone https://github.com/Rust-GPU/rust-cuda && cd rust-cuda && \
         git fetch origin pull/375/head && git checkout {TESTED_COMMIT}"
    )
}

/// Whether a manifest's `[features]` has this name.
fn has_feature(manifest: &str, name: &str) -> bool {
    let Some((_, features)) = manifest.split_once("[features]") else {
        return false;
    };
    let features = features.split("\n[").next().unwrap_or(features);
    let mut lines = features.lines().filter_map(|line| line.split_once('='));
    lines.any(|(found, _)| found.trim() == name)
}

/// The `channel` of a `rust-toolchain.toml`.
fn channel(toolchain: &str) -> Option<&str> {
    let mut lines = toolchain.lines().filter_map(|line| line.split_once('='));
    let (_, value) = lines.find(|(name, _)| name.trim() == "channel")?;
    Some(value.trim().trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// A folder with these manifests.
    fn folder(manifest: &str, toolchain: &str) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        let package = folder.path().join("crates/rustc_codegen_nvvm");
        fs::create_dir_all(&package).unwrap();
        fs::write(package.join("Cargo.toml"), manifest).unwrap();
        fs::write(folder.path().join("rust-toolchain.toml"), toolchain).unwrap();
        folder
    }

    const MANIFEST: &str = "[package]\n[features]\ndefault = []\nllvm19 = []\n\n[dependencies]\n";
    const RIGHT: &str = "[toolchain]\nchannel = \"nightly-2026-04-02\"\n";

    #[test]
    fn what_lacks_something_is_refused_with_the_command_that_gets_another() {
        let cases = [
            (
                "[features]\ndefault = []\n[x]\nllvm19 = []\n",
                RIGHT,
                "without the feature llvm19",
            ),
            (
                MANIFEST,
                "channel = \"nightly-2025-01-01\"",
                "is for nightly-2025-01-01, not",
            ),
            (
                MANIFEST,
                "",
                "is for no toolchain, not for nightly-2026-04-02",
            ),
            ("", RIGHT, "has no crates/rustc_codegen_nvvm"),
        ];
        for (manifest, toolchain, said) in cases {
            let folder = folder(manifest, toolchain);
            let text = Checkout::open(folder.path()).unwrap_err().to_string();
            assert!(
                text.contains(said) && text.contains(TESTED_COMMIT),
                "{text}"
            );
            assert!(text.contains(folder.path().to_str().unwrap()), "{text}");
        }
    }

    #[test]
    fn a_folder_without_a_commit_is_taken_and_not_the_tested_one() {
        let folder = folder(MANIFEST, RIGHT);
        let checkout = Checkout::open(folder.path()).unwrap();
        assert!(!checkout.is_tested());
    }
}
