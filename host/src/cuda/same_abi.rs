//! Pairs of types with the same ABI: ours and those of `cust`'s bindings.

use std::ffi::c_void;

use super::{
    Context, Event, Function, Graph, GraphExec, GraphNode, IpcMemHandle, LaunchConfig, Module,
    Stream,
};

/// The bindings' functions, and those that the bindings are too old for.
pub(super) mod bindings {
    pub(in super::super) use cust::sys::*;

    use super::super::LaunchConfig;

    // Since CUDA 11.8.
    unsafe extern "C" {
        pub(in super::super) fn cuLaunchKernelEx(
            config: *const LaunchConfig,
            f: CUfunction,
            kernelParams: *mut *mut std::ffi::c_void,
            extra: *mut *mut std::ffi::c_void,
        ) -> CUresult;
    }
}

/// A type to be inferred, for a parameter.
macro_rules! any {
    ($parameter:ident) => {
        _
    };
}
pub(super) use any;

/// Compiles only if the bindings' function has the ABI of ours.
pub(super) fn require<Ours: SameAbi<Theirs>, Theirs>(_: Theirs) {}

/// Marks a type that is passed as `Other` is, and points to the same.
pub(super) trait SameAbi<Other> {}

impl<Ours: SameAbi<Theirs>, Theirs> SameAbi<*mut Theirs> for *mut Ours {}
impl<Ours: SameAbi<Theirs>, Theirs> SameAbi<*const Theirs> for *const Ours {}

/// Implements [`SameAbi`] for pairs of types.
macro_rules! same {
    ($($ours:ty, $theirs:ty;)*) => {
        $(impl SameAbi<$theirs> for $ours {})*
    };
}

same! {
    c_void, c_void;
    f32, f32;
    i8, i8;
    i32, i32;
    u8, u8;
    u32, u32;
    u64, u64;
    usize, usize;
    [u8; 16], bindings::CUuuid;
    LaunchConfig, LaunchConfig;
    IpcMemHandle, bindings::CUipcMemHandle;
    Context, bindings::CUctx_st;
    Event, bindings::CUevent_st;
    Function, bindings::CUfunc_st;
    Graph, bindings::CUgraph_st;
    GraphExec, bindings::CUgraphExec_st;
    GraphNode, bindings::CUgraphNode_st;
    Module, bindings::CUmod_st;
    Stream, bindings::CUstream_st;
    u32, bindings::CUresult;
    u32, bindings::CUstreamCaptureStatus;
    i32, bindings::CUdevice_attribute;
    i32, bindings::CUexecAffinityType;
    i32, bindings::CUfunction_attribute;
    i32, bindings::CUjit_option;
    i32, bindings::CUpointer_attribute;
    i32, bindings::CUstreamCaptureMode;
}

/// Implements [`SameAbi`] for functions with as many parameters.
macro_rules! same_functions {
    ($($($ours:ident $theirs:ident),*;)*) => {$(
        impl<Ours, Theirs, $($ours, $theirs),*> SameAbi<unsafe extern "C" fn($($theirs),*) -> Theirs>
            for unsafe extern "C" fn($($ours),*) -> Ours
        where
            Ours: SameAbi<Theirs>,
            $($ours: SameAbi<$theirs>,)*
        {
        }
    )*};
}

same_functions! {
    ;
    A1 B1;
    A1 B1, A2 B2;
    A1 B1, A2 B2, A3 B3;
    A1 B1, A2 B2, A3 B3, A4 B4;
    A1 B1, A2 B2, A3 B3, A4 B4, A5 B5;
    A1 B1, A2 B2, A3 B3, A4 B4, A5 B5, A6 B6;
}
