//! `cargo xtask demo`.

use std::io;
use std::process::ExitStatus;

use crate::cargo::cargo;

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
