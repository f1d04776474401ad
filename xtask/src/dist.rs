//! `cargo xtask dist`: what a GPU machine without cargo needs, in one file.

use std::path::PathBuf;

use anyhow::Result;
use xshell::{Shell, cmd};

use crate::{Places, cuda_folder, cuda_stub};

/// The name of the script that runs the packed program.
pub(crate) const SCRIPT_NAME: &str = "run-gpu-tests.sh";

const SCRIPT: &str = include_str!("run-gpu-tests.sh");

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

/// Builds the test program with candle, whose build takes nvcc, and packs it, without a script.
pub(crate) fn run_candle(places: &Places) -> Result<()> {
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    let folder = cuda_folder::find(places)?;
    println!("building ferry-tests with candle, by {}", folder.display());
    let package = ["--package", "ferry-tests", "--features", "candle"];
    let build = cmd!(shell, "cargo build --release {package...}");
    cuda_folder::with_installation(build, &folder)?.run()?;
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

/// Builds the test program with all that GPUs need, and gives the folder to pack. With `cust`, it links the
/// driver, so it does not start without one.
pub(crate) fn stage(places: &Places) -> Result<PathBuf> {
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    shell.set_var(cuda_stub::VARIABLE, cuda_stub::folder(places)?);
    println!("building ferry-tests for GPUs");
    let package = ["--package", "ferry-tests", "--features", "cudarc,cust,mpi"];
    cmd!(shell, "cargo build --quiet --release {package...}")
        .quiet()
        .run()?;
    let folder = places.target_dir.join("dist/ferry-tests");
    shell.remove_path(&folder)?;
    shell.create_dir(&folder)?;
    shell.copy_file(places.target_dir.join("release/ferry-tests"), &folder)?;
    let script = folder.join(SCRIPT_NAME);
    shell.write_file(&script, SCRIPT)?;
    cmd!(shell, "chmod +x {script}").quiet().run()?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Output};

    fn run_script(arguments: &[&str]) -> Output {
        let mut command = Command::new("bash");
        command.arg("-c").arg(SCRIPT).arg(SCRIPT_NAME);
        command.args(arguments).output().unwrap()
    }

    #[test]
    fn the_script_turns_multicast_off_and_requires_the_gpus() {
        assert!(SCRIPT.contains("export NVSHMEM_DISABLE_NVLS=1 NCCL_NVLS_ENABLE=0\n"));
        // Three groups, and killed processes of two.
        assert_eq!(SCRIPT.matches("--require-gpus \"$gpus\"").count(), 5);
    }

    #[test]
    fn the_script_refuses_a_count_that_is_none() {
        let output = run_script(&["none"]);
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("usage"));
        let output = run_script(&["1", "--sanitise"]);
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("usage"));
    }

    #[test]
    fn the_script_sanitizes_on_one_gpu() {
        let output = run_script(&["2", "--sanitize"]);
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("give 1"));
        // There is no program here; that it is the only one is what counts.
        let output = run_script(&["1", "--sanitize"]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(
            text,
            "+ ./ferry-tests sanitize\nferry: 0 passed, 1 failed\n"
        );
        assert_eq!(output.status.code(), Some(1));
    }
}
