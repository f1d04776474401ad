//! The few calls of the CUDA driver that move bytes, from the driver that the process has.

use core::ffi::{c_int, c_uint, c_void};
use core::ptr;

use libloading::Library;

use crate::error::NetworkError;

type Code = c_int;

/// A pointer is to memory of a GPU.
const OF_GPU: c_uint = 2;
/// The attribute that says so.
const MEMORY_TYPE: c_int = 2;
/// Bytes of the first copies.
const FIRST_COPIES: [usize; 2] = [8, 1 << 16];

macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        #[derive(Clone, Copy)]
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> Code,)*
        }

        impl Functions {
            /// # Safety
            /// The library is the CUDA driver.
            unsafe fn of(library: &Library) -> Result<Self, libloading::Error> {
                // SAFETY: these are the driver's signatures.
                unsafe { Ok(Self { $($name: *library.get(concat!($symbol, "\0"))?,)* }) }
            }
        }
    };
}

functions! {
    current_context = "cuCtxGetCurrent": fn(*mut *mut c_void);
    set_context = "cuCtxSetCurrent": fn(*mut c_void);
    priorities = "cuCtxGetStreamPriorityRange": fn(*mut c_int, *mut c_int);
    create_stream = "cuStreamCreateWithPriority": fn(*mut *mut c_void, c_uint, c_int);
    destroy_stream = "cuStreamDestroy_v2": fn(*mut c_void);
    wait = "cuStreamSynchronize": fn(*mut c_void);
    copy = "cuMemcpyAsync": fn(u64, u64, usize, *mut c_void);
    pin = "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    unpin = "cuMemFreeHost": fn(*mut c_void);
    allocate = "cuMemAlloc_v2": fn(*mut u64, usize);
    free = "cuMemFree_v2": fn(u64);
    attribute = "cuPointerGetAttribute": fn(*mut c_void, c_int, u64);
}

fn check(name: &str, code: Code) -> Result<(), NetworkError> {
    match code {
        0 => Ok(()),
        code => Err(NetworkError::Cuda(format!("{name} returned {code}"))),
    }
}

/// A context.
#[derive(Clone, Copy)]
pub(crate) struct Context {
    functions: Functions,
    context: *mut c_void,
}

// SAFETY: the driver takes a context from any thread.
unsafe impl Send for Context {}
// SAFETY: the driver takes a context from any thread.
unsafe impl Sync for Context {}

impl Context {
    /// The calling thread's.
    pub(crate) fn current() -> Result<Self, NetworkError> {
        let failed = |error: libloading::Error| NetworkError::Cuda(error.to_string());
        // SAFETY: loading the driver runs its own initialization alone.
        let library = unsafe { Library::new("libcuda.so.1") }.map_err(failed)?;
        // SAFETY: it is the driver.
        let functions = unsafe { Functions::of(&library) }.map_err(failed)?;
        // The driver stays.
        std::mem::forget(library);
        let mut context = ptr::null_mut();
        // SAFETY: the pointer is to a local variable.
        check("cuCtxGetCurrent", unsafe {
            (functions.current_context)(&raw mut context)
        })?;
        if context.is_null() {
            return Err(NetworkError::Cuda("the thread has no context".into()));
        }
        Ok(Self { functions, context })
    }

    /// Makes it the calling thread's.
    pub(crate) fn enter(&self) -> Result<(), NetworkError> {
        // SAFETY: the context lives as long as NVSHMEM, which made it or was given it.
        check("cuCtxSetCurrent", unsafe {
            (self.functions.set_context)(self.context)
        })
    }

    /// Whether memory is a GPU's; else the CPU may touch it.
    pub(crate) fn is_of_gpu(&self, at: u64) -> bool {
        let mut kind: c_uint = 0;
        // SAFETY: the pointer is to a local variable of the attribute's type.
        let code = unsafe { (self.functions.attribute)((&raw mut kind).cast(), MEMORY_TYPE, at) };
        code == 0 && kind == OF_GPU
    }

    /// A stream of a priority that neither NVSHMEM (the greatest) nor others (the least) use, and pinned
    /// memory. All that the driver sets up for copies it sets up now: later it would wait for kernels.
    pub(crate) fn lane(&self, bytes: usize) -> Result<Lane, NetworkError> {
        let (mut least, mut greatest) = (0, 0);
        let mut lane = Lane {
            context: *self,
            stream: ptr::null_mut(),
            pinned: ptr::null_mut(),
            bytes,
        };
        let functions = &self.functions;
        // SAFETY: the pointers are to local variables.
        unsafe {
            check(
                "cuCtxGetStreamPriorityRange",
                (functions.priorities)(&raw mut least, &raw mut greatest),
            )?;
            let priority = i32::midpoint(least, greatest);
            check(
                "cuStreamCreateWithPriority",
                (functions.create_stream)(&raw mut lane.stream, 1, priority),
            )?;
            check(
                "cuMemHostAlloc",
                (functions.pin)(&raw mut lane.pinned, bytes, 0),
            )?;
        }
        lane.first_copies()?;
        Ok(lane)
    }
}

/// A stream and pinned memory, of one thread.
pub(crate) struct Lane {
    context: Context,
    stream: *mut c_void,
    pinned: *mut c_void,
    bytes: usize,
}

// SAFETY: the driver takes a stream from any thread, and nobody else has the memory.
unsafe impl Send for Lane {}

impl Lane {
    fn first_copies(&self) -> Result<(), NetworkError> {
        let functions = &self.context.functions;
        let mut memory = 0;
        let most = FIRST_COPIES.into_iter().max().unwrap_or(0);
        // SAFETY: the pointer is to a local variable.
        check("cuMemAlloc", unsafe {
            (functions.allocate)(&raw mut memory, most)
        })?;
        let copies = || {
            for bytes in FIRST_COPIES {
                // SAFETY: both places have so many bytes, and are freed after the stream is done.
                unsafe {
                    self.copy(memory, self.pinned as u64, bytes)?;
                    self.copy(self.pinned as u64, memory, bytes)?;
                }
            }
            self.wait()
        };
        let result = copies();
        // SAFETY: nothing uses it any more.
        let freed = unsafe { (functions.free)(memory) };
        result.and(check("cuMemFree", freed))
    }

    /// The pinned memory, and its bytes.
    pub(crate) const fn pinned(&self) -> (*mut u8, usize) {
        (self.pinned.cast(), self.bytes)
    }

    /// Copies, until the next [`Self::wait`].
    ///
    /// # Safety
    /// So many bytes can be read and written there until then.
    pub(crate) unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), NetworkError> {
        let copy = self.context.functions.copy;
        // SAFETY: as the caller promises.
        let code = unsafe { copy(to, from, bytes, self.stream) };
        check(
            &format!("cuMemcpyAsync of {bytes} bytes from {from:#x} to {to:#x}"),
            code,
        )
    }

    pub(crate) fn wait(&self) -> Result<(), NetworkError> {
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe {
            (self.context.functions.wait)(self.stream)
        })
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let functions = &self.context.functions;
        // The driver may refuse, in a process that exits: then all goes with the process.
        // SAFETY: the stream is idle when the memory goes.
        unsafe {
            if !self.stream.is_null() {
                (functions.wait)(self.stream);
                (functions.destroy_stream)(self.stream);
            }
            if !self.pinned.is_null() {
                (functions.unpin)(self.pinned);
            }
        }
    }
}
