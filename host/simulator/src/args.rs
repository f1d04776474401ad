//! Arguments of a launch.

use ferry_layout::{CombineWith, DispatchWith, EpilogueWords, SiluArgs};

/// Arguments of a launch.
#[derive(Clone, Copy, Debug)]
pub enum Args {
    /// Of the dispatch kernels.
    Dispatch(DispatchWith),
    /// Of the combine kernels.
    Combine(CombineWith<EpilogueWords>),
    /// Of the fused SiLU kernel.
    Silu(SiluArgs),
}
