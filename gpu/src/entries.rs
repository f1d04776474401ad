//! Entries of kernels with options, for an epilogue.

/// Declares all kernels with options that put rows in expert order, with an epilogue of yours: in a `cdylib`
/// of its own, under the names that the host expects. `cargo xtask build-ptx --manifest-path` compiles it to
/// PTX. With this crate's feature `nvshmem` also those that reach ranks of other nodes.
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
        $crate::kernels_of_rounds!(by_expert, $epilogue);
        $crate::kernel_with_options!(ferry_dispatch_local, false, dispatch_local, by_expert);
        $crate::kernel_with_options!(
            ferry_combine_local,
            false,
            combine_local,
            by_expert,
            $epilogue
        );
    };
}

/// Declares the kernels with options in which ranks wait for each other, for one kind and one epilogue. The
/// kind is the layout of received rows: `by_expert` (a row for each assignment) or `as_they_came` (a row for
/// each source rank and token). Used by [`kernels_with_epilogue`](crate::kernels_with_epilogue) and by
/// `ferry-rows`.
#[doc(hidden)]
#[macro_export]
macro_rules! kernels_of_rounds {
    ($kind:ident, $epilogue:ty) => {
        $crate::kernel_with_options!(ferry_dispatch_async, false, dispatch_async, $kind);
        $crate::kernel_with_options!(ferry_dispatch_wait, false, dispatch_wait, $kind);
        $crate::kernel_with_options!(ferry_dispatch, false, dispatch, $kind);
        $crate::kernel_with_options!(ferry_combine_async, false, combine_async, $kind, $epilogue);
        $crate::kernel_with_options!(ferry_combine_wait, false, combine_wait, $kind, $epilogue);
        $crate::kernel_with_options!(ferry_combine, false, combine, $kind, $epilogue);
        $crate::shmem_kernels_with_options!($kind, $epilogue);
    };
}

/// Declares those of [`kernels_of_rounds`](crate::kernels_of_rounds) that reach ranks of other nodes.
#[cfg(feature = "nvshmem")]
#[doc(hidden)]
#[macro_export]
macro_rules! shmem_kernels_with_options {
    ($kind:ident, $epilogue:ty) => {
        $crate::kernel_with_options!(ferry_dispatch_async_shmem, true, dispatch_async, $kind);
        $crate::kernel_with_options!(ferry_dispatch_shmem, true, dispatch, $kind);
        $crate::kernel_with_options!(
            ferry_combine_async_shmem,
            true,
            combine_async,
            $kind,
            $epilogue
        );
        $crate::kernel_with_options!(ferry_combine_shmem, true, combine, $kind, $epilogue);
    };
}

/// Declares nothing: nothing here calls NVSHMEM.
#[cfg(not(feature = "nvshmem"))]
#[doc(hidden)]
#[macro_export]
macro_rules! shmem_kernels_with_options {
    ($kind:ident, $epilogue:ty) => {};
}

/// Type of a kernel's arguments, from its kind.
#[doc(hidden)]
#[macro_export]
macro_rules! arguments_of_kind {
    (by_expert, $with:ty) => { $with };
    (as_they_came, $with:ty) => { $crate::layout::AsTheyCame<$with> };
}

/// A kernel's arguments without their kind.
#[doc(hidden)]
#[macro_export]
macro_rules! common_part {
    (by_expert, $with:ident) => {
        &$with
    };
    (as_they_came, $with:ident) => {
        &$with.0
    };
}

/// Declares a kernel from its name, whether ranks of other nodes are among the peers, the protocol's
/// function, the kind of [`kernels_of_rounds`](crate::kernels_of_rounds), and for a combine the epilogue.
#[doc(hidden)]
#[macro_export]
macro_rules! kernel_with_options {
    ($name:ident, $shmem:literal, $run:ident, $kind:ident) => {
        $crate::kernel! {
            /// See the protocol's function of the same name.
            ///
            /// # Safety
            /// The host built `given` for this rank, with options of this kind. Blocks have at least
            /// `2 * MAX_RANKS` threads.
            $name(given: $crate::arguments_of_kind!($kind, $crate::layout::DispatchWith)) {
                // SAFETY: the host built `given` for this rank: documented above.
                let machine = unsafe { $crate::machine::Gpu::<_, $shmem>::new(&given) };
                let with = $crate::common_part!($kind, given);
                let _ = $crate::protocol::$run(&machine, &with.args, &with.options);
            }
        }
    };
    ($name:ident, $shmem:literal, $run:ident, $kind:ident, $epilogue:ty) => {
        $crate::kernel! {
            /// See the protocol's function of the same name.
            ///
            /// # Safety
            /// The host built `given` for this rank, with options of this kind. Blocks have at least
            /// `2 * MAX_RANKS` threads.
            $name(given: $crate::arguments_of_kind!($kind, $crate::layout::CombineWith<$epilogue>)) {
                // SAFETY: the host built `given` for this rank: documented above.
                let machine = unsafe { $crate::machine::Gpu::<_, $shmem>::new(&given) };
                let with = $crate::common_part!($kind, given);
                let _ = $crate::protocol::$run(&machine, &with.args, &with.options, &with.epilogue);
            }
        }
    };
}

/// Declares the kernel that gives up a round, under its name and that of its counterpart for ranks of other
/// nodes, for a kind of [`kernels_of_rounds`](crate::kernels_of_rounds).
#[doc(hidden)]
#[macro_export]
macro_rules! give_up_kernels {
    ($kind:ident) => {
        $crate::give_up_kernel!(ferry_give_up, false, $kind);
        $crate::shmem_give_up_kernel!($kind);
    };
}

/// Declares that of [`give_up_kernels`](crate::give_up_kernels) that reaches ranks of other nodes.
#[cfg(feature = "nvshmem")]
#[doc(hidden)]
#[macro_export]
macro_rules! shmem_give_up_kernel {
    ($kind:ident) => {
        $crate::give_up_kernel!(ferry_give_up_shmem, true, $kind);
    };
}

/// Declares nothing: nothing here calls NVSHMEM.
#[cfg(not(feature = "nvshmem"))]
#[doc(hidden)]
#[macro_export]
macro_rules! shmem_give_up_kernel {
    ($kind:ident) => {};
}

/// Declares the kernel that tells the host of a dispatch's counts, in every layout of received rows.
#[doc(hidden)]
#[macro_export]
macro_rules! counts_kernel {
    ($kind:ident) => {
        $crate::kernel! {
            /// See the protocol's function of the same name.
            ///
            /// # Safety
            /// The host built `given` for this rank, for a dispatch of this kind. Blocks have at least
            /// `2 * MAX_RANKS` threads.
            ferry_dispatch_counts(
                given: $crate::arguments_of_kind!($kind, $crate::layout::DispatchCountsArgs)
            ) {
                // SAFETY: the host built `given` for this rank: documented above.
                let machine = unsafe { $crate::machine::Gpu::<_, false>::new(&given) };
                let _ = $crate::protocol::dispatch_counts(&machine, $crate::common_part!($kind, given));
            }
        }
    };
}

/// Declares a kernel that gives up a round from its name, whether ranks of other nodes are among the peers,
/// and the kind.
#[doc(hidden)]
#[macro_export]
macro_rules! give_up_kernel {
    ($name:ident, $shmem:literal, $kind:ident) => {
        $crate::kernel! {
            /// See the protocol's function of the same name.
            ///
            /// # Safety
            /// The host built `given` for this rank, for a dispatch of this kind. Blocks have at least
            /// `2 * MAX_RANKS` threads.
            $name(given: $crate::arguments_of_kind!($kind, $crate::layout::GiveUpArgs)) {
                // SAFETY: the host built `given` for this rank: documented above.
                let machine = unsafe { $crate::machine::Gpu::<_, $shmem>::new(&given) };
                let _ = $crate::protocol::give_up(&machine, $crate::common_part!($kind, given));
            }
        }
    };
}
