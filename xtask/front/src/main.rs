//! The front door, `cargo xtask`: runs the demo, and forwards all other commands to `xtask`.

use std::env;
use std::io;
use std::process::{ExitCode, ExitStatus};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let status = match arguments.split_first() {
        Some((command, rest)) if command == "demo" => xtask_front::demo(rest),
        _ => hand_on(&arguments),
    };
    match status {
        // A signal has no code.
        Ok(status) => ExitCode::from(status.code().map_or(1, |code| code as u8)),
        Err(error) => {
            eprintln!("error: cannot run cargo: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Builds `xtask` and runs it with these arguments.
fn hand_on(arguments: &[String]) -> io::Result<ExitStatus> {
    let mut cargo = xtask_front::cargo();
    cargo.args(["run", "--quiet"]);
    cargo.args(xtask_front::WORKSPACE_FEATURES);
    cargo.args(["--package", "xtask", "--"]);
    cargo.args(arguments).status()
}
