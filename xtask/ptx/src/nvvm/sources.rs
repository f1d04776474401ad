//! The copy of the device crates that the backend compiles.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use ferry_build::{FileContext, Package, Result};

use super::checkout::Checkout;
use crate::members::with_members;

/// The device crates and their dependencies.
const MEMBERS: [&str; 9] = [
    "gpu",
    "gpu/kernels",
    "gpu/layout",
    "gpu/options",
    "gpu/probes",
    "gpu/protocol",
    "gpu/rows",
    "nvshmem-sys",
    "tests/epilogue",
];

/// Folders copied from the workspace.
const FOLDERS: [&str; 3] = ["gpu", "nvshmem-sys", "tests/epilogue"];

/// Crates copied from the checkout, because names of functions depend on a crate's path.
const CRATES: [&str; 2] = ["cuda_std", "cuda_std_macros"];

/// Added to the manifest of `ferry-gpu`.
const CUDA_STD: &str = "
[target.'cfg(target_arch = \"nvptx64\")'.dependencies.cuda_std]
path = \"../rust-cuda/crates/cuda_std\"
";

/// Folder of a package in the workspace.
pub(super) fn folder_of(package: Package) -> &'static str {
    match package {
        Package::Kernels | Package::NodeKernels => "gpu/kernels",
        Package::Options | Package::NodeOptions => "gpu/options",
        Package::Rows | Package::NodeRows => "gpu/rows",
        Package::Probes => "gpu/probes",
        Package::OwnEpilogue => "tests/epilogue",
    }
}

/// The arguments of cargo for a package.
pub(super) fn features(package: Package) -> &'static [&'static str] {
    if package.calls_nvshmem() {
        &["--features", "nvshmem"]
    } else {
        &[]
    }
}

/// Updates the copy. Unchanged files are not touched, so that they are not compiled again.
pub(super) fn copy(workspace_root: &Path, to: &Path, checkout: &Checkout) -> Result<()> {
    let manifest = workspace_root.join("Cargo.toml");
    let manifest = fs::read_to_string(&manifest).file("read", &manifest)?;
    for folder in FOLDERS {
        mirror(&workspace_root.join(folder), &to.join(folder))?;
    }
    for name in CRATES {
        mirror(
            &checkout.crate_folder(name),
            &to.join("rust-cuda/crates").join(name),
        )?;
    }
    let gpu = workspace_root.join("gpu/Cargo.toml");
    let with_std = fs::read_to_string(&gpu).file("read", &gpu)? + CUDA_STD;
    write(&to.join("gpu/Cargo.toml"), with_std.as_bytes())?;
    let manifest = with_members(&manifest, &MEMBERS)?;
    write(&to.join("Cargo.toml"), manifest.as_bytes())?;
    renew_lock(to, checkout.commit(), || checkout.copy_lock(to))
}

/// Copies the checkout's lock file, unless the present one is of the same commit. Cargo adds the device
/// crates to it.
fn renew_lock(to: &Path, commit: &str, copy: impl FnOnce() -> Result<()>) -> Result<()> {
    let taken_of = to.join("Cargo.lock.commit");
    let is_kept = fs::read_to_string(&taken_of).is_ok_and(|kept| kept == commit);
    if is_kept && to.join("Cargo.lock").is_file() {
        return Ok(());
    }
    copy()?;
    write(&taken_of, commit.as_bytes())
}

/// Makes `to` hold exactly the files of `from`, except `gpu/Cargo.toml`, which is written afterwards.
fn mirror(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).file("create", to)?;
    let names = |folder: &Path| -> Result<BTreeSet<OsString>> {
        let entries = fs::read_dir(folder).file("list", folder)?;
        let entries = entries.filter_map(|entry| Some(entry.ok()?.file_name()));
        Ok(entries.filter(|name| name != "target").collect())
    };
    let wanted = names(from)?;
    for stale in names(to)?.difference(&wanted) {
        let path = to.join(stale);
        if path.is_dir() {
            fs::remove_dir_all(&path).file("remove", &path)?;
        } else {
            fs::remove_file(&path).file("remove", &path)?;
        }
    }
    for name in &wanted {
        let (from, to): (PathBuf, PathBuf) = (from.join(name), to.join(name));
        if from.is_dir() {
            mirror(&from, &to)?;
        } else if !to.ends_with("gpu/Cargo.toml") {
            write(&to, &fs::read(&from).file("read", &from)?)?;
        }
    }
    Ok(())
}

/// Writes a file unless it has these contents.
fn write(path: &Path, contents: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|kept| kept == contents) {
        return Ok(());
    }
    fs::write(path, contents).file("write", path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirror_drops_what_is_gone_and_leaves_alone_what_is_the_same() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path();
        let [from, to] = ["from", "to"].map(|name| root.join(name));
        fs::create_dir_all(from.join("src")).unwrap();
        fs::create_dir_all(to.join("gone")).unwrap();
        fs::write(from.join("src/one.rs"), "1").unwrap();
        fs::write(to.join("two.rs"), "2").unwrap();
        mirror(&from, &to).unwrap();
        let written = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
        let first = written(&to.join("src/one.rs"));
        mirror(&from, &to).unwrap();
        assert_eq!(written(&to.join("src/one.rs")), first);
        assert!(!to.join("gone").exists() && !to.join("two.rs").exists());
    }

    #[test]
    fn another_commit_brings_its_lock_file() {
        let scratch = tempfile::tempdir().unwrap();
        let to = scratch.path();
        let mut copies = Vec::new();
        for commit in ["one", "one", "two"] {
            renew_lock(to, commit, || {
                copies.push(commit);
                write(&to.join("Cargo.lock"), commit.as_bytes())
            })
            .unwrap();
        }
        assert_eq!(copies, ["one", "two"]);
    }
}
