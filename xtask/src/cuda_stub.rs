//! A `libcuda.so` of functions that fail, to link on machines without a driver. Only users of the crate
//! `cust` link the driver.
//!
//! Its soname is `libcuda.so.1`, so a program linked with it loads the real driver, and does not start
//! without one. Tests also load the stub instead of a driver.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use xshell::{Shell, cmd};

use crate::builds;
use crate::places::Places;

/// The variable that names the driver library's folder to `cust`.
pub(crate) const VARIABLE: &str = "CUDA_LIBRARY_PATH";

/// `CUDA_ERROR_STUB_LIBRARY`, which every function of the stub returns.
const STUB_LIBRARY: u32 = 34;

/// The crate that declares the driver's functions.
const BINDINGS: &str = "cust_raw";

/// Functions of the driver since CUDA 11.8, which the older [`BINDINGS`] lack.
const NEWER: [&str; 1] = ["cuLaunchKernelEx"];

/// Makes the folder to name in [`VARIABLE`], with `lib64/libcuda.so`, unless it exists.
pub(crate) fn folder(places: &Places) -> Result<PathBuf> {
    let folder = places.target_dir.join("cuda-stub");
    let names = driver_names(&places.root)?;
    let (source, library) = (folder.join("stub.c"), folder.join("lib64/libcuda.so"));
    compile(&names, "libcuda.so.1", &source, &library)?;
    Ok(folder)
}

/// Makes a library of functions that fail, unless it exists. Programs linked with it load `loaded` instead.
pub(crate) fn compile(
    names: &BTreeSet<String>,
    loaded: &str,
    source: &Path,
    library: &Path,
) -> Result<()> {
    let (shell, text) = (Shell::new()?, c_source(names));
    if library.is_file() && shell.read_file(source).is_ok_and(|made_of| made_of == text) {
        return Ok(());
    }
    shell.write_file(source, text)?;
    shell.create_dir(library.parent().context("a library is in a folder")?)?;
    let name = format!("-Wl,-soname,{loaded}");
    cmd!(shell, "cc -shared -fPIC -w {name} -o {library} {source}")
        .quiet()
        .run()
        .context("cannot compile the link stub; get a C compiler with `apt-get install gcc`")
}

/// A folder for the loader's path with the stub as the driver.
pub(crate) fn loaded_from(places: &Places) -> Result<PathBuf> {
    let folder = folder(places)?;
    let loaded = folder.join("loaded");
    let shell = Shell::new()?;
    shell.create_dir(&loaded)?;
    shell.copy_file(folder.join("lib64/libcuda.so"), loaded.join("libcuda.so.1"))?;
    Ok(loaded)
}

/// Functions of the driver.
fn driver_names(root: &Path) -> Result<BTreeSet<String>> {
    let mut names = names_in(root, BINDINGS, "cu")?;
    names.extend(NEWER.map(String::from));
    Ok(names)
}

/// Returns the names, declared in a crate, of functions that begin with `prefix` and a capital letter. Fails
/// if there are none.
pub(crate) fn names_in(root: &Path, package: &str, prefix: &str) -> Result<BTreeSet<String>> {
    let (folder, mut names) = (source_folder(root, package)?, BTreeSet::new());
    collect_names(&folder, prefix, &mut names)?;
    if names.is_empty() {
        bail!("{} declares no function {prefix}", folder.display());
    }
    Ok(names)
}

/// Cargo's folder of a crate's source.
fn source_folder(root: &Path, name: &str) -> Result<PathBuf> {
    let packages = builds::packages(root, &["--all-features"])?;
    packages
        .iter()
        .find(|package| package["name"] == name)
        .and_then(|package| Path::new(package["manifest_path"].as_str()?).parent())
        .map(Path::to_owned)
        .with_context(|| format!("the workspace does not depend on {name}"))
}

fn collect_names(folder: &Path, prefix: &str, names: &mut BTreeSet<String>) -> Result<()> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            collect_names(&path, prefix, names)?;
        } else if path.extension().is_some_and(|end| end == "rs") {
            names.extend(declared_names(&fs::read_to_string(&path)?, prefix));
        }
    }
    Ok(())
}

/// The names after `fn ` that begin with `prefix` and a capital letter.
fn declared_names(source: &str, prefix: &str) -> impl Iterator<Item = String> {
    source.split("fn ").skip(1).filter_map(move |rest| {
        let end = rest.find(|character: char| !character.is_alphanumeric() && character != '_')?;
        let name = &rest[..end];
        let is_wanted = name
            .strip_prefix(prefix)?
            .starts_with(|first: char| first.is_uppercase());
        is_wanted.then(|| name.to_owned())
    })
}

fn c_source(names: &BTreeSet<String>) -> String {
    names
        .iter()
        .map(|name| format!("int {name}(void) {{ return {STUB_LIBRARY}; }}\n"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_functions_are_found_and_others_are_not() {
        let source =
            "pub fn cuInit(Flags: u32); fn custom(); pub fn cuMemcpy_v2(\n fn cudaMalloc()";
        let names: Vec<_> = declared_names(source, "cu").collect();
        assert_eq!(names, ["cuInit", "cuMemcpy_v2"]);
    }

    #[test]
    fn every_function_that_the_host_asks_for_is_the_drivers() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let asked_for = fs::read_to_string(root.join("host/src/cuda/sys.rs")).unwrap();
        let asked_for: BTreeSet<_> = declared_names(&asked_for, "cu").collect();
        assert!(
            asked_for.contains("cuInit") && asked_for.len() > 40,
            "{asked_for:?}"
        );
        let unknown: Vec<_> = asked_for
            .difference(&driver_names(root).unwrap())
            .cloned()
            .collect();
        assert!(unknown.is_empty(), "no driver has {unknown:?}");
    }

    #[test]
    fn the_stub_says_that_it_is_one() {
        let names = BTreeSet::from(["cuInit".to_owned()]);
        assert_eq!(c_source(&names), "int cuInit(void) { return 34; }\n");
    }
}
