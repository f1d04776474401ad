//! Our own tools for PTX, which no user's build compiles: digests, rules, comparisons, the assembler, crates
//! of kernels from outside this workspace, and the second code generator.

mod assemble;
mod compare;
mod cuda_folder;
mod digest;
mod generator;
mod nvvm;
mod own;
mod ptx;
mod violation;
pub mod wheels;

pub use assemble::{Ptxas, Resources, assemble, assemble_file};
pub use compare::{Comparison, Difference, PartComparison, Verdict};
pub use cuda_folder::with_compiler as cuda_folder;
pub use digest::{Digest, stale_variants};
pub use generator::{CodeGenerator, DIGESTED};
pub use nvvm::{CheckoutError, NvvmBuild, TESTED_COMMIT};
pub use own::build_own;
pub use ptx::{InstructionKind, PtxFunction, PtxModule};
pub use violation::{LOCAL_MEMORY_ALLOWED, Violation};
