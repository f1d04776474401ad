//! `cargo xtask check-candle` and `cargo xtask dist --candle`: builds with the feature `candle`. candle's
//! build script compiles many kernels with the nvcc that the variable `NVCC` names.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use xshell::{Cmd, Shell, cmd};

use crate::cuda_stub;
use crate::places::Places;

/// The variable in which cudarc and candle look for an installation.
const VARIABLE: &str = "CUDA_HOME";

/// Variable with the compute capability that candle's kernels are compiled for, and its default.
const CAPABILITY: [&str; 2] = ["CUDA_COMPUTE_CAP", "90"];

/// The crate that declares the functions of CUDA's libraries.
const BINDINGS: &str = "cudarc";

/// Libraries that candle links: name, file that is loaded instead (CUDA 13's), prefix of the functions.
const LINKED: [[&str; 3]; 5] = [
    ["cuda", "libcuda.so.1", "cu"],
    ["cublas", "libcublas.so.13", "cublas"],
    ["cublasLt", "libcublasLt.so.13", "cublasLt"],
    ["curand", "libcurand.so.10", "curand"],
    ["nvrtc", "libnvrtc.so.13", "nvrtc"],
];

/// Answers like nvcc, and writes empty files.
const NVCC: &str = r#"#!/bin/sh
set -eu
ptx= folder=. output= source=
while [ $# -gt 0 ]; do
    case $1 in
    --version)
        printf '%s\n' 'nvcc: NVIDIA (R) Cuda compiler driver' 'A stub that writes empty files' '' \
            'Cuda compilation tools, release 13.0, V13.0.0'
        exit ;;
    --list-gpu-code) printf 'sm_80\nsm_90\n'; exit ;;
    --ptx) ptx=yes ;;
    --output-directory) folder=$2; shift ;;
    -o) output=$2; shift ;;
    *.cu) source=$1 ;;
    esac
    shift
done
if [ -n "$ptx" ]; then output=$folder/$(basename "$source" .cu).ptx; fi
case $output in
*.a) printf '!<arch>\n' > "$output" ;;
*) : > "$output" ;;
esac
"#;

/// Runs clippy on the host library and the tests, with [`NVCC`]: nothing that it builds can run.
pub(crate) fn check(places: &Places) -> Result<()> {
    let folder = places.target_dir.join("nvcc-stub");
    let nvcc = folder.join("bin/nvcc");
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    shell.write_file(&nvcc, NVCC)?;
    fs::set_permissions(&nvcc, fs::Permissions::from_mode(0o755))
        .with_context(|| nvcc.display().to_string())?;
    let packages = ["--package", "ferry-ep", "--package", "ferry-tests"];
    let features = ["--features", "ferry-ep/candle,ferry-tests/candle"];
    let clippy = cmd!(
        shell,
        "cargo clippy --lib {packages...} {features...} -- -D warnings"
    );
    Ok(with_installation(clippy, &folder)?.run()?)
}

/// Builds the test program with CUDA's nvcc, and packs it.
pub(crate) fn dist(places: &Places) -> Result<()> {
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    let folder = installation(places)?;
    println!("building ferry-tests with candle, by {}", folder.display());
    let package = ["--package", "ferry-tests", "--features", "candle"];
    let build = cmd!(shell, "cargo build --release {package...}");
    with_installation(build, &folder)?.run()?;
    let dist = places.target_dir.join("dist");
    shell.create_dir(&dist)?;
    let (program, packed) = (
        dist.join("candle-ferry-tests"),
        dist.join("candle-ferry-tests.gz"),
    );
    let built = places.target_dir.join("release/ferry-tests");
    cmd!(shell, "strip -o {program} {built}").quiet().run()?;
    cmd!(shell, "gzip --force --keep {program}").quiet().run()?;
    println!("{}", packed.display());
    Ok(())
}

/// The CUDA installation that `CUDA_HOME` names, or one made of wheels: nvcc, CUDA's headers, the runtime,
/// and stubs of the large libraries that candle links; a program that starts loads the real ones instead.
fn installation(places: &Places) -> Result<PathBuf> {
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

/// Returns the names of the functions that begin with `prefix`, without those that begin with a longer prefix
/// of [`LINKED`]: `cublas` does not include `cublasLt`.
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
fn with_installation<'a>(command: Cmd<'a>, folder: &Path) -> Result<Cmd<'a>> {
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
