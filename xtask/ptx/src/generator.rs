//! The code generators, and the paths of their kernels' digests.

use ferry_build::Package;

/// Packages with a digest of their own.
pub const DIGESTED: [Package; 5] = [
    Package::Kernels,
    Package::Options,
    Package::Rows,
    Package::Probes,
    Package::OwnEpilogue,
];

/// Compiler of the kernels to PTX.
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

    /// Path of a package's digest below the workspace root. Kernels for one node share that of all kernels.
    pub const fn digest_file(self, package: Package) -> &'static str {
        let [stock, nvvm] = match package {
            Package::Kernels | Package::NodeKernels => {
                ["gpu/ptx-digest.txt", "gpu/nvvm-digest.txt"]
            }
            Package::Options | Package::NodeOptions => {
                ["gpu/options/ptx-digest.txt", "gpu/options/nvvm-digest.txt"]
            }
            Package::Rows | Package::NodeRows => {
                ["gpu/rows/ptx-digest.txt", "gpu/rows/nvvm-digest.txt"]
            }
            Package::Probes => ["gpu/probes/ptx-digest.txt", "gpu/probes/nvvm-digest.txt"],
            Package::OwnEpilogue => [
                "tests/epilogue/ptx-digest.txt",
                "tests/epilogue/nvvm-digest.txt",
            ],
        };
        match self {
            CodeGenerator::Stock => stock,
            CodeGenerator::Nvvm => nvvm,
        }
    }
}
