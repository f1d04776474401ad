//! The fault page, and the counts after it, in pinned host memory.

use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
    /// Number of words after the page.
    counts: usize,
    address: u64,
}

// SAFETY: the words are atomic, and pinned memory belongs to no thread.
unsafe impl Send for PinnedPage {}
// SAFETY: as above.
unsafe impl Sync for PinnedPage {}

impl PinnedPage {
    /// Allocates an empty page and as many words after it. Synchronizes.
    pub(super) fn alloc(core: Arc<Core>, counts: usize) -> Result<Self, Error> {
        let current = core.context.enter()?;
        let mut memory = ptr::null_mut();
        let bytes = size_of::<FaultPage>() + size_of::<u64>() * counts;
        let flags = sys::MEMHOSTALLOC_PORTABLE | sys::MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: `memory` is a live pointer to write to, and a context is current.
        check("cuMemHostAlloc", unsafe {
            sys::cuMemHostAlloc(&mut memory, bytes, flags)
        })?;
        let Some(words) = NonNull::new(memory.cast::<[AtomicU64; WORDS]>()) else {
            let detail = "the driver returned no memory".to_owned();
            return Err(super::error::error(
                "cuMemHostAlloc",
                sys::INVALID_VALUE,
                detail,
            ));
        };
        // SAFETY: the driver returned `bytes` bytes, aligned to a page of the system, and nobody else uses
        // them yet. All zero is a valid value.
        unsafe { words.cast::<u8>().write_bytes(0, bytes) };
        let mut page = Self {
            core: core.clone(),
            words,
            counts,
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

// SAFETY: the driver allocated the memory with the size of a fault page and its words, for all devices, and
// it is freed when the value is dropped; the host accesses it as atomic words.
unsafe impl SharedPage for PinnedPage {
    fn address(&self) -> u64 {
        self.address
    }

    fn read(&self) -> Result<FaultPage, Error> {
        Ok(fault_page::read(self.words()))
    }

    fn counts(&self, words: &mut [u64]) -> Result<(), Error> {
        // SAFETY: `counts` words follow those of the page, allocated until `self` is dropped, and host and
        // device write them in whole words.
        let counts = unsafe {
            let first = self.words.as_ptr().add(1).cast::<AtomicU64>();
            slice::from_raw_parts(first, self.counts)
        };
        let mut order = Ordering::Acquire;
        for (word, count) in words.iter_mut().zip(counts) {
            *word = count.load(order);
            order = Ordering::Relaxed;
        }
        Ok(())
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
