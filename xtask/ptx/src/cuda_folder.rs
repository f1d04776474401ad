//! A folder made of wheels that build scripts take for a CUDA installation.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use ferry_build::{FileContext, Result, Wheel};

use crate::wheels::{CCCL, CRT, NVCC, NVVM, RUNTIME};

/// Folder of the files in a wheel of CUDA 13.
const INSIDE: &str = "nvidia/cu13";

/// Makes a folder with nvcc, CUDA's headers and its runtime, unless it exists.
///
/// # Errors
///
/// Those of [`Wheel::fetch`]; a folder that cannot be written.
pub fn with_compiler(target_dir: &Path, folder: &Path) -> Result<()> {
    make(target_dir, folder)?;
    let of = |wheel: Wheel| Ok(wheel.fetch(target_dir)?.join(INSIDE));
    let (nvcc, nvvm, runtime) = (of(NVCC)?, of(NVVM)?, of(RUNTIME)?);
    for inside in ["bin", "include"] {
        link_tree(&nvcc.join(inside), &folder.join(inside))?;
    }
    link(&nvvm.join("nvvm/bin/cicc"), &folder.join("nvvm/bin/cicc"))?;
    link(
        &runtime.join("lib/libcudart.so.13"),
        &folder.join("lib64/libcudart.so"),
    )
}

/// Makes a folder with libNVVM and CUDA's headers, unless it exists, and returns it.
pub(crate) fn make(target_dir: &Path, folder: &Path) -> Result<PathBuf> {
    let nvvm = NVVM.fetch(target_dir)?.join(INSIDE);
    for wheel in [RUNTIME, CRT, CCCL] {
        let include = wheel.fetch(target_dir)?.join(INSIDE).join("include");
        link_tree(&include, &folder.join("include"))?;
    }
    let links = [
        (
            "nvvm/libdevice/libdevice.10.bc",
            "nvvm/libdevice/libdevice.10.bc",
        ),
        ("lib/libnvvm.so.4", "nvvm/lib64/libnvvm.so.4"),
        ("lib/libnvvm.so.4", "nvvm/lib64/libnvvm.so"),
        ("include/nvvm.h", "nvvm/include/nvvm.h"),
    ];
    for (from, to) in links {
        link(&nvvm.join(from), &folder.join(to))?;
    }
    Ok(folder.to_owned())
}

/// Links every file below a folder to the same place below another.
fn link_tree(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from).file("list", from)? {
        let entry = entry.file("list", from)?;
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            link_tree(&path, &to)?;
        } else {
            link(&path, &to)?;
        }
    }
    Ok(())
}

/// Links a file, replacing an existing one.
fn link(from: &Path, to: &Path) -> Result<()> {
    if fs::read_link(to).is_ok_and(|kept| kept == from) {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).file("create", folder)?;
    }
    let _ = fs::remove_file(to);
    symlink(from, to).file("link", to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_lie_over_each_other_and_links_are_renewed() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path();
        for (file, text) in [("a/x/one", "1"), ("b/x/two", "2")] {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        for from in ["a", "b", "b"] {
            link_tree(&root.join(from), &root.join("to")).unwrap();
        }
        assert_eq!(fs::read_to_string(root.join("to/x/one")).unwrap(), "1");
        link(&root.join("b/x/two"), &root.join("to/x/one")).unwrap();
        assert_eq!(fs::read_to_string(root.join("to/x/one")).unwrap(), "2");
    }
}
