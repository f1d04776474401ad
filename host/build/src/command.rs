//! Running tools: their environment, their errors, and the toolchain's LLVM tools.

use std::env;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};

/// Prefixes of `CARGO_*` variables that belong to the user and are kept.
const KEPT_CARGO_PREFIXES: [&str; 6] = [
    "CARGO_HOME",
    "CARGO_HTTP_",
    "CARGO_NET_",
    "CARGO_REGISTR",
    "CARGO_TERM_",
    "CARGO_INSTALL_",
];

/// Other variables that an outer cargo, rustup or make sets for its children.
const OUTER_BUILD_VARIABLES: [&str; 14] = [
    "CARGO",
    "RUSTFLAGS",
    "RUSTDOCFLAGS",
    "RUSTC",
    "RUSTDOC",
    "RUSTUP_TOOLCHAIN",
    "MAKEFLAGS",
    "MFLAGS",
    "OUT_DIR",
    "TARGET",
    "HOST",
    "NUM_JOBS",
    "OPT_LEVEL",
    "PROFILE",
];

/// Whether a nested cargo must not see this variable of the outer one.
fn belongs_to_outer_build(name: &str) -> bool {
    let kept = KEPT_CARGO_PREFIXES
        .iter()
        .any(|prefix| name.starts_with(prefix));
    let cargo = name.starts_with("CARGO_") && !kept;
    cargo || name.starts_with("RUSTC_") || OUTER_BUILD_VARIABLES.contains(&name)
}

/// A command of the toolchain that the workspace pins, as if run by hand in its root.
pub fn toolchain_command(program: &str, workspace_root: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(workspace_root);
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(belongs_to_outer_build) {
            command.env_remove(name);
        }
    }
    command
}

/// Runs a command and returns its standard output.
pub fn stdout_of(command: &mut Command, missing: impl FnOnce() -> Error) -> Result<String> {
    Ok(String::from_utf8_lossy(&output_of(command, missing)?.stdout).into_owned())
}

/// Runs a command to its end. Returns `missing()` if there is no such program.
pub fn output_of(
    command: &mut Command,
    missing: impl FnOnce() -> Error,
) -> Result<std::process::Output> {
    let output = match command.output() {
        Ok(output) => output,
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(missing()),
        Err(source) => {
            let path = PathBuf::from(command.get_program());
            return Err(Error::File {
                action: "run",
                path,
                source,
            });
        }
    };
    if output.status.success() {
        return Ok(output);
    }
    let printed = [&output.stdout[..], &output.stderr[..]].concat();
    Err(Error::ToolFailed {
        command: command_line(command),
        status: output.status,
        output: String::from_utf8_lossy(&printed).trim_end().to_owned(),
    })
}

/// The command line.
fn command_line(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect::<Vec<_>>()
        .join(" ")
}

/// Returns the folder of LLVM tools (`llvm-link`, `opt`, `llvm-dis`, `llvm-as`) of the pinned toolchain.
///
/// Also checks that all components needed by the PTX build are installed.
pub fn llvm_tools(workspace_root: &Path) -> Result<PathBuf> {
    let missing_rustc = || Error::MissingTool {
        tool: "rustc".into(),
        needed_for: "it compiles the kernels",
        get: "rustup toolchain install".into(),
    };
    let mut rustc = toolchain_command("rustc", workspace_root);
    let sysroot = stdout_of(rustc.args(["--print", "sysroot"]), missing_rustc)?;
    let mut rustc = toolchain_command("rustc", workspace_root);
    let host = stdout_of(rustc.args(["--print", "host-tuple"]), missing_rustc)?;
    let rustlib = Path::new(sysroot.trim()).join("lib/rustlib");
    let tools = rustlib.join(host.trim()).join("bin");
    let needed = [
        (
            "rust-src",
            rustlib.join("src/rust/library/core/Cargo.toml"),
            "core is built from source",
        ),
        (
            "llvm-tools",
            tools.join("llvm-link"),
            "it reduces NVSHMEM's bitcode",
        ),
        (
            "llvm-bitcode-linker",
            tools.join("self-contained/llvm-bitcode-linker"),
            "it links the kernels",
        ),
    ];
    for (component, file, needed_for) in needed {
        if !file.is_file() {
            return Err(Error::MissingTool {
                tool: format!("the toolchain component {component}"),
                needed_for,
                get: format!("rustup component add {component}"),
            });
        }
    }
    Ok(tools)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outer_build_variables_are_dropped_and_the_users_own_are_kept() {
        for dropped in [
            "CARGO_ENCODED_RUSTFLAGS",
            "CARGO_TARGET_DIR",
            "RUSTFLAGS",
            "RUSTC_WRAPPER",
        ] {
            assert!(belongs_to_outer_build(dropped), "{dropped}");
        }
        for kept in [
            "CARGO_HOME",
            "CARGO_HTTP_CAINFO",
            "CARGO_NET_OFFLINE",
            "PATH",
            "HOME",
        ] {
            assert!(!belongs_to_outer_build(kept), "{kept}");
        }
    }

    #[test]
    fn a_missing_program_is_named_with_the_command_that_gets_it() {
        let missing = || Error::MissingTool {
            tool: "ferry-no-such-tool".into(),
            needed_for: "this test",
            get: "apt-get install ferry-no-such-tool".into(),
        };
        let error = output_of(&mut Command::new("ferry-no-such-tool"), missing).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("apt-get install ferry-no-such-tool"),
            "{text}"
        );
    }

    #[test]
    fn a_failing_program_shows_its_command_line_and_output() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo broken; exit 3"]);
        let error = output_of(&mut command, || unreachable!("sh is there")).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("sh -c") && text.contains("broken") && text.contains('3'),
            "{text}"
        );
    }
}
