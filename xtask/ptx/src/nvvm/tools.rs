//! Tools that the second code generator needs installed.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use ferry_build::{Error, Result, stdout_of, toolchain_command};

use super::checkout::TOOLCHAIN;

/// The command that installs the toolchain with its components.
pub(super) const GET_TOOLCHAIN: &str = "rustup toolchain install nightly-2026-04-02 --profile minimal \
     --component rust-src --component rustc-dev --component llvm-tools";

/// The command that installs LLVM 19 and the libraries that it needs.
const GET_LLVM: &str = "apt-get install llvm-19-dev libpolly-19-dev libzstd-dev libclang-19-dev";

/// The program that prints LLVM 19's folders.
pub(super) fn llvm_config() -> PathBuf {
    env::var_os("LLVM_CONFIG_19").map_or_else(|| "llvm-config-19".into(), PathBuf::from)
}

/// Checks that the toolchain, its components and LLVM 19 are installed. Returns the toolchain's sysroot.
pub(super) fn check(workspace_root: &Path) -> Result<PathBuf> {
    let sysroot = sysroot(workspace_root)?;
    let rustlib = sysroot.join("lib/rustlib");
    let of_host = |name: &str| -> bool {
        let hosts = std::fs::read_dir(&rustlib).into_iter().flatten().flatten();
        let mut found = hosts.map(|host| host.path().join(name));
        found.any(|path| path.exists())
    };
    let has_compiler = || {
        let hosts = std::fs::read_dir(&rustlib).into_iter().flatten().flatten();
        let files = hosts.filter_map(|host| std::fs::read_dir(host.path().join("lib")).ok());
        let mut names = files.flatten().flatten().map(|file| file.file_name());
        names.any(|name| name.to_string_lossy().starts_with("librustc_middle"))
    };
    let components = [
        (
            "rust-src",
            rustlib.join("src/rust/library/core/Cargo.toml").is_file(),
        ),
        ("rustc-dev", has_compiler()),
        ("llvm-tools", of_host("bin/llvm-as")),
    ];
    for (component, is_there) in components {
        if !is_there {
            return Err(missing(
                &format!("{component} of {TOOLCHAIN}"),
                GET_TOOLCHAIN,
            ));
        }
    }
    let config = llvm_config();
    let ask = |what: &str| {
        stdout_of(Command::new(&config).arg(what), || {
            missing(&config.to_string_lossy(), GET_LLVM)
        })
    };
    check_version(ask("--version")?.trim(), &config)?;
    let polly = Path::new(ask("--libdir")?.trim()).join("libPolly.a");
    if polly.is_file() {
        Ok(sysroot)
    } else {
        Err(missing(&polly.to_string_lossy(), GET_LLVM))
    }
}

/// Refuses another LLVM.
fn check_version(version: &str, config: &Path) -> Result<()> {
    match version.split('.').next() {
        Some("19") => Ok(()),
        _ => Err(missing(
            &format!("LLVM 19 ({} is of LLVM {version})", config.display()),
            GET_LLVM,
        )),
    }
}

/// The toolchain's sysroot. Asks rustup first whether it is installed: the compiler's proxy would install it.
fn sysroot(workspace_root: &Path) -> Result<PathBuf> {
    let mut rustup = toolchain_command("rustup", workspace_root);
    let toolchains = stdout_of(rustup.args(["toolchain", "list"]), || {
        missing("rustup", "https://rustup.rs")
    })?;
    if !toolchains.lines().any(|line| line.starts_with(TOOLCHAIN)) {
        return Err(missing(
            &format!("the toolchain {TOOLCHAIN}"),
            GET_TOOLCHAIN,
        ));
    }
    let mut rustc = toolchain_command("rustc", workspace_root);
    rustc.env("RUSTUP_TOOLCHAIN", TOOLCHAIN);
    let missing_rustc = || missing("rustc", GET_TOOLCHAIN);
    let sysroot = stdout_of(rustc.args(["--print", "sysroot"]), missing_rustc)?;
    Ok(sysroot.trim().into())
}

fn missing(tool: &str, get: &str) -> Error {
    Error::MissingTool {
        tool: tool.into(),
        needed_for: "rustc_codegen_nvvm is built with it",
        get: get.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_llvm_is_refused_by_its_version_with_the_command_that_gets_19() {
        assert!(check_version("19.1.7", Path::new("llvm-config-19")).is_ok());
        for version in ["18.1.3", "20.1.0", ""] {
            let text = check_version(version, Path::new("llvm-config"))
                .unwrap_err()
                .to_string();
            assert!(text.contains(&format!("is of LLVM {version}")), "{text}");
            assert!(text.contains("apt-get install llvm-19-dev"), "{text}");
        }
        assert!(GET_TOOLCHAIN.contains(TOOLCHAIN));
    }
}
