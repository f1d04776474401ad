//! Arguments of a launch.

use bytemuck::{bytes_of, try_pod_read_unaligned};
use ferry_layout::{
    CombineArgs, CombineOptions, CombineWith, DispatchCountsArgs, DispatchWith, EpilogueWords,
    GiveUpArgs, Kernel, LinksArgs, SiluArgs,
};

/// Arguments of a launch.
#[derive(Clone, Copy, Debug)]
pub enum Args {
    /// Arguments of a dispatch kernel.
    Dispatch(DispatchWith),
    /// Arguments of a combine kernel.
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
    /// The arguments' bytes.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Dispatch(with) => bytes_of(with).to_vec(),
            Self::Combine(CombineWith {
                args,
                options,
                epilogue,
            }) => [bytes_of(args), bytes_of(options), bytes_of(epilogue)].concat(),
            Self::Counts(args) => bytes_of(args).to_vec(),
            Self::GiveUp(args) => bytes_of(args).to_vec(),
            Self::Links(args) => bytes_of(args).to_vec(),
            Self::Silu(args) => bytes_of(args).to_vec(),
        }
    }

    /// The kernel with this index in [`Kernel::ALL`], and the arguments with these bytes.
    pub(crate) fn from_bytes(number: u64, bytes: &[u8]) -> Option<(Kernel, Self)> {
        let kernel = *Kernel::ALL.get(usize::try_from(number).ok()?)?;
        let args = if kernel.dispatches() {
            Self::Dispatch(try_pod_read_unaligned(bytes).ok()?)
        } else if kernel.combines() {
            let (args, rest) = bytes.split_at_checked(size_of::<CombineArgs>())?;
            let (options, epilogue) = rest.split_at_checked(size_of::<CombineOptions>())?;
            Self::Combine(CombineWith {
                args: try_pod_read_unaligned(args).ok()?,
                options: try_pod_read_unaligned(options).ok()?,
                epilogue: try_pod_read_unaligned(epilogue).ok()?,
            })
        } else if kernel == Kernel::DispatchCounts {
            Self::Counts(try_pod_read_unaligned(bytes).ok()?)
        } else if kernel == Kernel::GiveUp {
            Self::GiveUp(try_pod_read_unaligned(bytes).ok()?)
        } else if kernel == Kernel::Links {
            Self::Links(try_pod_read_unaligned(bytes).ok()?)
        } else {
            Self::Silu(try_pod_read_unaligned(bytes).ok()?)
        };
        Some((kernel, args))
    }
}
