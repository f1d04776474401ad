//! `cargo xtask test --gpus N`: the test program in one process, and one process a GPU.

use std::path::PathBuf;

use anyhow::{Result, bail};
use xshell::{Shell, cmd};

use crate::{Places, cuda_stub};

/// NVLink multicast is off: not every machine that has it lets a process use it.
pub(crate) const ENVIRONMENT: [(&str, &str); 2] =
    [("NVSHMEM_DISABLE_NVLS", "1"), ("NCCL_NVLS_ENABLE", "0")];

/// Builds the test program with all that GPUs need and gives its path.
pub(crate) fn build_program(places: &Places) -> Result<PathBuf> {
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    shell.set_var(cuda_stub::VARIABLE, cuda_stub::folder(places)?);
    println!("building ferry-tests for GPUs");
    cmd!(
        shell,
        "cargo build --quiet --release --package ferry-tests --features cuda,mpi"
    )
    .quiet()
    .run()?;
    Ok(places.target_dir.join("release/ferry-tests"))
}

/// Runs both ways of using `gpus` GPUs, and ends with one line that counts them.
pub(crate) fn run(places: &Places, gpus: u32) -> Result<()> {
    let program = build_program(places)?;
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    for (name, value) in ENVIRONMENT {
        shell.set_var(name, value);
    }
    let count = gpus.to_string();
    let alone = cmd!(shell, "{program} gpu --require-gpus {count}");
    let mpirun = ["mpirun", "--allow-run-as-root", "-n"];
    let [launcher, launcher_arguments @ ..] = mpirun;
    let launched = cmd!(
        shell,
        "{launcher} {launcher_arguments...} {count} {program} gpu --group nvshmem --require-gpus {count}"
    );
    let outcomes = [alone, launched].map(|command| command.run());
    let failed = outcomes.iter().filter(|outcome| outcome.is_err()).count();
    for error in outcomes.iter().filter_map(|outcome| outcome.as_ref().err()) {
        eprintln!("error: {error}");
    }
    println!("ferry: {} passed, {failed} failed", outcomes.len() - failed);
    if failed > 0 {
        bail!("{failed} of {} runs on {gpus} GPUs failed", outcomes.len());
    }
    Ok(())
}
