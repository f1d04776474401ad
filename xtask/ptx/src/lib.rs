//! Our own tools for PTX, in no user's build: digests, rules, comparisons, the assembler, crates of kernels
//! from outside this workspace, and the second code generator.

mod assemble;
mod compare;
mod cuda_folder;
mod digest;
mod generator;
mod members;
mod nvvm;
mod own;
mod ptx;
mod violation;
pub mod wheels;

pub use assemble::{Resources, assemble};
pub use compare::Comparison;
pub use cuda_folder::with_compiler as cuda_folder;
pub use digest::{Digest, stale_variants};
pub use generator::{CodeGenerator, DIGESTED};
pub use members::with_members;
pub use nvvm::{NvvmBuild, TESTED_COMMIT};
pub use own::build_own;
