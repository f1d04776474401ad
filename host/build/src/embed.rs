//! PTX for build scripts: found or built, and its place told to cargo.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::compile::build_all;
use crate::error::{Error, FileContext, Result};
use crate::package::{Artifact, FOLDER_VARIABLE, Package, Variant};
use crate::prebuilt::{prebuilt, require};
use crate::stamp::Stamp;

/// Inputs of a build, below the workspace root: if none is newer, its last result still holds.
const WATCHED: [&str; 6] = [
    "gpu",
    "tests/epilogue",
    "nvshmem-sys",
    "Cargo.toml",
    "Cargo.lock",
    "rust-toolchain.toml",
];

/// Below `OUT_DIR`: the PTX that is embedded.
const EMBEDDED: &str = "embedded";

/// PTX for one node in a package that publishes; [`PACKAGED_SOURCES`] are the kernels' sources beside it.
pub const PACKAGED_PTX: &str = "prebuilt";
/// See [`PACKAGED_PTX`].
pub const PACKAGED_SOURCES: &str = "device";
/// Name of a manifest in there: a package has no other packages in it.
pub const PACKAGED_MANIFEST: &str = "Cargo.toml.packaged";

/// Finds or builds all variants of these packages, and sets a variable for each while the build script's
/// crate is compiled: `FERRY_PTX_SM_90A` is a path, for `include_str!`; for the kernels with options,
/// `FERRY_OPTIONS_PTX_SM_90A`.
///
/// Ferry's kernels are, in this order: those of the folder [`FOLDER_VARIABLE`]; for one node, those that are
/// packaged with the build script's crate; else they are built from the sources beside that crate or packaged
/// with it. What is built lies in `OUT_DIR`; only where that is in the `target` folder of this workspace,
/// what `cargo xtask build-ptx` builds there is shared. All PTX of Ferry's kernels is checked as that of the
/// folder is.
///
/// Cargo looks at the dates of the folder and its files: after older files took their places, `touch` it.
///
/// Call it in a build script.
///
/// # Errors
///
/// [`Error::Prebuilt`] for a folder that cannot be used, [`Error::NoSources`], and those of [`build_all`].
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

/// Checks PTX of Ferry's kernels, and copies what was checked to `folder`, under a name with its hash:
/// another text is another path, whatever its date.
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

/// A folder that cargo names to build scripts.
fn folder_of(variable: &'static str) -> Result<PathBuf> {
    let folder = env::var_os(variable).map(PathBuf::from);
    folder.ok_or(Error::NoBuildScript { variable })
}

/// The folder whose PTX is used as it is, if there is one.
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

/// Builds the packages from the sources that are there.
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
    let mut artifacts = Vec::new();
    for &package in packages {
        artifacts.extend(build_all(
            &root,
            target_dir.as_ref().unwrap_or(&out_dir),
            package,
        )?);
    }
    for artifact in &artifacts {
        predate(&artifact.ptx_path)?;
    }
    if target_dir.is_none() {
        clean(&out_dir)?;
    }
    Ok(artifacts)
}

/// This workspace's `target`, if `out_dir` lies in there: then nobody else's cargo runs this.
fn shared_target_dir(root: &Path, out_dir: &Path) -> Option<PathBuf> {
    let target = root.join("target").canonicalize().ok()?;
    let is_below = out_dir.canonicalize().ok()?.starts_with(&target);
    is_below.then_some(target)
}

/// Copies packaged sources to where cargo finds them.
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

/// Removes what only the next build from other sources would use: hundreds of megabytes.
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
    let modified = fs::metadata(path).and_then(|metadata| metadata.modified());
    modified.file("read the date of", path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::PrebuiltProblem;

    #[test]
    fn what_is_embedded_was_checked_and_its_name_follows_its_text() {
        let folder = env::temp_dir().join(format!("ferry-embed-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
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
            let path = embedded(&artifact, &folder).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            paths.push(path);
        }
        assert_ne!(paths[0], paths[1]);
        artifact.package = Package::NodeKernels;
        let refused = embedded(&artifact, &folder).unwrap_err();
        assert!(
            matches!(
                &refused,
                Error::Prebuilt { path, problem: PrebuiltProblem::Layout { found: None, .. } }
                    if *path == ptx_path
            ),
            "{refused}"
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
