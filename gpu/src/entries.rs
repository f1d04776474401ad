//! Entries of kernels with options, for an epilogue.

/// Declares all kernels with options, with an epilogue of yours: in a `cdylib` of its own, under the names
/// that the host expects. `cargo xtask build-ptx --manifest-path` compiles it to PTX. With this crate's
/// feature `nvshmem` also those that reach ranks of other nodes.
///
/// ```text
/// #![no_std]
/// #![feature(abi_ptx)]
///
/// #[repr(C)]
/// #[derive(Clone, Copy)]
/// struct Doubled;
///
/// impl ferry_gpu::Epilogue for Doubled {
///     fn apply(&self, _: &impl ferry_gpu::Load, _: u32, _: u32, values: [f32; 8]) -> [f32; 8] {
///         values.map(|value| 2.0 * value)
///     }
/// }
///
/// ferry_gpu::kernels_with_epilogue!(Doubled);
/// ```
#[macro_export]
macro_rules! kernels_with_epilogue {
    ($epilogue:ty) => {
        const _: () = assert!(
            size_of::<$epilogue>() <= $crate::layout::MAX_EPILOGUE_BYTES
                && align_of::<$epilogue>() <= 8,
            "an epilogue has at most MAX_EPILOGUE_BYTES and an alignment of at most 8"
        );
        $crate::kernel_with_options!(ferry_dispatch_async, false, dispatch_async);
        $crate::kernel_with_options!(ferry_dispatch_wait, false, dispatch_wait);
        $crate::kernel_with_options!(ferry_dispatch, false, dispatch);
        $crate::kernel_with_options!(ferry_combine_async, false, combine_async, $epilogue);
        $crate::kernel_with_options!(ferry_combine_wait, false, combine_wait, $epilogue);
        $crate::kernel_with_options!(ferry_combine, false, combine, $epilogue);
        $crate::kernel_with_options!(ferry_dispatch_local, false, dispatch_local);
        $crate::kernel_with_options!(ferry_combine_local, false, combine_local, $epilogue);
        $crate::shmem_kernels_with_options!($epilogue);
    };
}

/// Declares the kernels that reach ranks of other nodes. Part of
/// [`kernels_with_epilogue`](crate::kernels_with_epilogue).
#[cfg(feature = "nvshmem")]
#[doc(hidden)]
#[macro_export]
macro_rules! shmem_kernels_with_options {
    ($epilogue:ty) => {
        $crate::kernel_with_options!(ferry_dispatch_async_shmem, true, dispatch_async);
        $crate::kernel_with_options!(ferry_dispatch_shmem, true, dispatch);
        $crate::kernel_with_options!(ferry_combine_async_shmem, true, combine_async, $epilogue);
        $crate::kernel_with_options!(ferry_combine_shmem, true, combine, $epilogue);
    };
}

/// Declares nothing: nothing here calls NVSHMEM.
#[cfg(not(feature = "nvshmem"))]
#[doc(hidden)]
#[macro_export]
macro_rules! shmem_kernels_with_options {
    ($epilogue:ty) => {};
}

/// Declares a kernel from its name, whether ranks of other nodes are among the peers, the protocol's
/// function, and for a combine the epilogue. Part of [`kernels_with_epilogue`](crate::kernels_with_epilogue).
#[doc(hidden)]
#[macro_export]
macro_rules! kernel_with_options {
    ($name:ident, $shmem:literal, $run:ident) => {
        $crate::kernel! {
            /// See the protocol's function of the same name.
            ///
            /// # Safety
            /// The host built `with` for this rank. Blocks have at least `2 * MAX_RANKS` threads.
            $name(with: $crate::layout::DispatchWith) {
                // SAFETY: the host built `with` for this rank.
                let machine = unsafe { $crate::machine::Gpu::<_, $shmem>::new(&with) };
                let _ = $crate::protocol::$run(&machine, &with.args, &with.options);
            }
        }
    };
    ($name:ident, $shmem:literal, $run:ident, $epilogue:ty) => {
        $crate::kernel! {
            /// See the protocol's function of the same name.
            ///
            /// # Safety
            /// The host built `with` for this rank. Blocks have at least `2 * MAX_RANKS` threads.
            $name(with: $crate::layout::CombineWith<$epilogue>) {
                // SAFETY: the host built `with` for this rank.
                let machine = unsafe { $crate::machine::Gpu::<_, $shmem>::new(&with) };
                let _ = $crate::protocol::$run(&machine, &with.args, &with.options, &with.epilogue);
            }
        }
    };
}
