//! Arguments of any kernel, as the host hands them over.

use crate::launch::args::{Common, DispatchCountsArgs, GiveUpArgs, SiluArgs};
use crate::launch::encoded::EncodedInput;
use crate::launch::links::LinksArgs;
use crate::launch::options::{CombineWith, DispatchWith, EpilogueWords};
use crate::round::kernel::Kernel;

/// Arguments of a kernel launch.
#[derive(Clone, Copy, Debug)]
pub enum Args {
    /// Arguments of the dispatch kernels; those without options take the first part.
    Dispatch(DispatchWith),
    /// Arguments of the combine kernels; those without options take the first part.
    Combine(CombineWith<EpilogueWords>),
    /// Arguments of the kernel that tells the host of counts.
    Counts(DispatchCountsArgs),
    /// Arguments of the kernel that gives up a round.
    GiveUp(GiveUpArgs),
    /// Arguments of the kernel that checks links.
    Links(LinksArgs),
    /// Arguments of the fused SiLU kernel.
    Silu(SiluArgs),
}

impl Args {
    /// Whether a kernel takes these.
    pub fn are_of(&self, kernel: Kernel) -> bool {
        match self {
            Self::Dispatch(_) => kernel.dispatches(),
            Self::Combine(_) => kernel.combines(),
            Self::Counts(_) => kernel == Kernel::DispatchCounts,
            Self::GiveUp(_) => kernel == Kernel::GiveUp,
            Self::Links(_) => kernel == Kernel::Links,
            Self::Silu(_) => kernel == Kernel::FusedSilu,
        }
    }

    /// Arguments that all kernels of a round have; `None` of the fused SiLU.
    pub const fn common(&self) -> Option<&Common> {
        match self {
            Self::Dispatch(with) => Some(&with.args.common),
            Self::Combine(with) => Some(&with.args.common),
            Self::Counts(args) => Some(&args.common),
            Self::GiveUp(args) => Some(&args.common),
            Self::Links(args) => Some(&args.common),
            Self::Silu(_) => None,
        }
    }

    /// Largest number of tokens of a rank; 0 for a kernel that has nothing to do with ranks.
    pub const fn most_tokens(&self) -> u32 {
        match self.common() {
            Some(common) => common.shape.max_tokens_per_rank,
            None => 0,
        }
    }

    /// Whether a launch with these arguments needs the kernels with options.
    pub fn has_options(&self) -> bool {
        match self {
            Self::Dispatch(with) => with.has_options(),
            Self::Combine(with) => with.has_options(),
            Self::Counts(_) | Self::GiveUp(_) | Self::Links(_) | Self::Silu(_) => false,
        }
    }

    /// Name of the first option of a launch that [has some](Self::has_options).
    pub fn first_option(&self) -> &'static str {
        let named = match self {
            Self::Dispatch(DispatchWith { options, .. }) => [
                ("x_scales", options.encoded != EncodedInput::NONE),
                ("tokens_on_device", options.tokens_on_device != 0),
                ("topk_ids of i64", options.wide_ids != 0),
                ("", false),
            ],
            Self::Combine(CombineWith { options, .. }) => [
                ("row_weights", options.row_weights != 0),
                ("an epilogue", options.has_epilogue != 0),
                ("combined in another type than bf16", options.output != 0),
                ("tokens_on_device", options.tokens_on_device != 0),
            ],
            Self::Counts(_) | Self::GiveUp(_) | Self::Links(_) | Self::Silu(_) => [("", false); 4],
        };
        let first = named.into_iter().find(|(_, is_given)| *is_given);
        first.map_or("an option", |(name, _)| name)
    }

    /// Whether a launch with these arguments needs the kernels for rows that stay as they came.
    pub const fn keeps_rows(&self) -> bool {
        match self {
            Self::Dispatch(with) => with.options.rows.is_on != 0,
            Self::Combine(with) => with.options.rows.is_on != 0,
            Self::Counts(args) => args.keeps_rows != 0,
            Self::GiveUp(args) => args.layout != 0,
            Self::Links(_) | Self::Silu(_) => false,
        }
    }
}
