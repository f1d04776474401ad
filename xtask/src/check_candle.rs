//! `cargo xtask check-candle`: clippy with the feature `candle` where there is no CUDA.
//!
//! candle's build script compiles many kernels with the `nvcc` that the variable `NVCC` names,
//! after it asked for its version. The one here writes empty files, so that Rust code is checked
//! and nothing can be run.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use crate::Places;

/// Answers as nvcc does, and writes what it is asked for without a content.
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

/// Checks the host library with the feature.
pub(crate) fn run(places: &Places) -> Result<()> {
    let nvcc = write_nvcc(places)?;
    let folder = nvcc.parent().context("nvcc lies in a folder")?.to_owned();
    // cudarc's build script takes the nvcc of PATH.
    let path = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths([folder].into_iter().chain(env::split_paths(&path)))?;
    let status = std::process::Command::new("cargo")
        .args([
            "clippy",
            "--package",
            "ferry-ep",
            "--lib",
            "--features",
            "candle",
        ])
        .args(["--", "-D", "warnings"])
        .current_dir(&places.root)
        .env("NVCC", &nvcc)
        .env("CUDA_COMPUTE_CAP", "90")
        .env("PATH", path)
        .status()
        .context("cannot run cargo")?;
    ensure!(
        status.success(),
        "cargo clippy with the feature candle failed"
    );
    Ok(())
}

fn write_nvcc(places: &Places) -> Result<PathBuf> {
    // As in a CUDA installation: the headers' folder is looked for beside it.
    let folder = places.target_dir.join("nvcc-stub").join("bin");
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let nvcc = folder.join("nvcc");
    fs::write(&nvcc, NVCC).with_context(|| nvcc.display().to_string())?;
    fs::set_permissions(&nvcc, fs::Permissions::from_mode(0o755))?;
    Ok(nvcc)
}
