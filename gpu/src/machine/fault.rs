//! Actions of a warp that gives up or refuses an input: functions that are not inlined, since they are rarely
//! called.

use bytemuck::cast;
use ferry_layout::{Counter, Fault, FaultPage, LastRecord, Rank, Signal};

use crate::ptx::memory;
use crate::shmem;

/// Attempts of a lane to get the lock of the fault page. Each takes about a microsecond, as long as its
/// holder needs for a store over the bus.
const MOST_TRIES: u32 = 1 << 16;

/// Words of a page that are stored between the numbers of a record.
const RECORD_WORDS: core::ops::Range<usize> = 1..size_of::<FaultPage>() / 8 - 2;
const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(FaultPage, begun) == 0);
    assert!(offset_of!(FaultPage, complete) == 8 * RECORD_WORDS.end);
};

/// Packs the small fields of a fault into one word: kind, kernel, region, peer, culprit. Not the rank, with
/// which the word would be kept in registers for each wait.
#[inline(always)]
pub fn pack(fault: &Fault) -> u64 {
    fault.kind as u64
        | (fault.kernel as u64) << 8
        | (fault.region as u64) << 16
        | (fault.peer.0 as u64) << 24
        | (fault.culprit.0 as u64) << 40
}

/// Expected and actual value: two numbers that are passed in registers.
#[derive(Clone, Copy)]
pub struct Seen {
    /// See [`Fault::wanted`].
    pub wanted: u64,
    /// See [`Fault::saw`].
    pub saw: u64,
}

/// Writes a record to the fault page, unless the one on the page matters more. Not inlined: it is called from
/// every wait, and rarely. Writes none if the lock does not come free: then another record is being written.
///
/// # Safety
/// `page` is the fault page of this rank, and the counters begin at `workspace`.
#[inline(never)]
pub unsafe fn write(
    page: u64,
    workspace: u64,
    packed: u64,
    rank: Rank,
    index: u64,
    seen: Seen,
    epoch: u64,
) {
    let lock = workspace + Counter::FaultLock.bytes();
    let last = workspace + Counter::FaultRecord.bytes();
    let kind = packed & 0xff;
    let Seen { wanted, saw } = seen;
    let mut tries = 0;
    // SAFETY: the counters begin at `workspace`: documented above.
    while unsafe { memory::exchange_acq_rel_gpu(lock, 1) } != 0 {
        tries += 1;
        if tries == MOST_TRIES {
            return;
        }
    }
    let acknowledged = || {
        let at = page + core::mem::offset_of!(FaultPage, acknowledged) as u64;
        // SAFETY: a word of the page.
        unsafe { memory::load_relaxed_sys(at) }
    };
    // SAFETY: `page` is this rank's fault page: documented above; the lock is held.
    unsafe {
        let held = LastRecord(memory::load_relaxed_gpu(last));
        if let Some(number) = held.next(kind, acknowledged) {
            let record = FaultPage {
                begun: number,
                kind,
                kernel: packed >> 8 & 0xff,
                region: packed >> 16 & 0xff,
                rank: rank.0 as u64,
                peer: packed >> 24 & 0xffff,
                culprit: packed >> 40 & 0xffff,
                index,
                wanted,
                saw,
                epoch,
                complete: number,
                acknowledged: 0,
            };
            let words: [u64; size_of::<FaultPage>() / 8] = cast(record);
            memory::store_relaxed_sys(page, number);
            memory::fence_acq_rel_sys();
            for index in RECORD_WORDS {
                memory::store_relaxed_sys(page + 8 * index as u64, words[index]);
            }
            memory::fence_acq_rel_sys();
            memory::store_relaxed_sys(page + 8 * RECORD_WORDS.end as u64, number);
            memory::store_release_gpu(last, LastRecord::new(number, kind, record.culprit).0);
        }
        memory::store_release_gpu(lock, 0);
    }
}

/// Stores `value` into the word `at` of the windows of those of `ranks` ranks that are on this rank's node:
/// `of_node` from `first` on.
///
/// # Safety
/// `peers` is the table of the ranks' windows, in which `at` is a signal word.
#[inline(never)]
pub unsafe fn signal_all(
    peers: u64,
    ranks: u32,
    first: Rank,
    of_node: u32,
    at: Signal,
    value: u64,
) {
    for rank in 0..ranks {
        // SAFETY: `peers` has the windows of all ranks, with a signal word at `at`: documented above.
        unsafe {
            let word = memory::load_constant_u64(peers + 8 * rank as u64) + at.bytes();
            if rank.wrapping_sub(first.0) < of_node {
                memory::store_relaxed_sys(word, value);
            }
        }
    }
}

/// Puts the word at `word` in the own window to the `ranks` ranks but for the `of_node` of this node from
/// `first` on, as far as there is room. What is in it was stored by this thread.
///
/// # Safety
/// `word` is a signal word of the own window, a symmetric address, and nobody stores another value there.
#[inline(never)]
pub unsafe fn put_all(word: u64, ranks: u32, first: Rank, of_node: u32) {
    memory::fence_acq_rel_sys();
    for rank in 0..ranks {
        if rank.wrapping_sub(first.0) >= of_node && shmem::has_room() {
            // SAFETY: a word of the symmetric windows, which stays: documented above.
            unsafe { shmem::put_words(rank, word, word, 8) };
        }
    }
}
