//! Compiles `ferry-gpu` for each variant with a cargo of its own.

use std::env;
use std::fmt;
use std::fs::{self, File};
use std::path::{self, Path, PathBuf};
use std::str::FromStr;
use std::thread;

use ferry_layout::{Kernel, MAX_REGISTERS};

use crate::command::{llvm_tools, output_of, toolchain_command};
use crate::error::{Error, FileContext, Result};
use crate::nvshmem::device_bitcode;
use crate::stamp::Stamp;

/// The target of the stock compiler.
const TARGET: &str = "nvptx64-nvidia-cuda";

/// A GPU generation that PTX is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Variant {
    /// The portable floor: the driver compiles it for Ampere and anything later.
    Sm80,
    /// Hopper with its own instructions; runs on no other generation.
    Sm90a,
    /// Blackwell with its own instructions; runs on no other generation.
    Sm100a,
}

impl Variant {
    /// Every variant, oldest first.
    pub const ALL: [Variant; 3] = [Variant::Sm80, Variant::Sm90a, Variant::Sm100a];

    /// The name that rustc, ptxas and file names use.
    pub const fn target_cpu(self) -> &'static str {
        match self {
            Variant::Sm80 => "sm_80",
            Variant::Sm90a => "sm_90a",
            Variant::Sm100a => "sm_100a",
        }
    }

    /// The PTX version as the compiler's feature.
    ///
    /// Each is at most 9.0, which drivers of CUDA 13.0 accept, and the lowest that has the
    /// instructions in use: 8.0 the cache hints, 8.3 what NVSHMEM's own code is built for,
    /// 8.6 is the first that knows sm_100a.
    const fn ptx_feature(self) -> &'static str {
        match self {
            Variant::Sm80 => "+ptx80",
            Variant::Sm90a => "+ptx83",
            Variant::Sm100a => "+ptx86",
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.target_cpu())
    }
}

impl FromStr for Variant {
    type Err = Error;

    fn from_str(text: &str) -> Result<Variant> {
        let found = Variant::ALL
            .into_iter()
            .find(|variant| variant.target_cpu() == text);
        found.ok_or_else(|| Error::Parse {
            what: "the architecture",
            detail: format!("`{text}` is none of sm_80, sm_90a, sm_100a"),
        })
    }
}

/// One built PTX file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// What it was built for.
    pub variant: Variant,
    /// The file: `<target_dir>/ptx/<variant>.ptx`.
    pub ptx_path: PathBuf,
}

/// Builds all variants, as many at a time as there are processors.
///
/// # Errors
///
/// As [`build`]; the first variant's error, if several fail.
pub fn build_all(workspace_root: &Path, target_dir: &Path) -> Result<Vec<Artifact>> {
    let target_dir = &absolute(target_dir)?;
    // Made before the threads start, so that they do not make it three times.
    let bitcode = &device_bitcode(target_dir, || llvm_tools(workspace_root))?;
    let width = thread::available_parallelism().map_or(1, usize::from);
    let mut artifacts = Vec::new();
    for variants in Variant::ALL.chunks(width) {
        let outcomes: Vec<Result<Artifact>> = thread::scope(|scope| {
            let threads: Vec<_> = variants
                .iter()
                .map(|&variant| {
                    scope.spawn(move || build_with(workspace_root, target_dir, variant, bitcode))
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| {
                    thread
                        .join()
                        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
                .collect()
        });
        for outcome in outcomes {
            artifacts.push(outcome?);
        }
    }
    Ok(artifacts)
}

/// Builds the PTX of one variant, unless nothing that it depends on has changed.
///
/// `target_dir` is the workspace's target folder; all files go below it, into folders of
/// their own, so that a cargo that is already running there is never waited for.
///
/// # Errors
///
/// A missing tool, an NVSHMEM of another version, or kernels that do not compile.
pub fn build(workspace_root: &Path, target_dir: &Path, variant: Variant) -> Result<Artifact> {
    let target_dir = &absolute(target_dir)?;
    let bitcode = device_bitcode(target_dir, || llvm_tools(workspace_root))?;
    build_with(workspace_root, target_dir, variant, &bitcode)
}

/// The folder that cargo builds this workspace into: `CARGO_TARGET_DIR`, or `target`.
pub fn target_dir(workspace_root: &Path) -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => workspace_root.join(folder),
        None => workspace_root.join("target"),
    }
}

/// The nested cargo runs in another folder, so it gets no relative paths.
fn absolute(folder: &Path) -> Result<PathBuf> {
    path::absolute(folder).file("resolve", folder)
}

fn build_with(
    workspace_root: &Path,
    target_dir: &Path,
    variant: Variant,
    bitcode: &Path,
) -> Result<Artifact> {
    let folder = target_dir.join("ptx");
    fs::create_dir_all(&folder).file("create", &folder)?;
    let path_of = |end: &str| folder.join(format!("{variant}.{end}"));
    let ptx_path = path_of("ptx");
    // Two builds at once (two profiles of one workspace) take turns.
    let lock = File::create(path_of("lock")).file("create", path_of("lock"))?;
    lock.lock().file("lock", path_of("lock"))?;
    let stamp = stamp(workspace_root, variant, bitcode)?;
    let unchanged = fs::read_to_string(path_of("stamp")).is_ok_and(|kept| kept == stamp);
    if !(unchanged && ptx_path.is_file()) {
        llvm_tools(workspace_root)?;
        let built = compile(
            workspace_root,
            &folder.join(variant.target_cpu()),
            variant,
            bitcode,
        )?;
        let text = fs::read_to_string(&built).file("read", &built)?;
        fs::write(path_of("new"), with_limits(&text)?).file("write", path_of("new"))?;
        fs::rename(path_of("new"), &ptx_path).file("move into place", &ptx_path)?;
        fs::write(path_of("stamp"), stamp).file("write", path_of("stamp"))?;
    }
    Ok(Artifact { variant, ptx_path })
}

/// The PTX with the number of registers of every kernel that may use fewer than the others: the
/// compiler has no attribute for it.
fn with_limits(ptx: &str) -> Result<String> {
    let mut ptx = ptx.to_owned();
    for kernel in Kernel::ALL {
        let registers = kernel.max_registers();
        if registers == MAX_REGISTERS {
            continue;
        }
        let entry = kernel.entry(false);
        let start = ptx.find(&format!(".entry {entry}("));
        let body = start.and_then(|start| Some(start + ptx[start..].find("\n{")?));
        let body = body.ok_or_else(|| Error::Parse {
            what: "the PTX",
            detail: format!("it has no body of {entry}"),
        })?;
        ptx.insert_str(body, &format!("\n.maxnreg {registers}"));
    }
    Ok(ptx)
}

/// Everything that the PTX depends on.
fn stamp(workspace_root: &Path, variant: Variant, bitcode: &Path) -> Result<String> {
    let mut stamp = Stamp::new();
    for file in ["Cargo.toml", "Cargo.lock", "rust-toolchain.toml"] {
        stamp.file(&workspace_root.join(file))?;
    }
    // The device crate, and the package that declares what it links.
    stamp.sources(&workspace_root.join("gpu"))?;
    stamp.sources(&workspace_root.join("nvshmem-sys"))?;
    stamp.file(bitcode)?;
    stamp.text(&rustflags(variant));
    stamp.text(&arguments(variant, bitcode).join(" "));
    Ok(stamp.finish())
}

/// Flags for every crate of the device build, core included. Tables for `match` would lie in global
/// memory, whose latency is longer than the comparisons that they replace.
fn rustflags(variant: Variant) -> String {
    format!(
        "-Zunstable-options -Cpanic=immediate-abort -Cjump-tables=no -Ctarget-cpu={}",
        variant.target_cpu()
    )
}

/// The arguments of cargo. Debug information is off: it would name this machine's folders.
fn arguments(variant: Variant, bitcode: &Path) -> Vec<String> {
    let mut arguments: Vec<String> = [
        "rustc",
        "--quiet",
        "--release",
        "--package",
        "ferry-gpu",
        "--lib",
        "--crate-type",
        "cdylib",
        "--target",
        TARGET,
        "-Zbuild-std=core",
        "--config",
        "profile.release.debug=false",
        "--config",
        "profile.release.codegen-units=1",
        "--",
        "-C",
    ]
    .map(String::from)
    .into();
    arguments.push(format!("target-feature={}", variant.ptx_feature()));
    arguments.push("-C".into());
    arguments.push(format!("link-arg={}", bitcode.display()));
    arguments
}

/// Runs cargo and gives back the PTX file that it wrote.
fn compile(
    workspace_root: &Path,
    cargo_dir: &Path,
    variant: Variant,
    bitcode: &Path,
) -> Result<PathBuf> {
    eprintln!("compiling the kernels for {variant}");
    let mut cargo = toolchain_command("cargo", workspace_root);
    cargo
        .args(arguments(variant, bitcode))
        .env("RUSTFLAGS", rustflags(variant))
        .env("CARGO_TARGET_DIR", cargo_dir);
    output_of(&mut cargo, || Error::MissingTool {
        tool: "cargo".into(),
        needed_for: "it compiles the kernels",
        get: "rustup toolchain install".into(),
    })?;
    let ptx = cargo_dir.join(TARGET).join("release/ferry_gpu.ptx");
    if ptx.is_file() {
        Ok(ptx)
    } else {
        Err(Error::MissingOutput {
            what: "PTX",
            path: ptx,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_with_a_limit_of_its_own_gets_it() {
        let ptx =
            ".entry ferry_dispatch(\n)\n{\n}\n.entry ferry_fused_silu(\n.param .b64 a\n)\n{\n}\n";
        let limit = format!(".maxnreg {}", Kernel::FusedSilu.max_registers());
        let limited = with_limits(ptx).unwrap();
        assert_eq!(limited.matches(".maxnreg").count(), 1);
        assert!(
            limited.ends_with(&format!(".param .b64 a\n)\n{limit}\n{{\n}}\n")),
            "{limited}"
        );
        assert!(with_limits(".entry ferry_dispatch(\n)\n{\n}\n").is_err());
    }

    #[test]
    fn names_and_variants_go_both_ways() {
        for variant in Variant::ALL {
            assert_eq!(variant.target_cpu().parse::<Variant>().unwrap(), variant);
        }
        let text = "sm_70".parse::<Variant>().unwrap_err().to_string();
        assert!(text.contains("sm_70") && text.contains("sm_90a"), "{text}");
    }

    #[test]
    fn no_ptx_is_too_new_for_a_driver_of_cuda_13_0() {
        for variant in Variant::ALL {
            let version: u32 = variant
                .ptx_feature()
                .trim_start_matches("+ptx")
                .parse()
                .unwrap();
            assert!(version <= 90, "{variant} asks for {version}");
        }
    }
}
