//! Finds or builds PTX for a build script, and passes its path to the compiler.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::compile::{all_variants, build_each};
use crate::error::{Error, FileContext, Result};
use crate::package::{Artifact, FOLDER_VARIABLE, Package, Variant};
use crate::prebuilt::{prebuilt, require};
use crate::stamp::Stamp;

/// Inputs of a build, below the workspace root, that cargo watches.
const WATCHED: [&str; 6] = [
    "gpu",
    "tests/epilogue",
    "nvshmem-sys",
    "Cargo.toml",
    "Cargo.lock",
    "rust-toolchain.toml",
];

/// Folder of the embedded PTX below `OUT_DIR`.
const EMBEDDED: &str = "embedded";

/// Folder of PTX for one node in the published package.
pub const PACKAGED_PTX: &str = "prebuilt";
/// Folder of the kernels' sources in the published package.
pub const PACKAGED_SOURCES: &str = "device";
/// Name of manifests in [`PACKAGED_SOURCES`], because cargo leaves nested packages out of a package.
pub const PACKAGED_MANIFEST: &str = "Cargo.toml.packaged";

/// Finds or builds all variants of these packages, and sets an environment variable with the path of each for
/// `include_str!` in the build script's crate: `FERRY_PTX_SM_90A`; `FERRY_OPTIONS_PTX_SM_90A` for the kernels
/// with options, `FERRY_ROWS_PTX_SM_90A` for those of rows that stay as they came. To be called in a build
/// script.
///
/// The PTX of Ferry's kernels comes from the first of: the folder that [`FOLDER_VARIABLE`] names; for one
/// node, the package of the build script's crate; a build from the sources beside that crate or in its
/// package. A build writes to `OUT_DIR`; if that is in the `target` folder of this workspace, it shares the
/// output of `cargo xtask build-ptx` there. All PTX of Ferry's kernels is checked, wherever it comes from.
///
/// Cargo watches the dates of the folder and its files: `touch` the folder after replacing files by older
/// ones.
///
/// # Errors
///
/// [`Error::Prebuilt`] for a folder that cannot be used, [`Error::NoSources`], and those of [`build_each`].
pub fn embed(packages: &[Package]) -> Result<()> {
    println!("cargo::rerun-if-env-changed={FOLDER_VARIABLE}");
    println!("cargo::rerun-if-env-changed=NVSHMEM_HOME");
    let here = folder_of("CARGO_MANIFEST_DIR")?;
    let artifacts = match prebuilt_folder(&here, packages) {
        Some(folder) => {
            println!("cargo::rerun-if-changed={}", folder.display());
            prebuilt(&folder, packages)?
        }
        None => built(&here, packages)?,
    };
    let folder = folder_of("OUT_DIR")?.join(EMBEDDED);
    if folder.is_dir() {
        fs::remove_dir_all(&folder).file("remove", &folder)?;
    }
    fs::create_dir_all(&folder).file("create", &folder)?;
    for artifact in artifacts {
        let name = artifact.variant.target_cpu().to_uppercase();
        let path = artifact.ptx_path.display();
        println!("cargo::rerun-if-changed={path}");
        let path = embedded(&artifact, &folder)?;
        println!(
            "cargo::rustc-env=FERRY_{}_{name}={}",
            artifact.package.variable(),
            path.display()
        );
    }
    Ok(())
}

/// Checks PTX of Ferry's kernels and copies it to `folder`. The name has a hash of the text, so that another
/// text is another path, whatever its date.
fn embedded(artifact: &Artifact, folder: &Path) -> Result<PathBuf> {
    let &Artifact {
        package, variant, ..
    } = artifact;
    let from = &artifact.ptx_path;
    let text = fs::read_to_string(from).file("read", from)?;
    if is_product(&package) {
        require(from, &text, package, variant)?;
    }
    let mut stamp = Stamp::new();
    stamp.text(&text);
    let name = format!("{}-{variant}-{}.ptx", package.variable(), stamp.finish());
    let to = folder.join(name);
    fs::write(&to, text).file("write", &to)?;
    Ok(to)
}

/// Whether the host library embeds a package.
fn is_product(package: &Package) -> bool {
    !matches!(package, Package::Probes | Package::OwnEpilogue)
}

/// Folder in a variable that cargo sets for build scripts.
fn folder_of(variable: &'static str) -> Result<PathBuf> {
    let folder = env::var_os(variable).map(PathBuf::from);
    folder.ok_or(Error::NoBuildScript { variable })
}

/// Folder of PTX that was built before, if there is one.
fn prebuilt_folder(here: &Path, packages: &[Package]) -> Option<PathBuf> {
    if !packages.iter().all(is_product) {
        return None;
    }
    let named = env::var_os(FOLDER_VARIABLE).filter(|folder| !folder.is_empty());
    if let Some(named) = named {
        return Some(named.into());
    }
    let for_one_node = packages.iter().all(|package| !package.calls_nvshmem());
    let packaged = here.join(PACKAGED_PTX);
    (for_one_node && packaged.is_dir()).then_some(packaged)
}

/// Builds the packages from the sources beside the crate or in its package.
fn built(here: &Path, packages: &[Package]) -> Result<Vec<Artifact>> {
    let out_dir = folder_of("OUT_DIR")?;
    let root = here.parent().unwrap_or(here);
    let packaged = here.join(PACKAGED_SOURCES);
    let (root, target_dir) = if root.join("gpu/kernels/Cargo.toml").is_file() {
        for path in WATCHED {
            println!("cargo::rerun-if-changed={}", root.join(path).display());
        }
        (root.to_owned(), shared_target_dir(root, &out_dir))
    } else if packaged.is_dir() {
        println!("cargo::rerun-if-changed={}", packaged.display());
        let root = out_dir.join(PACKAGED_SOURCES);
        unpack(&packaged, &root)?;
        (root, None)
    } else {
        return Err(Error::NoSources {
            folder: here.into(),
        });
    };
    let target = target_dir.as_ref().unwrap_or(&out_dir);
    let artifacts = build_each(&root, target, &all_variants(packages))?;
    for artifact in &artifacts {
        predate(&artifact.ptx_path)?;
    }
    if target_dir.is_none() {
        clean(&out_dir)?;
    }
    Ok(artifacts)
}

/// This workspace's `target` folder, if `out_dir` is in it: the crate is built in its own workspace then.
fn shared_target_dir(root: &Path, out_dir: &Path) -> Option<PathBuf> {
    let target = root.join("target").canonicalize().ok()?;
    let is_below = out_dir.canonicalize().ok()?.starts_with(&target);
    is_below.then_some(target)
}

/// Copies packaged sources, and gives manifests the name that cargo looks for.
fn unpack(packaged: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).file("create", to)?;
    for entry in fs::read_dir(packaged).file("list", packaged)? {
        let entry = entry.file("list", packaged)?;
        let (from, name) = (entry.path(), entry.file_name());
        if entry.file_type().file("read", &from)?.is_dir() {
            unpack(&from, &to.join(name))?;
            continue;
        }
        let text = fs::read(&from).file("read", &from)?;
        let name = match name.to_str() {
            Some(PACKAGED_MANIFEST) => "Cargo.toml".into(),
            _ => name,
        };
        fs::write(to.join(&name), text).file("write", to.join(&name))?;
    }
    Ok(())
}

/// Removes hundreds of megabytes that only a build from changed sources would use again.
fn clean(out_dir: &Path) -> Result<()> {
    let built = Variant::ALL.map(|variant| format!("ptx/{variant}"));
    for folder in built.iter().map(String::as_str).chain(["wheels"]) {
        let folder = out_dir.join(folder);
        if folder.is_dir() {
            fs::remove_dir_all(&folder).file("remove", &folder)?;
        }
    }
    Ok(())
}

/// Gives a file that is newer than the build script the script's modification time. Otherwise cargo would run
/// the script again, as it does for a watched file that is newer than the start of the last run.
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
    let modified = fs::metadata(path).and_then(|metadata| metadata.modified());
    modified.file("read the date of", path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::PrebuiltProblem;

    #[test]
    fn what_is_embedded_was_checked_and_its_name_follows_its_text() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path();
        let ptx_path = folder.join("given.ptx");
        let mut artifact = Artifact {
            package: Package::Probes,
            variant: Variant::Sm80,
            ptx_path: ptx_path.clone(),
        };
        let header = ".version 8.0\n.target sm_80\n.address_size 64\n";
        let mut paths = Vec::new();
        for text in [header, &format!("{header}// other\n")] {
            fs::write(&ptx_path, text).unwrap();
            let path = embedded(&artifact, folder).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            paths.push(path);
        }
        assert_ne!(paths[0], paths[1]);
        artifact.package = Package::NodeKernels;
        let refused = embedded(&artifact, folder).unwrap_err();
        assert!(
            matches!(
                &refused,
                Error::Prebuilt { path, problem: PrebuiltProblem::Layout { found: None, .. } }
                    if *path == ptx_path
            ),
            "{refused}"
        );
    }
}
