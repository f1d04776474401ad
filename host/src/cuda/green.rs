//! Green contexts: streams that are limited to some of a device's multiprocessors.

use std::ffi::{CStr, c_void};
use std::ptr;

use super::sys::{
    self, CUstream, DevResource, GreenContext, GreenCtxGetDevResource, StreamGetGreenCtx,
};

/// The driver's functions for green contexts, if it has them.
pub(super) struct GreenContexts {
    functions: Option<(StreamGetGreenCtx, GreenCtxGetDevResource)>,
}

impl GreenContexts {
    /// Looks the functions up. The driver is initialized.
    pub(super) fn find() -> Self {
        let functions = address(c"cuStreamGetGreenCtx").zip(address(c"cuGreenCtxGetDevResource"));
        // SAFETY: the driver returned the addresses of functions with these names, whose types in `sys`
        // are those of `cuda.h`.
        let functions = functions.map(|(of_stream, resource)| unsafe {
            (
                std::mem::transmute::<*mut c_void, StreamGetGreenCtx>(of_stream),
                std::mem::transmute::<*mut c_void, GreenCtxGetDevResource>(resource),
            )
        });
        Self { functions }
    }

    /// Whether the driver has green contexts.
    pub(super) const fn exist(&self) -> bool {
        self.functions.is_some()
    }

    /// Multiprocessors of the green context of `stream`, if it has one that the driver reports.
    /// Neither enqueues nor looks at enqueued work, so that it may be called while the stream
    /// is captured. A context is current.
    pub(super) fn multiprocessors(&self, stream: CUstream) -> Option<u32> {
        let (of_stream, get_resource) = self.functions?;
        let mut context: GreenContext = ptr::null_mut();
        // SAFETY: the stream is live (documented on `Stream::new`); `context` is a live
        // pointer to write to.
        let code = unsafe { of_stream(stream, &mut context) };
        if code != sys::SUCCESS || context.is_null() {
            return None;
        }
        let mut resource = DevResource::EMPTY;
        // SAFETY: the driver returned the context, which lives as long as its stream; `resource` is
        // live, and longer than the driver's struct.
        let code = unsafe { get_resource(context, &mut resource, sys::RESOURCE_SM) };
        let is_told = code == sys::SUCCESS && resource.kind == sys::RESOURCE_SM;
        is_told.then_some(resource.multiprocessors)
    }
}

/// Address of a function of the driver, if it has the function.
fn address(name: &CStr) -> Option<*mut c_void> {
    let mut function = ptr::null_mut();
    // SAFETY: `name` ends with a zero byte; `function` is a live pointer to write to.
    let code = unsafe {
        sys::cuGetProcAddress(name.as_ptr(), &mut function, sys::GREEN_CONTEXTS_VERSION, 0)
    };
    (code == sys::SUCCESS && !function.is_null()).then_some(function)
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn multiprocessors_stand_where_the_drivers_header_has_them() {
        assert_eq!(offset_of!(DevResource, multiprocessors), 96);
        assert!(size_of::<DevResource>() >= 144);
    }
}
