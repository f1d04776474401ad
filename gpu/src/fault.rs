//! The fault page, written by whichever lane meets a fault first.

use bytemuck::cast;
use ferry_layout::{Fault, FaultPage, Rank};

use crate::ptx::memory;

/// The small fields of a fault in one word: kind, kernel, region, peer. Not the rank, with which the word would
/// be kept in registers for each wait.
#[inline(always)]
pub fn pack(fault: &Fault) -> u64 {
    fault.kind as u64
        | (fault.kernel as u64) << 8
        | (fault.region as u64) << 16
        | (fault.peer.0 as u64) << 24
}

/// Writes the fault page unless it holds a fault. Not inlined: it is called from every wait, and
/// hardly ever.
///
/// # Safety
/// `page` is the fault page and `lock` the fault lock of this rank.
#[inline(never)]
pub unsafe fn write(
    page: u64,
    lock: u64,
    (packed, rank): (u64, Rank),
    index: u64,
    wanted: u64,
    saw: u64,
    epoch: u64,
) {
    let kind = packed & 0xff;
    let record = FaultPage {
        state: FaultPage::COMPLETE,
        kind,
        kernel: packed >> 8 & 0xff,
        region: packed >> 16 & 0xff,
        rank: rank.0 as u64,
        peer: packed >> 24 & 0xffff,
        index,
        wanted,
        saw,
        epoch,
    };
    // SAFETY: the caller's promise.
    unsafe {
        // A few instructions at most: the holder waits for nothing.
        while memory::exchange_acq_rel_gpu(lock, 1) != 0 {}
        let (state, held) = (
            memory::load_relaxed_sys(page),
            memory::load_relaxed_sys(page + 8),
        );
        if FaultPage::gives_way(state, held, kind) {
            // The host reads a page only when its state says complete.
            memory::store_relaxed_sys(page, FaultPage::EMPTY);
            memory::fence_acq_rel_sys();
            let words: [u64; size_of::<FaultPage>() / 8] = cast(record);
            for (index, &word) in words.iter().enumerate().skip(1) {
                memory::store_relaxed_sys(page + 8 * index as u64, word);
            }
            memory::fence_acq_rel_sys();
            memory::store_relaxed_sys(page, FaultPage::COMPLETE);
        }
        memory::store_release_gpu(lock, 0);
    }
}
