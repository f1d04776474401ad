//! Builds the crates of kernels, `ferry-kernels` and `ferry-probes`, to PTX with the stock compiler.
//!
//! Used by `host/build.rs` and `tests/build.rs`, which embed a result each, and by `cargo xtask build-ptx`,
//! which also assembles both and compares their digests with the committed ones.
//!
//! ```no_run
//! use std::path::Path;
//! use ferry_ptx_builder::{Package, Variant, build};
//!
//! let artifact = build(Path::new("."), Path::new("target"), Package::Kernels, Variant::Sm90a)?;
//! println!("{}", artifact.ptx_path.display());
//! # Ok::<(), ferry_ptx_builder::Error>(())
//! ```

mod assemble;
mod command;
mod compare;
mod compile;
mod cuda_folder;
mod digest;
mod embed;
mod error;
mod nvshmem;
mod nvvm;
mod own;
mod prebuilt;
mod ptx;
mod stamp;
mod violation;
mod wheel;

pub use assemble::{Ptxas, Resources, assemble, assemble_file};
pub use compare::{Comparison, Difference, PartComparison, Verdict};
pub use compile::{Artifact, CodeGenerator, Package, Variant, build, build_all, target_dir};
pub use cuda_folder::with_compiler as cuda_folder;
pub use digest::{Digest, stale_variants};
pub use embed::{PACKAGED_MANIFEST, PACKAGED_PTX, PACKAGED_SOURCES, embed};
pub use error::{Error, Result};
pub use nvshmem::{DEVICE_FUNCTIONS, NVSHMEM_VERSION};
pub use nvvm::{NvvmBuild, TESTED_COMMIT};
pub use own::build_own;
pub use prebuilt::{FOLDER_VARIABLE, PrebuiltProblem, place, prebuilt};
pub use ptx::{InstructionKind, PtxFunction, PtxModule};
pub use violation::{LOCAL_MEMORY_ALLOWED, Violation};
pub use wheel::Wheel;
