//! Builds a crate of kernels from outside this workspace.

use std::fs;
use std::path::{Path, PathBuf, absolute};

use ferry_build::{
    Error, FileContext, Result, TARGET, Variant, device_bitcode, llvm_tools, missing_cargo,
    output_of, profile, rustflags, stdout_of, toolchain_command,
};

/// Builds the PTX of one variant of a crate's library, with the flags of Ferry's own kernels and this
/// workspace's compiler. The crate depends on this workspace's `ferry-gpu` by its path. Returns the file:
/// `<variant>.ptx` in a folder of the crate's name below `<target_dir>/ptx/own`. Links NVSHMEM if the crate
/// enables `ferry-gpu`'s feature `nvshmem`.
///
/// # Errors
///
/// Those of [`build`](ferry_build::build()); a manifest whose library is not a `cdylib` of kernels.
pub fn build_own(
    workspace_root: &Path,
    target_dir: &Path,
    manifest: &Path,
    variant: Variant,
) -> Result<PathBuf> {
    let manifest = absolute(manifest).file("resolve", manifest)?;
    let target_dir = absolute(target_dir).file("resolve", target_dir)?;
    let mut flags = rustflags(variant);
    if calls_nvshmem(workspace_root, &manifest)? {
        let bitcode = device_bitcode(&target_dir, || llvm_tools(workspace_root))?;
        flags.push_str(&format!(" -Clink-arg={}", bitcode.display()));
    }
    let crate_folder = manifest.parent().and_then(Path::file_name);
    let folder = target_dir
        .join("ptx/own")
        .join(crate_folder.unwrap_or_default());
    let built = folder.join(format!("{variant}.built"));
    if built.is_dir() {
        fs::remove_dir_all(&built).file("remove", &built)?;
    }
    fs::create_dir_all(&built).file("create", &built)?;
    eprintln!("compiling {} for {variant}", manifest.display());
    let mut cargo = toolchain_command("cargo", workspace_root);
    cargo
        .args(["build", "--quiet", "--release", "--lib", "--target", TARGET])
        .args(["-Zbuild-std=core", "-Zunstable-options"])
        .args(profile())
        .arg("--artifact-dir")
        .arg(&built)
        .arg("--manifest-path")
        .arg(&manifest)
        .env("RUSTFLAGS", flags)
        .env("CARGO_INCREMENTAL", "0")
        .env(
            "CARGO_TARGET_DIR",
            target_dir.join("ptx").join(variant.target_cpu()),
        );
    output_of(&mut cargo, missing_cargo)?;
    let files = fs::read_dir(&built).file("read", &built)?;
    let mut files = files.filter_map(|entry| Some(entry.ok()?.path()));
    let found = files.find(|path| path.extension().is_some_and(|end| end == "ptx"));
    let found = found.ok_or_else(|| Error::MissingOutput {
        what: "PTX",
        path: built.clone(),
    })?;
    let ptx = folder.join(format!("{variant}.ptx"));
    fs::rename(&found, &ptx).file("move into place", &ptx)?;
    fs::remove_dir_all(&built).file("remove", &built)?;
    Ok(ptx)
}

/// Whether a crate's kernels are built with `ferry-gpu`'s feature `nvshmem`.
fn calls_nvshmem(workspace_root: &Path, manifest: &Path) -> Result<bool> {
    let mut cargo = toolchain_command("cargo", workspace_root);
    cargo
        .args(["tree", "--quiet", "--target", TARGET, "--prefix", "none"])
        .args(["--edges", "normal", "--format", "{p} {f}"])
        .arg("--manifest-path")
        .arg(manifest);
    let tree = stdout_of(&mut cargo, missing_cargo)?;
    let mut gpu = tree.lines().filter(|line| line.starts_with("ferry-gpu "));
    Ok(gpu.any(|line| line.ends_with(" nvshmem")))
}
