//! Compiles a crate of kernels for each variant with a cargo of its own.

use std::env;
use std::fs::{self, File};
use std::path::{self, Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, ScopedJoinHandle};

use ferry_layout::{Kernel, MAX_REGISTERS};
use ferry_ptx::Module;

use crate::command::{llvm_tools, output_of, stdout_of, toolchain_command};
use crate::error::{Error, FileContext, Result};
use crate::nvshmem::{device_bitcode, kept_bitcode};
use crate::one_node::for_one_node;
use crate::package::{Artifact, Package, Variant};
use crate::stamp::Stamp;

/// Compilation target of the kernels.
pub const TARGET: &str = "nvptx64-nvidia-cuda";

/// Builds variants of packages, at most one for each processor at a time, and returns them in the order of
/// `wanted`. Builds of one variant take turns, so neighbours are best of different variants. Kernels for one
/// node are taken out of those for several, where these were built from the same sources.
///
/// # Errors
///
/// Those of [`build`]. After the first one, only what was begun, or waits for its turn, is still built.
pub fn build_each(
    workspace_root: &Path,
    target_dir: &Path,
    wanted: &[(Package, Variant)],
) -> Result<Vec<Artifact>> {
    each(workspace_root, target_dir, wanted, true)
}

/// Builds as [`build_each`] does, but compiles kernels for one node without NVSHMEM.
///
/// # Errors
///
/// Those of [`build_each`].
pub fn compile_each(
    workspace_root: &Path,
    target_dir: &Path,
    wanted: &[(Package, Variant)],
) -> Result<Vec<Artifact>> {
    each(workspace_root, target_dir, wanted, false)
}

fn each(
    workspace_root: &Path,
    target_dir: &Path,
    wanted: &[(Package, Variant)],
    may_take: bool,
) -> Result<Vec<Artifact>> {
    // Makes the bitcode before the threads start, or each thread would make it.
    let builds: Result<Vec<_>> = wanted
        .iter()
        .map(|&(package, variant)| {
            let build = Build::prepare(workspace_root, target_dir, package)?;
            Ok((Build { may_take, ..build }, variant))
        })
        .collect();
    let (builds, next) = (builds?, AtomicUsize::new(0));
    let run_some = || {
        let mut outcomes = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some((build, variant)) = builds.get(index) else {
                return outcomes;
            };
            let outcome = build.run(*variant);
            if outcome.is_err() {
                next.store(builds.len(), Ordering::Relaxed);
            }
            outcomes.push((index, outcome));
        }
    };
    let mut outcomes: Vec<(usize, Result<Artifact>)> = thread::scope(|scope| {
        // More would wait for their variant's turn.
        let width = thread::available_parallelism()
            .map_or(1, |processors| processors.get().min(Variant::ALL.len()));
        let threads: Vec<_> = (0..width.min(builds.len()))
            .map(|_| scope.spawn(run_some))
            .collect();
        let join = |thread: ScopedJoinHandle<'_, _>| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().flat_map(join).collect()
    });
    outcomes.sort_by_key(|(index, _)| *index);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

/// All variants of packages, in an order for [`build_each`].
pub fn all_variants(packages: &[Package]) -> Vec<(Package, Variant)> {
    packages
        .iter()
        .flat_map(|&package| Variant::ALL.map(|variant| (package, variant)))
        .collect()
}

/// Builds the PTX of one variant of a package, unless none of its inputs has changed.
///
/// `target_dir` is the workspace's target folder. All files go into separate folders below it, so that the
/// nested cargo never waits for one that is already running there.
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

/// Folder that cargo, run in the workspace's root, builds into: `CARGO_TARGET_DIR`, or `target`. A relative
/// path counts from the root. `build.target-dir` of cargo's configuration is not read.
pub fn target_dir(workspace_root: &Path) -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => workspace_root.join(folder),
        None => workspace_root.join("target"),
    }
}

/// Common inputs of the builds of a package's variants.
struct Build<'a> {
    workspace_root: &'a Path,
    target_dir: PathBuf,
    package: Package,
    /// NVSHMEM's bitcode, if it is linked.
    bitcode: Option<PathBuf>,
    /// Whether kernels for one node may be taken out of those for several.
    may_take: bool,
}

impl<'a> Build<'a> {
    fn prepare(workspace_root: &'a Path, target_dir: &Path, package: Package) -> Result<Self> {
        // The nested cargo runs in another folder.
        let target_dir = path::absolute(target_dir).file("resolve", target_dir)?;
        let bitcode = if package.calls_nvshmem() {
            Some(device_bitcode(&target_dir, || llvm_tools(workspace_root))?)
        } else {
            None
        };
        Ok(Self {
            workspace_root,
            target_dir,
            package,
            bitcode,
            may_take: true,
        })
    }

    fn run(&self, variant: Variant) -> Result<Artifact> {
        let package = self.package;
        let folder = package.folder(&self.target_dir);
        fs::create_dir_all(&folder).file("create", &folder)?;
        let path_of = |end: &str| folder.join(format!("{variant}.{end}"));
        let ptx_path = path_of("ptx");
        // Concurrent builds (two profiles or two packages of one workspace) take turns.
        let lock_path = self.target_dir.join(format!("ptx/{variant}.lock"));
        let lock = File::create(&lock_path).file("create", &lock_path)?;
        lock.lock().file("lock", &lock_path)?;
        let kept = self.kept_stamp(variant);
        let is_kept = |stamp: &str| kept.as_deref() == Some(stamp) && ptx_path.is_file();
        let (stamp, whole) = (self.stamp(variant)?, self.whole(variant)?);
        // What was taken out of a whole build is as good as what was compiled.
        let taken = whole.as_ref().map(|(_, stamp)| taken_stamp(stamp));
        if !is_kept(&stamp) && !taken.as_deref().is_some_and(is_kept) {
            let text = whole.as_ref().and_then(|(path, _)| taken_from(path));
            let (text, stamp) = match (text, taken) {
                (Some(text), Some(stamp)) => (text, stamp),
                _ => (self.compiled(variant)?, stamp),
            };
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

    /// Hash of the inputs of the PTX that is there.
    fn kept_stamp(&self, variant: Variant) -> Option<String> {
        let folder = self.package.folder(&self.target_dir);
        fs::read_to_string(folder.join(format!("{variant}.stamp"))).ok()
    }

    /// PTX that has these kernels of one node beside those of several, and its stamp, if it was built from
    /// the same sources and kernels may be taken from it.
    fn whole(&self, variant: Variant) -> Result<Option<(PathBuf, String)>> {
        let Some(package) = self.package.with_nvshmem().filter(|_| self.may_take) else {
            return Ok(None);
        };
        // Kernels of one node need no NVSHMEM: without one, or with another, nothing is taken.
        let Ok(Some(bitcode)) = kept_bitcode(&self.target_dir) else {
            return Ok(None);
        };
        let whole = Build {
            workspace_root: self.workspace_root,
            target_dir: self.target_dir.clone(),
            package,
            bitcode: Some(bitcode),
            may_take: false,
        };
        let stamp = whole.stamp(variant)?;
        let path = package
            .folder(&self.target_dir)
            .join(format!("{variant}.ptx"));
        let is_there = whole.kept_stamp(variant).as_ref() == Some(&stamp) && path.is_file();
        Ok(is_there.then_some((path, stamp)))
    }

    /// Compiles the kernels, and sets their limits of registers.
    fn compiled(&self, variant: Variant) -> Result<String> {
        llvm_tools(self.workspace_root)?;
        let built = self.compile(variant)?;
        let text = fs::read_to_string(&built).file("read", &built)?;
        if matches!(self.package, Package::Kernels | Package::NodeKernels) {
            return with_limits(&text);
        }
        Ok(text)
    }

    /// Hash of everything that the PTX depends on.
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
        // The post-processing of the PTX, the compiler and its flags.
        stamp.text(include_str!("compile.rs"));
        let mut rustc = toolchain_command("rustc", self.workspace_root);
        stamp.text(&stdout_of(rustc.arg("-vV"), missing_cargo)?);
        stamp.text(&rustflags(variant));
        stamp.text(&self.arguments().join(" "));
        Ok(stamp.finish())
    }

    /// Arguments of cargo.
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

    /// Runs cargo and returns the PTX file that it wrote.
    fn compile(&self, variant: Variant) -> Result<PathBuf> {
        let name = self.package.name();
        eprintln!("compiling {name} for {variant}");
        // One folder for all packages, because they share dependencies.
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

/// Kernels of one node out of a file that has all, if they can be taken.
fn taken_from(whole: &Path) -> Option<String> {
    for_one_node(&fs::read_to_string(whole).ok()?).ok()
}

/// Stamp of kernels that are taken out of PTX with this stamp.
fn taken_stamp(whole: &str) -> String {
    let mut stamp = Stamp::new();
    stamp.text(whole);
    stamp.text(include_str!("one_node.rs"));
    stamp.finish()
}

/// Arguments of cargo for all settings of the profile that kernels depend on. They are on the command line
/// because the user's configuration of cargo overrides the manifest. Debug information would name this
/// machine's folders.
pub fn profile() -> impl Iterator<Item = &'static str> {
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

/// The error if there is no cargo.
pub fn missing_cargo() -> Error {
    Error::MissingTool {
        tool: "cargo".into(),
        needed_for: "it compiles the kernels",
        get: "rustup toolchain install".into(),
    }
}

/// Adds a register limit to every kernel that may use fewer registers than the others, for which the
/// compiler has no attribute.
pub fn with_limits(ptx: &str) -> Result<String> {
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
    // From the last to the first, because an insertion moves all later places.
    limits.sort_unstable();
    let mut limited = ptx.to_owned();
    for (place, registers) in limits.into_iter().rev() {
        limited.insert_str(place, &format!(".maxnreg {registers}\n"));
    }
    Ok(limited)
}

/// Flags for every crate of the device build, including core. No jump tables: they would be in global memory,
/// whose latency is longer than the comparisons that they replace.
pub fn rustflags(variant: Variant) -> String {
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
    fn kernels_of_one_node_are_taken_from_a_build_of_the_same_sources() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .nth(2)
            .unwrap();
        let scratch = tempfile::tempdir().unwrap();
        let target = scratch.path().to_owned();
        let build = |package| Build {
            workspace_root: root,
            target_dir: target.clone(),
            package,
            bitcode: None,
            may_take: true,
        };
        let node = build(Package::NodeOptions);
        assert_eq!(
            node.whole(Variant::Sm80).unwrap(),
            None,
            "no bitcode is there"
        );
        let bitcode = crate::nvshmem::reduced(&target).unwrap();
        fs::create_dir_all(bitcode.parent().unwrap()).unwrap();
        fs::write(&bitcode, "bitcode").unwrap();
        let whole = Build {
            bitcode: Some(bitcode),
            ..build(Package::Options)
        };
        let folder = Package::Options.folder(&target);
        fs::create_dir_all(&folder).unwrap();
        let kernel = ".visible .entry ferry_dispatch(\n)\n{\n}\n";
        let remote = ".visible .entry ferry_dispatch_shmem(\n)\n{\n\tcall nvshmem_quiet;\n}\n";
        let head = ".version 8.0\n.target sm_80\n";
        fs::write(folder.join("sm_80.ptx"), [head, kernel, remote].concat()).unwrap();
        fs::write(folder.join("sm_80.stamp"), "of other sources").unwrap();
        assert_eq!(
            node.whole(Variant::Sm80).unwrap(),
            None,
            "sources are others"
        );
        let stamp = whole.stamp(Variant::Sm80).unwrap();
        fs::write(folder.join("sm_80.stamp"), stamp).unwrap();
        for _ in 0..2 {
            let taken = node.run(Variant::Sm80).unwrap();
            let text = fs::read_to_string(taken.ptx_path).unwrap();
            assert_eq!(text.trim_end(), [head, kernel].concat().trim_end());
        }
        let compiled = Build {
            may_take: false,
            ..build(Package::NodeOptions)
        };
        assert_eq!(compiled.whole(Variant::Sm80).unwrap(), None);
    }
}
