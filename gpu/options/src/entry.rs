//! The kernels. Each reads its arguments and options, builds the machine and calls the protocol.
//!
//! Launch: as those of `ferry-kernels`.

use ferry_gpu::machine::Gpu;
use ferry_layout::{CombineWith, DispatchWith};
use ferry_protocol as protocol;

/// Declares a kernel: its name, its arguments with options, the protocol's function, and whether ranks of
/// other nodes are among the peers.
macro_rules! kernel {
    ($name:ident, $args:ty, $run:path, $shmem:literal) => {
        /// See the protocol's function of the same name.
        ///
        /// # Safety
        /// The host built `with` for this rank.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(with: $args) {
            // SAFETY: the host built `with` for this rank.
            let machine = unsafe { Gpu::<_, $shmem>::new(&with) };
            let _ = $run(&machine, &with.args, &with.options);
        }
    };
}

kernel!(
    ferry_dispatch_async,
    DispatchWith,
    protocol::dispatch_async,
    false
);
kernel!(
    ferry_dispatch_async_shmem,
    DispatchWith,
    protocol::dispatch_async,
    true
);
kernel!(
    ferry_dispatch_wait,
    DispatchWith,
    protocol::dispatch_wait,
    false
);
kernel!(ferry_dispatch, DispatchWith, protocol::dispatch, false);
kernel!(ferry_dispatch_shmem, DispatchWith, protocol::dispatch, true);
kernel!(
    ferry_combine_async,
    CombineWith<()>,
    protocol::combine_async,
    false
);
kernel!(
    ferry_combine_async_shmem,
    CombineWith<()>,
    protocol::combine_async,
    true
);
kernel!(
    ferry_combine_wait,
    CombineWith<()>,
    protocol::combine_wait,
    false
);
kernel!(ferry_combine, CombineWith<()>, protocol::combine, false);
kernel!(
    ferry_combine_shmem,
    CombineWith<()>,
    protocol::combine,
    true
);
kernel!(
    ferry_dispatch_local,
    DispatchWith,
    protocol::dispatch_local,
    false
);
kernel!(
    ferry_combine_local,
    CombineWith<()>,
    protocol::combine_local,
    false
);
