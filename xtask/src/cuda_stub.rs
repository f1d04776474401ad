//! Something to link to on machines without a driver: a `libcuda.so` of empty functions. Only what uses
//! the crate `cust` links one.
//!
//! Its name inside is `libcuda.so.1`, so a program linked with it loads the real driver where
//! there is one, and does not start where there is none. Tests also load it in a driver's place.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use xshell::{Shell, cmd};

use crate::Places;

/// The variable in which `cust` looks for the driver library.
pub(crate) const VARIABLE: &str = "CUDA_LIBRARY_PATH";

/// `CUDA_ERROR_STUB_LIBRARY`, which every function of the stub returns.
const STUB_LIBRARY: u32 = 34;

/// The crate that declares the driver's functions.
const BINDINGS: &str = "cust_raw";

/// Functions that the driver has and [`BINDINGS`], which are older, have not. From CUDA 11.8 on.
const NEWER: [&str; 1] = ["cuLaunchKernelEx"];

/// The folder to name in [`VARIABLE`]; its `lib64/libcuda.so` is made unless it is there.
pub(crate) fn folder(places: &Places) -> Result<PathBuf> {
    let folder = places.target_dir.join("cuda-stub");
    let library = folder.join("lib64/libcuda.so");
    let names = driver_names(&places.root)?;
    let shell = Shell::new()?;
    let (source, text) = (folder.join("stub.c"), c_source(&names));
    if library.is_file()
        && shell
            .read_file(&source)
            .is_ok_and(|made_of| made_of == text)
    {
        return Ok(folder);
    }
    shell.write_file(&source, text)?;
    shell.create_dir(folder.join("lib64"))?;
    cmd!(
        shell,
        "cc -shared -fPIC -w -Wl,-soname,libcuda.so.1 -o {library} {source}"
    )
    .quiet()
    .run()
    .context("cannot compile the link stub; get a C compiler with `apt-get install gcc`")?;
    Ok(folder)
}

/// A folder for the loader's path in which the stub is the driver: each of its functions fails.
pub(crate) fn loaded_from(places: &Places) -> Result<PathBuf> {
    let folder = folder(places)?;
    let loaded = folder.join("loaded");
    let shell = Shell::new()?;
    shell.create_dir(&loaded)?;
    shell.copy_file(folder.join("lib64/libcuda.so"), loaded.join("libcuda.so.1"))?;
    Ok(loaded)
}

/// The functions that a driver has.
fn driver_names(root: &Path) -> Result<BTreeSet<String>> {
    let mut names = NEWER.map(String::from).into();
    let bindings = bindings_folder(root)?;
    collect_names(&bindings, &mut names)?;
    if names.len() == NEWER.len() {
        bail!("{} declares no driver function", bindings.display());
    }
    Ok(names)
}

/// Where cargo keeps the source of [`BINDINGS`].
fn bindings_folder(root: &Path) -> Result<PathBuf> {
    let shell = Shell::new()?;
    shell.change_dir(root);
    let metadata = cmd!(shell, "cargo metadata --format-version 1 --all-features")
        .quiet()
        .read()?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata lists no packages")?;
    packages
        .iter()
        .find(|package| package["name"] == BINDINGS)
        .and_then(|package| Path::new(package["manifest_path"].as_str()?).parent())
        .map(Path::to_owned)
        .with_context(|| format!("the workspace does not depend on {BINDINGS}"))
}

fn collect_names(folder: &Path, names: &mut BTreeSet<String>) -> Result<()> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            collect_names(&path, names)?;
        } else if path.extension().is_some_and(|end| end == "rs") {
            names.extend(declared_names(&fs::read_to_string(&path)?));
        }
    }
    Ok(())
}

/// The names after `fn ` that are the driver's: `cu` and a capital letter.
fn declared_names(source: &str) -> impl Iterator<Item = String> + '_ {
    source.split("fn ").skip(1).filter_map(|rest| {
        let end = rest.find(|character: char| !character.is_alphanumeric() && character != '_')?;
        let name = &rest[..end];
        let is_driver = name
            .strip_prefix("cu")?
            .starts_with(|first: char| first.is_uppercase());
        is_driver.then(|| name.to_owned())
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
        let names: Vec<_> = declared_names(source).collect();
        assert_eq!(names, ["cuInit", "cuMemcpy_v2"]);
    }

    #[test]
    fn every_function_that_the_host_asks_for_is_the_drivers() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let asked_for = fs::read_to_string(root.join("host/src/cuda/sys.rs")).unwrap();
        let asked_for: BTreeSet<_> = declared_names(&asked_for).collect();
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
