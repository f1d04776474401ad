//! The fault page in pinned host memory.

use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ferry_layout::FaultPage;

use super::core::Core;
use super::error::check;
use super::sys;
use crate::device::SharedPage;
use crate::device::fault_page;
use crate::device::fault_page::WORDS;
use crate::error::Error;

/// Pinned host memory that the device writes over the bus and the host reads directly.
///
/// A drop frees the memory, which synchronizes: no kernel that was passed
/// its address may run then.
pub(super) struct PinnedPage {
    core: Arc<Core>,
    words: NonNull<[AtomicU64; WORDS]>,
    address: u64,
}

// SAFETY: the words are atomic, and pinned memory belongs to no thread.
unsafe impl Send for PinnedPage {}
// SAFETY: as above.
unsafe impl Sync for PinnedPage {}

impl PinnedPage {
    /// Allocates an empty page. Synchronizes.
    pub(super) fn alloc(core: Arc<Core>) -> Result<Self, Error> {
        let current = core.context.enter()?;
        let mut memory = ptr::null_mut();
        let flags = sys::MEMHOSTALLOC_PORTABLE | sys::MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: `memory` is a live pointer to write to, and a context is current.
        check("cuMemHostAlloc", unsafe {
            sys::cuMemHostAlloc(&mut memory, size_of::<FaultPage>(), flags)
        })?;
        let Some(words) = NonNull::new(memory.cast::<[AtomicU64; WORDS]>()) else {
            let detail = "the driver returned no memory".to_owned();
            return Err(super::error::error(
                "cuMemHostAlloc",
                sys::INVALID_VALUE,
                detail,
            ));
        };
        // SAFETY: the driver returned as many bytes as a fault page has, aligned to a page of the system,
        // and nobody else uses them yet. All zero is a valid value.
        unsafe { words.write_bytes(0, 1) };
        let mut page = Self {
            core: core.clone(),
            words,
            address: 0,
        };
        // SAFETY: the memory was allocated for devices to address; `address` is live. The page
        // frees the memory if this fails.
        check("cuMemHostGetDevicePointer", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut page.address, memory, 0)
        })?;
        drop(current);
        Ok(page)
    }

    fn words(&self) -> &[AtomicU64; WORDS] {
        // SAFETY: the memory is allocated until `self` is dropped, and host and device
        // write it in whole words.
        unsafe { self.words.as_ref() }
    }
}

// SAFETY: the driver allocated the memory with the size of a fault page, for all devices, and it is
// freed when the value is dropped; the host accesses it as atomic words.
unsafe impl SharedPage for PinnedPage {
    fn address(&self) -> u64 {
        self.address
    }

    fn read(&self) -> FaultPage {
        fault_page::read(self.words())
    }

    fn acknowledge(&self, number: u64) {
        fault_page::acknowledge(self.words(), number);
    }
}

impl Drop for PinnedPage {
    fn drop(&mut self) {
        let Ok(_current) = self.core.context.enter() else {
            return;
        };
        // SAFETY: `PinnedPage::alloc` got the memory from `cuMemHostAlloc`, and only this frees it.
        let freed = unsafe { sys::cuMemFreeHost(self.words.as_ptr().cast()) };
        if let Err(error) = check("cuMemFreeHost", freed) {
            tracing::warn!(%error, "cannot free a fault page");
        }
    }
}
