//! `cargo xtask dist`: the test program for a GPU machine without cargo, in one file.

use std::path::PathBuf;

use anyhow::Result;
use xshell::{Shell, cmd};

use crate::places::Places;
use crate::{builds, commit, cuda_stub};

/// The name of the script that runs the packed program.
pub(crate) const SCRIPT_NAME: &str = "run-gpu-tests.sh";

const SCRIPT: &str = include_str!("run-gpu-tests.sh");

/// The file beside the script that names the program's commit.
const COMMIT_NAME: &str = "commit";

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

/// Packs the test program with the script that runs it.
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

/// Builds the test program with all features for GPUs and returns the folder to pack. With `cust`, it links
/// the driver, so it does not start without one.
pub(crate) fn stage(places: &Places) -> Result<PathBuf> {
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    let mut cargo = builds::cargo(["build", "--release"].into_iter().chain(PACKAGES));
    cargo.env(cuda_stub::VARIABLE, cuda_stub::folder(places)?);
    builds::build(places, "dist", "ferry-tests for GPUs (minutes)", cargo)?;
    let folder = places.target_dir.join("dist/ferry-tests");
    shell.remove_path(&folder)?;
    shell.create_dir(&folder)?;
    for file in ["ferry-tests", NETWORK] {
        shell.copy_file(places.target_dir.join("release").join(file), &folder)?;
    }
    shell.write_file(folder.join(COMMIT_NAME), commit::name(&shell))?;
    let script = folder.join(SCRIPT_NAME);
    shell.write_file(&script, SCRIPT)?;
    cmd!(shell, "chmod +x {script}").quiet().run()?;
    Ok(folder)
}

#[cfg(test)]
mod tests;
