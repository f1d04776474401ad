//! The kernels. Each reads its arguments, builds the machine and calls the protocol.
//!
//! Launch: up to `MAX_BLOCKS` blocks, the same number in every launch of a communicator, all resident at
//! once. A block has any multiple of 32 threads from `2 * MAX_RANKS` on. Faults are recorded on the fault
//! page, so the protocol's result is not needed here.

use ferry_gpu::machine::Gpu;
use ferry_gpu::silu;
use ferry_layout::{
    CombineArgs, CombineOptions, DispatchArgs, DispatchOptions, LinksArgs, NoEpilogue, SiluArgs,
};
use ferry_protocol as protocol;

/// Declares a kernel from its name, the type of its arguments, its options, the protocol's function, whether
/// ranks of other nodes are among the peers, and for a combine the epilogue.
macro_rules! kernel {
    ($name:ident, $args:ident, $none:expr, $run:path, $shmem:literal $(, $epilogue:expr)?) => {
        ferry_gpu::kernel! {
            /// See the protocol's function of the same name.
            ///
            /// # Safety
            /// The host built `args` for this rank. Blocks have at least `2 * MAX_RANKS` threads.
            $name(args: $args) {
                // SAFETY: the host built `args` for this rank.
                let machine = unsafe { Gpu::<_, $shmem>::new(&args) };
                let _ = $run(&machine, &args, &$none $(, &$epilogue)?);
            }
        }
    };
}

kernel!(
    ferry_dispatch_async,
    DispatchArgs,
    DispatchOptions::NONE,
    protocol::dispatch_async,
    false
);
#[cfg(feature = "nvshmem")]
kernel!(
    ferry_dispatch_async_shmem,
    DispatchArgs,
    DispatchOptions::NONE,
    protocol::dispatch_async,
    true
);
kernel!(
    ferry_dispatch_wait,
    DispatchArgs,
    DispatchOptions::NONE,
    protocol::dispatch_wait,
    false
);
kernel!(
    ferry_dispatch,
    DispatchArgs,
    DispatchOptions::NONE,
    protocol::dispatch,
    false
);
#[cfg(feature = "nvshmem")]
kernel!(
    ferry_dispatch_shmem,
    DispatchArgs,
    DispatchOptions::NONE,
    protocol::dispatch,
    true
);
kernel!(
    ferry_combine_async,
    CombineArgs,
    CombineOptions::NONE,
    protocol::combine_async,
    false,
    NoEpilogue
);
#[cfg(feature = "nvshmem")]
kernel!(
    ferry_combine_async_shmem,
    CombineArgs,
    CombineOptions::NONE,
    protocol::combine_async,
    true,
    NoEpilogue
);
kernel!(
    ferry_combine_wait,
    CombineArgs,
    CombineOptions::NONE,
    protocol::combine_wait,
    false,
    NoEpilogue
);
kernel!(
    ferry_combine,
    CombineArgs,
    CombineOptions::NONE,
    protocol::combine,
    false,
    NoEpilogue
);
#[cfg(feature = "nvshmem")]
kernel!(
    ferry_combine_shmem,
    CombineArgs,
    CombineOptions::NONE,
    protocol::combine,
    true,
    NoEpilogue
);

ferry_gpu::give_up_kernels!(by_expert);
ferry_gpu::counts_kernel!(by_expert);

ferry_gpu::kernel! {
    /// See the protocol's function of the same name.
    ///
    /// # Safety
    /// The host built `args` for this rank. Blocks have at least `2 * MAX_RANKS` threads.
    ferry_links(args: LinksArgs) {
        // SAFETY: the host built `args` for this rank: documented above.
        let machine = unsafe { Gpu::<_, false>::new(&args) };
        protocol::links(&machine, &args);
    }
}

ferry_gpu::kernel! {
    /// Reads gates and ups, and writes their activations in the format that `args` name. Waits for no other
    /// rank.
    ///
    /// # Safety
    /// The host built `args`: its addresses are live allocations of the sizes that they say.
    ferry_fused_silu(args: SiluArgs) {
        // SAFETY: the addresses of `args` are live allocations of the sizes that they say: documented above.
        unsafe { silu::fused_silu(&args) }
    }
}
