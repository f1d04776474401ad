//! Compiles a crate of kernels for each variant with a cargo of its own.

use std::env;
use std::fmt;
use std::fs::{self, File};
use std::path::{self, Path, PathBuf};
use std::str::FromStr;
use std::thread;

use ferry_layout::{Kernel, MAX_REGISTERS};
use ferry_ptx::Module;

use crate::command::{llvm_tools, output_of, stdout_of, toolchain_command};
use crate::error::{Error, FileContext, Result};
use crate::nvshmem::device_bitcode;
use crate::stamp::Stamp;

/// The target of the stock compiler.
pub(crate) const TARGET: &str = "nvptx64-nvidia-cuda";

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
    pub(crate) const fn ptx_feature(self) -> &'static str {
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

/// A crate of kernels, compiled to a PTX of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Package {
    /// `ferry-kernels`: what the host library embeds.
    Kernels,
    /// `ferry-options`: what the host library embeds besides, for launches with options.
    Options,
    /// Of [`Kernels`](Self::Kernels) those that reach ranks of one node: without anything of NVSHMEM.
    NodeKernels,
    /// Of [`Options`](Self::Options) those that reach ranks of one node.
    NodeOptions,
    /// `ferry-probes`: what the tests and the benchmark launch besides.
    Probes,
    /// `ferry-own-epilogue`: kernels with an epilogue of their own, which tests launch.
    OwnEpilogue,
}

impl Package {
    /// Every package with a digest of its own.
    pub const ALL: [Package; 4] = [
        Package::Kernels,
        Package::Options,
        Package::Probes,
        Package::OwnEpilogue,
    ];

    /// The package's name.
    pub const fn name(self) -> &'static str {
        match self {
            Package::Kernels | Package::NodeKernels => "ferry-kernels",
            Package::Options | Package::NodeOptions => "ferry-options",
            Package::Probes => "ferry-probes",
            Package::OwnEpilogue => "ferry-own-epilogue",
        }
    }

    /// Where its digest is committed, below the workspace root. Kernels for one node have that of all.
    pub const fn digest_file(self, generator: CodeGenerator) -> &'static str {
        let [stock, nvvm] = match self {
            Package::Kernels | Package::NodeKernels => {
                ["gpu/ptx-digest.txt", "gpu/nvvm-digest.txt"]
            }
            Package::Options | Package::NodeOptions => {
                ["gpu/options/ptx-digest.txt", "gpu/options/nvvm-digest.txt"]
            }
            Package::Probes => ["gpu/probes/ptx-digest.txt", "gpu/probes/nvvm-digest.txt"],
            Package::OwnEpilogue => [
                "tests/epilogue/ptx-digest.txt",
                "tests/epilogue/nvvm-digest.txt",
            ],
        };
        match generator {
            CodeGenerator::Stock => stock,
            CodeGenerator::Nvvm => nvvm,
        }
    }

    /// Where its PTX files lie.
    pub(crate) fn folder(self, target_dir: &Path) -> PathBuf {
        match self {
            Package::Kernels => target_dir.join("ptx"),
            Package::Options => target_dir.join("ptx/options"),
            Package::NodeKernels => target_dir.join("ptx/node"),
            Package::NodeOptions => target_dir.join("ptx/node/options"),
            Package::Probes => target_dir.join("ptx/probes"),
            Package::OwnEpilogue => target_dir.join("ptx/own-epilogue"),
        }
    }

    /// The middle of the variables that [`embed`](crate::embed()) sets.
    pub(crate) const fn variable(self) -> &'static str {
        match self {
            Package::Kernels | Package::NodeKernels | Package::Probes => "PTX",
            Package::Options | Package::NodeOptions => "OPTIONS_PTX",
            Package::OwnEpilogue => "EPILOGUE_PTX",
        }
    }

    /// Whether its kernels call NVSHMEM, to reach other nodes.
    pub(crate) const fn calls_nvshmem(self) -> bool {
        matches!(
            self,
            Package::Kernels | Package::Options | Package::OwnEpilogue
        )
    }
}

/// What makes PTX of the crates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeGenerator {
    /// The stock compiler: LLVM.
    Stock,
    /// `rustc_codegen_nvvm`: libNVVM.
    Nvvm,
}

impl CodeGenerator {
    /// The command that renews its digests.
    pub const fn bless_command(self) -> &'static str {
        match self {
            CodeGenerator::Stock => "cargo xtask build-ptx --bless",
            CodeGenerator::Nvvm => "cargo xtask build-ptx --backend nvvm --rust-cuda PATH --bless",
        }
    }
}

/// One built PTX file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// Whose kernels it has.
    pub package: Package,
    /// What it was built for.
    pub variant: Variant,
    /// The file: `<variant>.ptx` in `<target_dir>/ptx`, or for other packages in a folder of theirs below it.
    pub ptx_path: PathBuf,
}

/// Builds all variants of a package, as many at a time as there are processors.
///
/// # Errors
///
/// As [`build`]; the first variant's error, if several fail.
pub fn build_all(
    workspace_root: &Path,
    target_dir: &Path,
    package: Package,
) -> Result<Vec<Artifact>> {
    // The bitcode is made before the threads start, so that they do not make it three times.
    let build = &Build::prepare(workspace_root, target_dir, package)?;
    let width = thread::available_parallelism().map_or(1, usize::from);
    let mut artifacts = Vec::new();
    for variants in Variant::ALL.chunks(width) {
        let outcomes: Vec<Result<Artifact>> = thread::scope(|scope| {
            let threads: Vec<_> = variants
                .iter()
                .map(|&variant| scope.spawn(move || build.run(variant)))
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

/// Builds the PTX of one variant of a package, unless nothing that it depends on has changed.
///
/// `target_dir` is the workspace's target folder; all files go below it, into folders of
/// their own, so that a cargo that is already running there is never waited for.
///
/// # Errors
///
/// A missing tool, an NVSHMEM of another version, or kernels that do not compile.
pub fn build(
    workspace_root: &Path,
    target_dir: &Path,
    package: Package,
    variant: Variant,
) -> Result<Artifact> {
    Build::prepare(workspace_root, target_dir, package)?.run(variant)
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

/// What the builds of a package's variants share.
struct Build<'a> {
    workspace_root: &'a Path,
    target_dir: PathBuf,
    package: Package,
    /// NVSHMEM's, where it is linked.
    bitcode: Option<PathBuf>,
}

impl<'a> Build<'a> {
    fn prepare(workspace_root: &'a Path, target_dir: &Path, package: Package) -> Result<Self> {
        let target_dir = absolute(target_dir)?;
        let bitcode = match package.calls_nvshmem() {
            true => Some(device_bitcode(&target_dir, || llvm_tools(workspace_root))?),
            false => None,
        };
        Ok(Self {
            workspace_root,
            target_dir,
            package,
            bitcode,
        })
    }

    fn run(&self, variant: Variant) -> Result<Artifact> {
        let package = self.package;
        let folder = package.folder(&self.target_dir);
        fs::create_dir_all(&folder).file("create", &folder)?;
        let path_of = |end: &str| folder.join(format!("{variant}.{end}"));
        let ptx_path = path_of("ptx");
        // Two builds at once (two profiles or two packages of one workspace) take turns.
        let lock_path = self.target_dir.join(format!("ptx/{variant}.lock"));
        let lock = File::create(&lock_path).file("create", &lock_path)?;
        lock.lock().file("lock", &lock_path)?;
        let stamp = self.stamp(variant)?;
        let unchanged = fs::read_to_string(path_of("stamp")).is_ok_and(|kept| kept == stamp);
        if !(unchanged && ptx_path.is_file()) {
            llvm_tools(self.workspace_root)?;
            let built = self.compile(variant)?;
            let mut text = fs::read_to_string(&built).file("read", &built)?;
            if matches!(package, Package::Kernels | Package::NodeKernels) {
                text = with_limits(&text)?;
            }
            fs::write(path_of("new"), text).file("write", path_of("new"))?;
            fs::rename(path_of("new"), &ptx_path).file("move into place", &ptx_path)?;
            fs::write(path_of("stamp"), stamp).file("write", path_of("stamp"))?;
        }
        Ok(Artifact {
            package,
            variant,
            ptx_path,
        })
    }

    /// Everything that the PTX depends on.
    fn stamp(&self, variant: Variant) -> Result<String> {
        let mut stamp = Stamp::new();
        for file in ["Cargo.toml", "Cargo.lock", "rust-toolchain.toml"] {
            stamp.file(&self.workspace_root.join(file))?;
        }
        // The device crates, and the package that declares what they link.
        stamp.sources(&self.workspace_root.join("gpu"))?;
        stamp.sources(&self.workspace_root.join("nvshmem-sys"))?;
        if self.package == Package::OwnEpilogue {
            stamp.sources(&self.workspace_root.join("tests/epilogue"))?;
        }
        if let Some(bitcode) = &self.bitcode {
            stamp.file(bitcode)?;
        }
        // What is done with the PTX besides, and by which compiler.
        stamp.text(include_str!("compile.rs"));
        let mut rustc = toolchain_command("rustc", self.workspace_root);
        stamp.text(&stdout_of(rustc.arg("-vV"), missing_cargo)?);
        stamp.text(&rustflags(variant));
        stamp.text(&self.arguments().join(" "));
        Ok(stamp.finish())
    }

    /// The arguments of cargo.
    fn arguments(&self) -> Vec<String> {
        let mut arguments: Vec<String> = [
            "rustc",
            "--quiet",
            "--release",
            "--package",
            self.package.name(),
            "--lib",
            "--crate-type",
            "cdylib",
            "--target",
            TARGET,
            "-Zbuild-std=core",
        ]
        .map(String::from)
        .into();
        arguments.extend(profile().map(String::from));
        if let Some(bitcode) = &self.bitcode {
            let linked = format!("link-arg={}", bitcode.display());
            arguments.extend(["--features", "nvshmem", "--", "-C", &linked].map(String::from));
        }
        arguments
    }

    /// Runs cargo and gives back the PTX file that it wrote.
    fn compile(&self, variant: Variant) -> Result<PathBuf> {
        let name = self.package.name();
        eprintln!("compiling {name} for {variant}");
        // The packages share what they are both built on.
        let cargo_dir = self.target_dir.join("ptx").join(variant.target_cpu());
        let mut cargo = toolchain_command("cargo", self.workspace_root);
        cargo
            .args(self.arguments())
            .env("RUSTFLAGS", rustflags(variant))
            .env("CARGO_INCREMENTAL", "0")
            .env("CARGO_TARGET_DIR", &cargo_dir);
        output_of(&mut cargo, missing_cargo)?;
        let file = format!("{}.ptx", name.replace('-', "_"));
        let ptx = cargo_dir.join(TARGET).join("release").join(file);
        if ptx.is_file() {
            Ok(ptx)
        } else {
            Err(Error::MissingOutput {
                what: "PTX",
                path: ptx,
            })
        }
    }
}

/// Arguments of cargo for all that kernels depend on in a profile: on the command line, as the user's
/// configuration of cargo goes before the manifest. Debug information would name this machine's folders.
pub(crate) fn profile() -> impl Iterator<Item = &'static str> {
    let keys = [
        "profile.release.debug=false",
        "profile.release.codegen-units=1",
        "profile.release.opt-level=3",
        "profile.release.lto=false",
        "profile.release.overflow-checks=false",
        "profile.release.debug-assertions=false",
        "profile.release.panic=\"unwind\"",
    ];
    keys.into_iter().flat_map(|key| ["--config", key])
}

/// Why nothing can be compiled.
pub(crate) fn missing_cargo() -> Error {
    Error::MissingTool {
        tool: "cargo".into(),
        needed_for: "it compiles the kernels",
        get: "rustup toolchain install".into(),
    }
}

/// The PTX with the number of registers of every kernel that may use fewer than the others: the
/// compiler has no attribute for it.
pub(crate) fn with_limits(ptx: &str) -> Result<String> {
    let error = |detail| Error::Parse {
        what: "the PTX",
        detail,
    };
    let module = Module::parse(ptx).map_err(|not_ptx| error(not_ptx.to_string()))?;
    let mut limits = Vec::new();
    for kernel in Kernel::ALL {
        let registers = kernel.max_registers();
        if registers == MAX_REGISTERS {
            continue;
        }
        let entry = kernel.entry(false);
        let found = module.kernel(entry);
        let found = found.ok_or_else(|| error(format!("it has no kernel {entry}")))?;
        limits.push((found.body.start - 1, registers));
    }
    // From the last to the first: the places before it stay.
    limits.sort_unstable();
    let mut limited = ptx.to_owned();
    for (place, registers) in limits.into_iter().rev() {
        limited.insert_str(place, &format!(".maxnreg {registers}\n"));
    }
    Ok(limited)
}

/// Flags for every crate of the device build, core included. Tables for `match` would lie in global
/// memory, whose latency is longer than the comparisons that they replace.
pub(crate) fn rustflags(variant: Variant) -> String {
    format!(
        "-Zunstable-options -Cpanic=immediate-abort -Cjump-tables=no -Ctarget-cpu={} -Ctarget-feature={}",
        variant.target_cpu(),
        variant.ptx_feature()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_with_a_limit_of_its_own_gets_it() {
        let dispatch = ".version 8.3\n.entry ferry_dispatch(\n)\n{\n}\n";
        let ptx = format!("{dispatch}.entry ferry_fused_silu(\n.param .b64 a\n)\n{{\n}}\n");
        let limit = format!(".maxnreg {}", Kernel::FusedSilu.max_registers());
        let limited = with_limits(&ptx).unwrap();
        assert_eq!(limited.matches(".maxnreg").count(), 1);
        assert!(
            limited.ends_with(&format!(".param .b64 a\n)\n{limit}\n{{\n}}\n")),
            "{limited}"
        );
        assert!(with_limits(dispatch).is_err());
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
