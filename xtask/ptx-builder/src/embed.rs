//! For build scripts: builds PTX and tells cargo where it lies.

use std::env;
use std::fs::File;
use std::path::Path;
use std::time::SystemTime;

use crate::compile::{Package, build_all, target_dir};
use crate::error::{FileContext, Result};

/// What the builder looks at, below the workspace root, to tell whether its last result still holds.
const WATCHED: [&str; 6] = [
    "gpu",
    "tests/epilogue",
    "nvshmem-sys",
    "Cargo.toml",
    "Cargo.lock",
    "rust-toolchain.toml",
];

/// Builds all variants of a package and sets a variable for each while the build script's crate is compiled:
/// `FERRY_PTX_SM_90A` is a path, for `include_str!`; for the kernels with options,
/// `FERRY_OPTIONS_PTX_SM_90A`.
///
/// Call it in a build script.
///
/// # Errors
///
/// As [`build_all`].
pub fn embed(package: Package) -> Result<()> {
    // This package lies two folders below the workspace.
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.ancestors().nth(2).unwrap_or(here);
    for path in WATCHED {
        println!("cargo::rerun-if-changed={}", root.join(path).display());
    }
    println!("cargo::rerun-if-env-changed=NVSHMEM_HOME");
    for artifact in build_all(root, &target_dir(root), package)? {
        predate(&artifact.ptx_path)?;
        let name = artifact.variant.target_cpu().to_uppercase();
        let path = artifact.ptx_path.display();
        println!("cargo::rerun-if-changed={path}");
        println!(
            "cargo::rustc-env=FERRY_{}_{name}={path}",
            package.variable()
        );
    }
    Ok(())
}

/// Dates what was written just now back to the build script's own file. Cargo runs a build script again if
/// what it watches is newer than the start of the last run.
fn predate(path: &Path) -> Result<()> {
    let script = env::current_exe().file("find", "the build script")?;
    let started_after = modified(&script)?;
    if modified(path)? > started_after {
        let file = File::options().write(true).open(path).file("open", path)?;
        file.set_modified(started_after).file("date back", path)?;
    }
    Ok(())
}

fn modified(path: &Path) -> Result<SystemTime> {
    let modified = std::fs::metadata(path).and_then(|metadata| metadata.modified());
    modified.file("read the date of", path)
}
