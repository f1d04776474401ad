//! Arguments of a launch.

use ferry_layout::{CombineWith, DispatchWith, EpilogueWords, SiluArgs};

/// Arguments of a launch.
#[derive(Clone, Copy, Debug)]
pub enum Args {
    /// Arguments of a dispatch kernel.
    Dispatch(DispatchWith),
    /// Arguments of a combine kernel.
    Combine(CombineWith<EpilogueWords>),
    /// Arguments of the fused SiLU kernel.
    Silu(SiluArgs),
}
