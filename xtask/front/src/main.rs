//! The front door, `cargo xtask`: runs the demo and the quick tests, and forwards all other commands to
//! `xtask`.

use std::env;
use std::io;
use std::process::{Command, ExitCode, ExitStatus};

use xtask_front::{Log, Screen, WORKSPACE_FEATURES};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        ["demo", ..] => xtask_front::demo(&arguments[1..]).map(code),
        ["test"] => xtask_front::quick::run(),
        // What a failure is repeated with.
        ["test", "--", ..] => xtask_front::quick::cargo_test(&arguments[2..]).map(code),
        _ => hand_on(&arguments),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

/// The exit code of a program that ended like this. A signal has no code.
fn code(status: ExitStatus) -> ExitCode {
    ExitCode::from(status.code().map_or(1, |code| code as u8))
}

/// Builds `xtask` and runs it with these arguments.
fn hand_on(arguments: &[String]) -> io::Result<ExitCode> {
    let (screen, log) = (
        Screen::default(),
        Log::create(&xtask_front::target_dir(), "xtask")?,
    );
    let mut cargo = xtask_front::cargo();
    cargo
        .arg("build")
        .args(WORKSPACE_FEATURES)
        .args(["--package", "xtask"]);
    let built = xtask_front::build(cargo, "xtask, once (a minute)", &screen, &log)?;
    if !built.success() {
        return Ok(code(built));
    }
    // Cargo puts both programs into one folder.
    let program = env::current_exe()?.with_file_name("xtask");
    Command::new(program).args(arguments).status().map(code)
}
