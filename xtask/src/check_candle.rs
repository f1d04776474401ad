//! `cargo xtask check-candle`: clippy with the feature `candle` where there is no CUDA.
//!
//! candle's build script compiles many kernels with the `nvcc` that the variable `NVCC` names,
//! after it asked for its version. The one here writes empty files, so that Rust code is checked
//! and nothing can be run.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context, Result};
use xshell::{Shell, cmd};

use crate::{Places, cuda_folder};

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

/// Checks the host library and the tests with the feature.
pub(crate) fn run(places: &Places) -> Result<()> {
    let folder = places.target_dir.join("nvcc-stub");
    write_nvcc(&folder)?;
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    let packages = ["--package", "ferry-ep", "--package", "ferry-tests"];
    let features = ["--features", "ferry-ep/candle,ferry-tests/candle"];
    let clippy = cmd!(
        shell,
        "cargo clippy --lib {packages...} {features...} -- -D warnings"
    );
    Ok(cuda_folder::with_installation(clippy, &folder)?.run()?)
}

/// As in a CUDA installation: the headers' folder is looked for beside `bin`.
fn write_nvcc(folder: &Path) -> Result<()> {
    let nvcc = folder.join("bin/nvcc");
    let shell = Shell::new()?;
    shell.write_file(&nvcc, NVCC)?;
    fs::set_permissions(&nvcc, fs::Permissions::from_mode(0o755))
        .with_context(|| nvcc.display().to_string())
}
