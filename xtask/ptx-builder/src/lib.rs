//! Builds the device crate `ferry-gpu` to PTX with the stock compiler.
//!
//! Used by `host/build.rs`, which embeds the result, and by `cargo xtask build-ptx`,
//! which also assembles it and compares its digest with the committed one.
//!
//! ```no_run
//! use std::path::Path;
//! use ferry_ptx_builder::{Variant, build};
//!
//! let artifact = build(Path::new("."), Path::new("target"), Variant::Sm90a)?;
//! println!("{}", artifact.ptx_path.display());
//! # Ok::<(), ferry_ptx_builder::Error>(())
//! ```

mod assemble;
mod command;
mod compare;
mod compile;
mod digest;
mod error;
mod nvshmem;
mod ptx;
mod stamp;
mod violation;
mod wheel;

pub use assemble::{Ptxas, Resources, assemble};
pub use compare::{Comparison, Difference, PartComparison, Verdict};
pub use compile::{Artifact, Variant, build, build_all, target_dir};
pub use digest::{DIGEST_FILE, Digest};
pub use error::{Error, Result};
pub use nvshmem::{DEVICE_FUNCTIONS, NVSHMEM_VERSION};
pub use ptx::{InstructionKind, PtxFunction, PtxModule};
pub use violation::{LOCAL_MEMORY_ALLOWED, Violation};
pub use wheel::Wheel;
