//! Finds PTX of Ferry's kernels, or builds it with the stock compiler, for build scripts.
//!
//! `host/build.rs` and `tests/build.rs` call [`embed()`]. The other functions are for `cargo xtask`, whose
//! tools assemble and compare PTX.
//!
//! ```no_run
//! use std::path::Path;
//! use ferry_build::{Package, Variant, build};
//!
//! let artifact = build(Path::new("."), Path::new("target"), Package::Kernels, Variant::Sm90a)?;
//! println!("{}", artifact.ptx_path.display());
//! # Ok::<(), ferry_build::Error>(())
//! ```

mod command;
mod compile;
mod embed;
mod error;
mod nvshmem;
mod one_node;
mod package;
mod prebuilt;
mod stamp;
mod wheel;

pub use command::{llvm_tools, output_of, stdout_of, toolchain_command};
pub use compile::{
    TARGET, all_variants, build, build_each, compile_each, missing_cargo, profile, rustflags,
    target_dir, with_limits,
};
pub use embed::{PACKAGED_MANIFEST, PACKAGED_PTX, PACKAGED_SOURCES, embed};
pub use error::{Error, FileContext, PrebuiltProblem, Result};
pub use nvshmem::{DEVICE_FUNCTIONS, device_bitcode};
pub use one_node::for_one_node;
pub use package::{Artifact, FOLDER_VARIABLE, Package, UnknownVariant, Variant, place};
pub use stamp::Stamp;
pub use wheel::{Wheel, site_packages};
