//! The second code generator: `rustc_codegen_nvvm` of a checkout of rust-cuda that the user names, which
//! compiles through NVIDIA's libNVVM.
//!
//! Nothing of it is committed or linked. The kernels are compiled by `cuda_builder` from a copy of the device
//! crates, whose manifest names the checkout's `cuda_std`. Everything is below `<target_dir>/nvvm`.

mod checkout;
mod finish;
mod sources;
mod tools;

use std::fs;
use std::path::{Path, PathBuf, absolute};
use std::process::Command;

use ferry_build::{
    Artifact, Error, FileContext, Package, Result, Variant, device_bitcode, llvm_tools,
    missing_cargo, output_of, toolchain_command,
};

use crate::cuda_folder;

use self::checkout::{Checkout, CheckoutError, TOOLCHAIN};

pub use self::checkout::TESTED_COMMIT;

/// The program that calls `cuda_builder`. Arguments: the architecture, the crate, the files for the PTX and
/// for the LLVM module that it was made of; then cargo's arguments.
const PROGRAM: &str = r#"use cuda_builder::{CudaBuilder, NvvmArch};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, arch, package, ptx, module, cargo @ ..] = &arguments[..] else {
        panic!("expected an architecture, a crate, files for PTX and LLVM's assembly, arguments of cargo");
    };
    let arch = match arch.as_str() {
        "sm_100a" => NvvmArch::Compute100a,
        _ => NvvmArch::Compute100,
    };
    // Rust rounds products and sums separately.
    let builder = CudaBuilder::new(package).arch(arch).fma_contraction(false);
    let built = builder.copy_to(ptx).final_module_path(module).build_args(cargo).build();
    if let Err(error) = built {
        eprintln!("{error}");
        std::process::exit(1);
    }
}
"#;

/// A built backend and a copy of the device crates, which all builds of kernels share.
#[derive(Debug)]
pub struct NvvmBuild {
    checkout: Checkout,
    workspace_root: PathBuf,
    /// `<target_dir>/nvvm`, absolute.
    folder: PathBuf,
    target_dir: PathBuf,
    /// Folders of the loader's path: the backend's, libNVVM's, the toolchain's.
    libraries: Vec<PathBuf>,
}

impl NvvmBuild {
    /// Architectures that this code generator supports: for older ones libNVVM reads only the IR of LLVM 7.
    pub const VARIANTS: [Variant; 2] = [Variant::Sm90a, Variant::Sm100a];

    /// Checks the checkout and the tools, builds the backend, and copies the device crates.
    ///
    /// # Errors
    ///
    /// A folder that is no checkout of rust-cuda, or one without LLVM 19 or for another toolchain; a missing
    /// tool; a backend that does not compile.
    pub fn prepare(
        workspace_root: &Path,
        target_dir: &Path,
        checkout: &Path,
    ) -> Result<Self, CheckoutError> {
        let absolute = |path: &Path| absolute(path).file("resolve", path);
        let target_dir = absolute(target_dir)?;
        let checkout = Checkout::open(&absolute(checkout)?)?;
        let sysroot = tools::check(workspace_root)?;
        let folder = target_dir.join("nvvm");
        let cuda = cuda_folder::make(&target_dir, &folder.join("cuda"))?;
        let mut build = Self {
            checkout,
            workspace_root: workspace_root.to_owned(),
            folder,
            target_dir,
            libraries: vec![cuda.join("nvvm/lib64"), sysroot.join("lib")],
        };
        build.backend(&cuda)?;
        build.program()?;
        sources::copy(workspace_root, &build.copy(), &build.checkout)?;
        Ok(build)
    }

    /// Whether the checkout is the one that Ferry was tested with, without changes.
    pub fn is_tested(&self) -> bool {
        self.checkout.is_tested()
    }

    /// Commit of the checkout, for messages.
    pub fn commit(&self) -> &str {
        self.checkout.commit()
    }

    /// Compiles a package's kernels, to PTX with NVSHMEM's functions, limits of registers and the layout's
    /// fingerprint.
    ///
    /// # Errors
    ///
    /// Kernels that do not compile, an undefined function, a variant that is not in
    /// [`VARIANTS`](Self::VARIANTS).
    pub fn build(&self, package: Package, variant: Variant) -> Result<Artifact> {
        if !Self::VARIANTS.contains(&variant) {
            return Err(Error::Parse {
                what: "the architecture",
                detail: format!(
                    "rustc_codegen_nvvm compiles for sm_90a and sm_100a, not for {variant}"
                ),
            });
        }
        eprintln!(
            "compiling {} for {variant} with rustc_codegen_nvvm",
            package.name()
        );
        let to = self.ptx_folder(package);
        fs::create_dir_all(&to).file("create", &to)?;
        let path_of = |end: &str| to.join(format!("{variant}.{end}"));
        let (raw, module) = (path_of("raw"), path_of("ll"));
        let mut program = self.command("kernels");
        program.env("CARGO_TARGET_DIR", self.folder.join(variant.target_cpu()));
        // The backend cannot describe all of core's types to a debugger.
        program.env("CARGO_PROFILE_RELEASE_DEBUG", "false");
        program.env("FERRY_NVVM_ARCH", variant.target_cpu());
        program.arg(variant.target_cpu());
        program.arg(self.copy().join(sources::folder_of(package)));
        program.arg(&raw).arg(&module);
        program.args(sources::features(package));
        output_of(&mut program, missing_cargo)?;
        let read = |path: &Path| fs::read_to_string(path).file("read", path);
        let mut ptx = finish::retargeted(&read(&raw)?, variant)?;
        if package.calls_nvshmem() {
            ptx = finish::with_functions(&ptx, &self.nvshmem(variant)?)?;
        }
        let ptx = finish::with_named_parameters(&ptx)?;
        let ptx = finish::finished(&ptx, &read(&module)?, package)?;
        let ptx_path = path_of("ptx");
        fs::write(&ptx_path, ptx).file("write", &ptx_path)?;
        fs::remove_file(&module).file("remove", &module)?;
        Ok(Artifact {
            package,
            variant,
            ptx_path,
        })
    }

    /// Folder of a package's PTX.
    pub fn ptx_folder(&self, package: Package) -> PathBuf {
        package.folder(&self.folder)
    }

    fn copy(&self) -> PathBuf {
        self.folder.join("sources")
    }

    /// A program built here, or cargo, with the backend's toolchain.
    fn command(&self, name: &str) -> Command {
        let program = match name {
            "cargo" => PathBuf::from(name),
            _ => self.folder.join("program/target/release").join(name),
        };
        let mut command = toolchain_command(&program.to_string_lossy(), &self.folder);
        command.env("RUSTUP_TOOLCHAIN", TOOLCHAIN);
        let libraries = self.libraries.iter().map(|folder| folder.to_string_lossy());
        command.env("LD_LIBRARY_PATH", libraries.collect::<Vec<_>>().join(":"));
        command
    }

    /// Builds the backend, with LLVM 19 from the machine and libNVVM from a wheel.
    fn backend(&mut self, cuda: &Path) -> Result<()> {
        eprintln!(
            "building rustc_codegen_nvvm of {}",
            self.checkout.path().display()
        );
        let target = self.folder.join("backend");
        let mut cargo = self.command("cargo");
        cargo.current_dir(self.checkout.path());
        cargo.args([
            "build",
            "--quiet",
            "--release",
            "--package",
            "rustc_codegen_nvvm",
        ]);
        cargo.args(["--features", "llvm19"]);
        cargo.env("CARGO_TARGET_DIR", &target);
        cargo
            .env("LLVM_LINK_SHARED", "1")
            .env("LLVM_CONFIG_19", tools::llvm_config());
        for variable in ["CUDA_PATH", "CUDA_ROOT", "CUDA_LIBRARY_PATH"] {
            cargo.env(variable, cuda);
        }
        output_of(&mut cargo, missing_cargo)?;
        let library = target.join("release/librustc_codegen_nvvm.so");
        if !library.is_file() {
            return Err(Error::MissingOutput {
                what: "backend",
                path: library,
            });
        }
        self.libraries.insert(0, target.join("release"));
        Ok(())
    }

    /// Builds [`PROGRAM`].
    fn program(&self) -> Result<()> {
        let folder = self.folder.join("program");
        let source = folder.join("src/main.rs");
        fs::create_dir_all(folder.join("src")).file("create", &folder)?;
        let manifest = folder.join("Cargo.toml");
        let builder = self.checkout.crate_folder("cuda_builder");
        let text = format!(
            "[package]\nname = \"kernels\"\nedition = \"2024\"\n\n[workspace]\n\n[dependencies]\n\
             cuda_builder = {{ path = {builder:?}, features = [\"llvm19\"] }}\n"
        );
        fs::write(&manifest, text).file("write", &manifest)?;
        fs::write(&source, PROGRAM).file("write", &source)?;
        self.checkout.copy_lock(&folder)?;
        let mut cargo = self.command("cargo");
        cargo
            .current_dir(&folder)
            .args(["build", "--quiet", "--release"]);
        cargo.env("CARGO_TARGET_DIR", folder.join("target"));
        for variable in ["CUDA_PATH", "CUDA_ROOT", "CUDA_LIBRARY_PATH"] {
            cargo.env(variable, self.folder.join("cuda"));
        }
        output_of(&mut cargo, missing_cargo)?;
        Ok(())
    }

    /// NVSHMEM's functions as PTX, compiled by the stock toolchain's LLVM: libNVVM cannot read their bitcode.
    fn nvshmem(&self, variant: Variant) -> Result<String> {
        let tools = || llvm_tools(&self.workspace_root);
        let bitcode = device_bitcode(&self.target_dir, tools)?;
        let ptx = self.folder.join(format!("nvshmem-{variant}.ptx"));
        let mut llc = Command::new(tools()?.join("llc"));
        llc.arg("-O3");
        llc.arg(format!("-mcpu={}", variant.target_cpu()));
        llc.arg(format!("-mattr={}", variant.ptx_feature()));
        llc.arg(bitcode).arg("-o").arg(&ptx);
        output_of(&mut llc, || Error::MissingTool {
            tool: "llc".into(),
            needed_for: "it compiles NVSHMEM's functions",
            get: "rustup component add llvm-tools".into(),
        })?;
        fs::read_to_string(&ptx).file("read", &ptx)
    }
}
