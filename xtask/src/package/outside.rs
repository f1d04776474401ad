//! A project outside this workspace that depends on the packages as a registry serves them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::SystemTime;

use anyhow::{Context, Result, bail, ensure};

use super::BUILD_SETTINGS;
use super::published::{HOST, Published, copy_package};
use crate::places::Places;

/// The project's program.
const PROGRAM: &str = include_str!("outside_main.rs");

/// Programs that a build with packaged PTX must not run: they are replaced by programs that fail.
const FORBIDDEN: [&str; 4] = ["rustup", "python3", "nvcc", "llvm-link"];

/// The project and its toolchain.
struct Project<'a> {
    folder: PathBuf,
    /// The toolchain's programs.
    bin: PathBuf,
    /// The target folder, in which cargo has verified the packages.
    build: PathBuf,
    /// Folders of the packages, which no build may write to.
    unpacked: &'a Path,
}

/// Builds and runs the project with a stable toolchain, offline, with feature `cuda` and packaged PTX; then
/// with [`FOLDER_VARIABLE`](ferry_build::FOLDER_VARIABLE), right and wrong. With `full`, also builds it with
/// the feature `nvshmem`, which compiles kernels.
pub(super) fn run(
    places: &Places,
    crates: &Path,
    published: &[Published],
    toolchain: &str,
    full: bool,
) -> Result<()> {
    let unpacked = crates.join("unpacked");
    let project = Project::generate(places, crates, &unpacked, published, toolchain)?;
    let before = files(&unpacked)?;
    let printed = project.run("cuda", &[])?;
    print!("{printed}");
    ensure!(
        printed.contains("simulated: every sum is right"),
        "no round was run"
    );

    let host = published
        .iter()
        .find(|package| package.folder == Path::new(HOST));
    let host = host.context("the host library does not publish")?;
    let packaged = unpacked
        .join(host.full_name())
        .join(ferry_build::PACKAGED_PTX);
    let copy = crates.join("ptx");
    if copy.is_dir() {
        fs::remove_dir_all(&copy)?;
    }
    copy_package(&packaged, &copy, &|_| true)?;
    project.run("cuda", &[("FERRY_PTX_DIR", &copy)])?;
    fs::remove_file(copy.join("options/sm_90a.ptx"))?;
    project.refused(
        &copy,
        "options/sm_90a.ptx cannot be used: there is no such file",
    )?;
    project.refused(
        Path::new("/nowhere/ptx"),
        "/nowhere/ptx cannot be used: there is no such folder",
    )?;
    println!("outside: FERRY_PTX_DIR is used, and refused if it names no PTX");
    if full {
        project.compile_nvshmem()?;
        println!("outside: the kernels that call NVSHMEM were compiled");
    }
    ensure!(
        files(&unpacked)? == before,
        "a build wrote into the packages"
    );
    Ok(())
}

impl<'a> Project<'a> {
    fn generate(
        places: &Places,
        crates: &Path,
        unpacked: &'a Path,
        published: &[Published],
        toolchain: &str,
    ) -> Result<Self> {
        let folder = crates.join("outside");
        fs::create_dir_all(folder.join("src"))?;
        fs::create_dir_all(folder.join("forbidden"))?;
        fs::write(folder.join("Cargo.toml"), manifest(published))?;
        fs::write(folder.join("src/main.rs"), PROGRAM)?;
        fs::copy(places.root.join("Cargo.lock"), folder.join("Cargo.lock"))?;
        for program in FORBIDDEN {
            let file = folder.join("forbidden").join(program);
            fs::write(
                &file,
                format!("#!/bin/sh\necho {program} must not run >&2\nexit 97\n"),
            )?;
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
        }
        let sysroot = Command::new("rustup")
            .args(["run", toolchain, "rustc", "--print", "sysroot"])
            .output()
            .context("cannot run rustup")?;
        ensure!(
            sysroot.status.success(),
            "there is no toolchain {toolchain}"
        );
        let sysroot = String::from_utf8(sysroot.stdout)?;
        Ok(Self {
            folder,
            bin: Path::new(sysroot.trim()).join("bin"),
            build: crates.join("build"),
            unpacked,
        })
    }

    /// Cargo of the toolchain, offline.
    fn cargo(&self, task: &str, features: &str) -> Command {
        let mut cargo = Command::new(self.bin.join("cargo"));
        cargo
            .args([task, "--quiet", "--offline", "--features", features])
            .current_dir(&self.folder);
        // Removes the variables set by the cargo that runs this task.
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            let kept = ["CARGO_HOME", "CARGO_NET_", "CARGO_HTTP_", "CARGO_REGISTR"];
            if name.starts_with("CARGO") && !kept.iter().any(|kept| name.starts_with(kept)) {
                cargo.env_remove(&*name);
            }
        }
        cargo
            // Cargo would look for it in PATH, where another toolchain's may be.
            .env("RUSTC", self.bin.join("rustc"))
            .env("CARGO_TARGET_DIR", &self.build)
            .envs(BUILD_SETTINGS)
            .env_remove("RUSTUP_TOOLCHAIN")
            .env_remove("FERRY_PTX_DIR");
        cargo
    }

    /// Cargo without other toolchains, Python and NVSHMEM.
    fn strict(&self, task: &str, features: &str) -> Result<Command> {
        let mut cargo = self.cargo(task, features);
        let mut path = vec![self.folder.join("forbidden"), self.bin.clone()];
        path.extend(std::env::split_paths(
            &std::env::var_os("PATH").unwrap_or_default(),
        ));
        cargo
            .env("PATH", std::env::join_paths(path)?)
            .env("NVSHMEM_HOME", "/nowhere/nvshmem");
        Ok(cargo)
    }

    /// Builds and runs the project, and returns its output.
    fn run(&self, features: &str, variables: &[(&str, &Path)]) -> Result<String> {
        let mut cargo = self.strict("run", features)?;
        let output = cargo.envs(variables.iter().copied()).output()?;
        succeeded(&output)?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Checks that a build with this folder of PTX fails for this reason.
    fn refused(&self, folder: &Path, reason: &str) -> Result<()> {
        let mut cargo = self.strict("check", "cuda")?;
        let output = cargo.env("FERRY_PTX_DIR", folder).output()?;
        let printed = String::from_utf8_lossy(&output.stderr);
        ensure!(
            !output.status.success() && printed.contains(reason),
            "a build with FERRY_PTX_DIR={} did not say `{reason}`: {printed}",
            folder.display()
        );
        Ok(())
    }

    /// Builds with the kernels that call NVSHMEM, from the packaged sources.
    fn compile_nvshmem(&self) -> Result<()> {
        println!("outside: compiling the kernels that call NVSHMEM");
        succeeded(&self.cargo("build", "nvshmem").output()?)?;
        let left = self.unpacked.join("target");
        ensure!(!left.exists(), "{} was made", left.display());
        Ok(())
    }
}

fn succeeded(output: &Output) -> Result<()> {
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// The project's manifest: the packages come from crates.io, patched to folders.
fn manifest(published: &[Published]) -> String {
    let patches = published.iter().map(|package| {
        let (name, folder) = (&package.name, package.full_name());
        format!("{name} = {{ path = \"../unpacked/{folder}\" }}\n")
    });
    let host = published
        .iter()
        .find(|package| package.folder == Path::new(HOST));
    let version = host.map_or("", |package| &package.version);
    format!(
        "[package]\nname = \"outside\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
         [workspace]\n\n\
         [features]\ncuda = [\"ferry-ep/cuda\"]\nnvshmem = [\"cuda\", \"ferry-ep/nvshmem\"]\n\n\
         [dependencies]\nferry-ep = \"={version}\"\n\n\
         [patch.crates-io]\n{}",
        patches.collect::<String>()
    )
}

/// All files below a folder, with their times of modification.
fn files(folder: &Path) -> Result<Vec<(PathBuf, SystemTime)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.extend(files(&entry.path())?);
        } else {
            found.push((entry.path(), entry.metadata()?.modified()?));
        }
    }
    found.sort();
    Ok(found)
}
