//! PTX, one function per instruction. The only code that holds assembly or names an LLVM intrinsic.
//!
//! Order and scope are in each function's name as in the instruction (PTX ISA 8.x, "Memory Consistency
//! Model"). Warp-wide operations are LLVM intrinsics, because the compiler treats them as convergent and
//! keeps them out of diverged code, which it does not promise for assembly.

pub mod block;
#[cfg(ferry_sm = "90")]
pub mod bulk;
pub mod lookup;
pub mod memory;
pub mod number;
#[cfg(ferry_sm = "90")]
pub mod pipeline;
pub mod shared;
pub mod thread;
