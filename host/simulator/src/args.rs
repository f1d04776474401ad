//! Arguments of a launch as bytes, between processes.

use bytemuck::{bytes_of, try_pod_read_unaligned};
use ferry_layout::{Args, CombineArgs, CombineOptions, CombineWith, Kernel};

/// Bytes of arguments.
pub(crate) fn bytes(args: &Args) -> Vec<u8> {
    match args {
        Args::Dispatch(with) => bytes_of(with).to_vec(),
        Args::Combine(CombineWith {
            args,
            options,
            epilogue,
        }) => [bytes_of(args), bytes_of(options), bytes_of(epilogue)].concat(),
        Args::Counts(args) => bytes_of(args).to_vec(),
        Args::GiveUp(args) => bytes_of(args).to_vec(),
        Args::Links(args) => bytes_of(args).to_vec(),
        Args::Silu(args) => bytes_of(args).to_vec(),
    }
}

/// The kernel with this index in [`Kernel::ALL`], and the arguments with these bytes.
pub(crate) fn from_bytes(number: u64, bytes: &[u8]) -> Option<(Kernel, Args)> {
    let kernel = *Kernel::ALL.get(usize::try_from(number).ok()?)?;
    let args = if kernel.dispatches() {
        Args::Dispatch(try_pod_read_unaligned(bytes).ok()?)
    } else if kernel.combines() {
        let (args, rest) = bytes.split_at_checked(size_of::<CombineArgs>())?;
        let (options, epilogue) = rest.split_at_checked(size_of::<CombineOptions>())?;
        Args::Combine(CombineWith {
            args: try_pod_read_unaligned(args).ok()?,
            options: try_pod_read_unaligned(options).ok()?,
            epilogue: try_pod_read_unaligned(epilogue).ok()?,
        })
    } else if kernel == Kernel::DispatchCounts {
        Args::Counts(try_pod_read_unaligned(bytes).ok()?)
    } else if kernel == Kernel::GiveUp {
        Args::GiveUp(try_pod_read_unaligned(bytes).ok()?)
    } else if kernel == Kernel::Links {
        Args::Links(try_pod_read_unaligned(bytes).ok()?)
    } else {
        Args::Silu(try_pod_read_unaligned(bytes).ok()?)
    };
    Some((kernel, args))
}
