//! Commands of the front door that must start soon after a checkout. `xtask` has all others, and takes a
//! minute to compile.

use std::env;
use std::io;
use std::process::{Command, ExitStatus};

/// Arguments of cargo for the features that the whole workspace needs, so that builds of different packages
/// compile dependencies once.
pub const WORKSPACE_FEATURES: [&str; 3] = [
    "-Zfeature-unification",
    "--config",
    "resolver.feature-unification='workspace'",
];

/// Cargo of the toolchain that built this program. It runs in the user's folder, to which paths among the
/// arguments are relative.
pub fn cargo() -> Command {
    Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Builds and runs the demo with these arguments, with GPU support if there is a driver.
///
/// # Errors
///
/// Cargo cannot be run.
pub fn demo(arguments: &[String]) -> io::Result<ExitStatus> {
    let on_gpus = wants_gpus(arguments) && has_driver();
    eprintln!("building {}", what_is_built(on_gpus));
    let mut cargo = cargo();
    cargo.args([
        "run",
        "--quiet",
        "--package",
        "ferry-tests",
        "--no-default-features",
    ]);
    cargo.args(["--bin", "ferry-demo"]);
    if on_gpus {
        cargo.args(["--release", "--features", "cuda"]);
    }
    cargo.arg("--").args(arguments).status()
}

/// Message about the parts of the demo that are built.
fn what_is_built(on_gpus: bool) -> &'static str {
    if on_gpus {
        "the demo for GPUs: the kernels, the library, the oracle (a few minutes the first time)"
    } else {
        "the demo: the library, its simulator, the oracle (a minute or two the first time)"
    }
}

/// Whether `--gpus none` is not among the arguments.
fn wants_gpus(arguments: &[String]) -> bool {
    let pair = arguments
        .windows(2)
        .any(|pair| pair[0] == "--gpus" && pair[1] == "none");
    !pair && !arguments.iter().any(|argument| argument == "--gpus=none")
}

/// Whether there is a driver.
fn has_driver() -> bool {
    // SAFETY: the driver library's constructors touch nothing of this program.
    unsafe { libloading::Library::new("libcuda.so.1") }.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_none_is_understood_in_both_spellings() {
        let wants = |text: &str| wants_gpus(&text.split(' ').map(String::from).collect::<Vec<_>>());
        assert!(wants("--ranks 4") && wants("--gpus auto") && wants("--gpus 2 --text none"));
        assert!(!wants("--ranks 4 --gpus none") && !wants("--gpus=none"));
    }

    #[test]
    fn people_are_told_of_kernels_that_are_built() {
        assert!(
            what_is_built(true).contains("kernels") && !what_is_built(false).contains("kernels")
        );
    }
}
