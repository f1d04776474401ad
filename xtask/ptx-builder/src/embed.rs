//! For build scripts: builds PTX and tells cargo where it lies.

use std::env;
use std::path::Path;

use crate::compile::{Package, build_all, target_dir};
use crate::error::Result;

/// What the builder looks at, below the workspace root, to tell whether its last result still holds.
const WATCHED: [&str; 5] = [
    "gpu",
    "nvshmem-sys",
    "Cargo.toml",
    "Cargo.lock",
    "rust-toolchain.toml",
];

/// Builds all variants of a package and sets a variable for each while the build script's crate is compiled:
/// `FERRY_PTX_SM_90A` is a path, for `include_str!`; for the kernels with options, `FERRY_OPTIONS_PTX_SM_90A`.
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
