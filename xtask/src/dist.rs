//! `cargo xtask dist`: the test program for a GPU machine without cargo, in one file.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Result;
use xshell::{Shell, cmd};

use crate::places::Places;
use crate::{builds, commit, cuda_stub};

/// The file beside the program that names its commit.
const COMMIT_NAME: &str = "commit";
/// The test program. `ferry-tests all` runs every suite for GPUs.
const PROGRAM: &str = "ferry-tests";

/// The transport of the tests' network, which the program expects beside itself.
const NETWORK: &str = "libnvshmem_transport_ferry.so";

/// Packages of the test program and the transport, and features.
const PACKAGES: [&str; 6] = [
    "--package",
    "ferry-tests",
    "--package",
    "ferry-network-plugin",
    "--features",
    "ferry-tests/cudarc,ferry-tests/cust,ferry-tests/mpi",
];

/// Packs the test program.
pub(crate) fn run(places: &Places) -> Result<()> {
    stage(places)?;
    let shell = Shell::new()?;
    let dist = places.target_dir.join("dist");
    let packed = dist.join("ferry-tests.tar.gz");
    cmd!(shell, "tar -C {dist} -czf {packed} ferry-tests")
        .quiet()
        .run()?;
    println!("{}", packed.display());
    Ok(())
}

/// Runs every suite for GPUs, with these arguments. The program ends with a line that counts them.
pub(crate) fn run_suites(places: &Places, gpus: u32, arguments: &[String]) -> Result<ExitCode> {
    let program = stage(places)?.join(PROGRAM);
    let status = Command::new(program)
        .args(["all", &gpus.to_string()])
        .args(arguments)
        .status()?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Builds the test program with all features for GPUs and returns the folder to pack. With `cust`, it links
/// the driver, so it does not start without one.
fn stage(places: &Places) -> Result<PathBuf> {
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    let mut cargo = builds::cargo(["build", "--release"].into_iter().chain(PACKAGES));
    cargo.env(cuda_stub::VARIABLE, cuda_stub::folder(places)?);
    builds::build(places, "dist", "ferry-tests for GPUs (minutes)", cargo)?;
    let folder = places.target_dir.join("dist/ferry-tests");
    shell.remove_path(&folder)?;
    shell.create_dir(&folder)?;
    for file in [PROGRAM, NETWORK] {
        shell.copy_file(places.target_dir.join("release").join(file), &folder)?;
    }
    shell.write_file(folder.join(COMMIT_NAME), commit::name(&shell))?;
    Ok(folder)
}
