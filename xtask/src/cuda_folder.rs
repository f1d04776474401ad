//! A CUDA installation to build the feature `candle` with: what `CUDA_HOME` names, or one made of wheels.
//!
//! That one has nvcc, CUDA's headers and the runtime. What candle also links is large: the driver, cuBLAS,
//! cuRAND and NVRTC. Of these there are libraries of functions that fail. Their names inside are those of
//! the real ones, which a program that was linked with them loads.

use std::collections::BTreeSet;
use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use xshell::Cmd;

use crate::{Places, cuda_stub};

/// The variable in which cudarc and candle look for an installation.
const VARIABLE: &str = "CUDA_HOME";

/// The compute capability that candle's kernels are compiled for, unless this variable says another.
const CAPABILITY: [&str; 2] = ["CUDA_COMPUTE_CAP", "90"];

/// The crate that declares the functions of CUDA's libraries.
const BINDINGS: &str = "cudarc";

/// A library to link: its name, what is loaded in its place (CUDA 13's), and how its functions begin.
const LINKED: [[&str; 3]; 5] = [
    ["cuda", "libcuda.so.1", "cu"],
    ["cublas", "libcublas.so.13", "cublas"],
    ["cublasLt", "libcublasLt.so.13", "cublasLt"],
    ["curand", "libcurand.so.10", "curand"],
    ["nvrtc", "libnvrtc.so.13", "nvrtc"],
];

/// The installation.
pub(crate) fn find(places: &Places) -> Result<PathBuf> {
    if let Some(folder) = env::var_os(VARIABLE) {
        return Ok(folder.into());
    }
    let folder = places.target_dir.join("cuda-folder");
    ferry_ptx_tools::cuda_folder(&places.target_dir, &folder)?;
    for [library, loaded, prefix] in LINKED {
        let names = functions(&places.root, prefix)?;
        let stubs = folder.join("lib64/stubs");
        let source = stubs.join(format!("{library}.c"));
        let library = stubs.join(format!("lib{library}.so"));
        cuda_stub::compile(&names, loaded, &source, &library)?;
    }
    Ok(folder)
}

/// The functions of a library: not those of one whose functions begin with the same letters.
fn functions(root: &Path, prefix: &str) -> Result<BTreeSet<String>> {
    let mut names = cuda_stub::names_in(root, BINDINGS, prefix)?;
    let longer = LINKED.iter().map(|[_, _, other]| *other);
    let longer: Vec<_> = longer
        .filter(|other| other.len() > prefix.len() && other.starts_with(prefix))
        .collect();
    names.retain(|name| !longer.iter().any(|other| name.starts_with(other)));
    Ok(names)
}

/// Sets the variables with which a command builds candle.
pub(crate) fn with_installation<'a>(command: Cmd<'a>, folder: &Path) -> Result<Cmd<'a>> {
    let path = env::var_os("PATH").unwrap_or_default();
    let bin = folder.join("bin");
    // cudarc's build script takes the nvcc of PATH.
    let path = env::join_paths([bin.clone()].into_iter().chain(env::split_paths(&path)))
        .context("PATH")?;
    let [variable, capability] = CAPABILITY;
    let capability = env::var(variable).unwrap_or_else(|_| capability.to_owned());
    Ok(command
        .env(VARIABLE, folder)
        .env("NVCC", bin.join("nvcc"))
        .env("PATH", path)
        .env(variable, capability))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_library_has_its_own_functions() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let of = |prefix| functions(root, prefix).unwrap();
        let (blas, lt) = (of("cublas"), of("cublasLt"));
        assert!(blas.contains("cublasCreate_v2"), "{blas:?}");
        assert!(lt.contains("cublasLtCreate"), "{lt:?}");
        assert!(blas.is_disjoint(&lt));
        let driver = of("cu");
        assert!(driver.contains("cuLaunchKernelEx"), "{driver:?}");
        assert!(!driver.contains("curandCreateGenerator"), "{driver:?}");
    }
}
