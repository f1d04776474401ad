//! `cargo xtask dist`: what a GPU machine without cargo needs, in one file.

use anyhow::Result;
use xshell::{Shell, cmd};

use crate::{Places, gpu_tests};

/// Runs the packed program; `ENVIRONMENT` stands where the variables go.
const SCRIPT: &str = include_str!("run-gpu-tests.sh");

/// Builds the test program and packs it with the script that runs it.
pub(crate) fn run(places: &Places) -> Result<()> {
    let program = gpu_tests::build_program(places)?;
    let shell = Shell::new()?;
    let dist = places.target_dir.join("dist");
    let folder = dist.join("ferry-tests");
    shell.remove_path(&folder)?;
    shell.create_dir(&folder)?;
    shell.copy_file(&program, &folder)?;
    let script_path = folder.join("run-gpu-tests.sh");
    shell.write_file(&script_path, script())?;
    cmd!(shell, "chmod +x {script_path}").quiet().run()?;
    let packed = dist.join("ferry-tests.tar.gz");
    cmd!(shell, "tar -C {dist} -czf {packed} ferry-tests")
        .quiet()
        .run()?;
    println!("{}", packed.display());
    Ok(())
}

/// The script, with the variables that the programs need.
fn script() -> String {
    let exports = gpu_tests::ENVIRONMENT.map(|(name, value)| format!("export {name}={value}"));
    SCRIPT.replace("# ENVIRONMENT", &exports.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_turns_multicast_off_and_requires_the_gpus() {
        let script = script();
        assert!(script.contains("export NVSHMEM_DISABLE_NVLS=1\nexport NCCL_NVLS_ENABLE=0\n"));
        assert_eq!(script.matches("--require-gpus \"$gpus\"").count(), 2);
    }

    #[test]
    fn the_script_is_valid_and_refuses_a_count_that_is_none() {
        let run = |arguments: &[&str]| {
            let mut command = std::process::Command::new("bash");
            command
                .arg("-c")
                .arg(script())
                .arg("run-gpu-tests.sh")
                .args(arguments)
                .output()
                .unwrap()
        };
        let output = run(&["none"]);
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("usage"));
    }
}
