//! Loads of vectors from global into shared memory (PTX ISA, "cp.async"), which occupy no registers while in
//! flight. Each lane waits for its own loads. A lane that reads its own loads needs nothing more; lanes that
//! read each other's ([`Pipeline::read_pair`]) converge before, and again before the slot is loaded anew.

use core::arch::{asm, global_asm};

use ferry_layout::PIPELINE_BYTES;

use crate::ptx::memory::{Vector, WARP_BYTES};
use crate::ptx::thread;

global_asm!(".extern .shared .align 128 .b8 ferry_ring[];");

/// A lane's part of its warp's pipeline, cut into `SLOTS` slots.
#[derive(Clone, Copy)]
pub struct Pipeline<const SLOTS: u32> {
    base: u32,
}

impl<const SLOTS: u32> Pipeline<SLOTS> {
    /// The pipeline of this lane. The host launches kernels that use it with [`PIPELINE_BYTES`] of shared
    /// memory for each warp.
    #[inline(always)]
    pub fn of_lane() -> Self {
        let base: u32;
        // SAFETY: takes an address.
        unsafe {
            asm!("mov.u32 {}, ferry_ring;", out(reg32) base, options(pure, nomem, nostack, preserves_flags));
        }
        let warp = thread::thread() / ferry_protocol::LANES;
        let lane = thread::lane() * size_of::<Vector>() as u32;
        Self {
            base: base + warp * PIPELINE_BYTES + lane,
        }
    }

    #[inline(always)]
    fn at(self, slot: u32, vector: u32) -> u32 {
        self.base + slot * (PIPELINE_BYTES / SLOTS) + vector * WARP_BYTES
    }

    /// Begins to load this lane's vectors from byte `start` of a row into a slot, those before byte `end`.
    ///
    /// # Safety
    /// `row` has `end` bytes, and the slot's earlier contents were read.
    #[inline(always)]
    pub unsafe fn load<const DEPTH: usize>(self, slot: u32, row: u64, start: u32, end: u32) {
        let first = row + start as u64;
        core::array::from_fn::<(), DEPTH, _>(|index| {
            let before = index as u32 * WARP_BYTES;
            let at = start + before;
            // SAFETY: active only inside the row.
            unsafe {
                asm!("{{ .reg .pred p; setp.lt.u32 p, {}, {};",
                    "@p cp.async.cg.shared.global [{}], [{}], 16; }}",
                    in(reg32) at, in(reg32) end, in(reg32) self.at(slot, index as u32),
                    in(reg64) first + before as u64,
                    options(nostack, preserves_flags));
            }
        });
    }

    /// Begins to load the vectors of lane `lane` of the bytes from `start` on into a slot, those
    /// before `end`.
    ///
    /// # Safety
    /// The bytes can be read, and the slot's earlier contents were read.
    #[inline(always)]
    pub unsafe fn load_addresses<const DEPTH: usize>(
        self,
        slot: u32,
        start: u64,
        end: u64,
        lane: u32,
    ) {
        let first = start + lane as u64 * size_of::<Vector>() as u64;
        core::array::from_fn::<(), DEPTH, _>(|index| {
            let from = first + (index as u32 * WARP_BYTES) as u64;
            // SAFETY: active only inside the bytes.
            unsafe {
                asm!("{{ .reg .pred p; setp.lt.u64 p, {}, {};",
                    "@p cp.async.cg.shared.global [{}], [{}], 16; }}",
                    in(reg64) from, in(reg64) end, in(reg32) self.at(slot, index as u32), in(reg64) from,
                    options(nostack, preserves_flags));
            }
        });
    }

    /// The landed contents of a slot; arbitrary from the row's end on.
    #[inline(always)]
    pub fn read<const DEPTH: usize>(self, slot: u32) -> [Vector; DEPTH] {
        core::array::from_fn(|index| read(self.at(slot, index as u32)))
    }

    /// Two consecutive vectors, the lane's `lane`-th pair, of the loads of all lanes into a slot: these have
    /// landed on all lanes, which have [converged](thread::converge) since.
    #[inline(always)]
    pub fn read_pair(self, slot: u32, lane: u32) -> [Vector; 2] {
        let bytes = size_of::<Vector>() as u32;
        // From the lane's own vector on.
        let first = self.at(slot, 0) + lane * bytes;
        [read(first), read(first + bytes)]
    }
}

/// The vector at a shared address of a pipeline.
#[inline(always)]
fn read(at: u32) -> Vector {
    let (a, b, c, d);
    // SAFETY: the callers stay in the pipeline.
    unsafe {
        asm!("ld.shared.v4.u32 {{{}, {}, {}, {}}}, [{}];", out(reg32) a, out(reg32) b, out(reg32) c,
            out(reg32) d, in(reg32) at, options(nostack, preserves_flags));
    }
    [a, b, c, d]
}

/// Ends a group of loads, which may be empty.
#[inline(always)]
pub fn commit() {
    // SAFETY: touches no memory.
    unsafe { asm!("cp.async.commit_group;", options(nostack, preserves_flags)) }
}

/// Waits until all of this lane's groups but the last `PENDING` have landed.
#[inline(always)]
pub fn wait_for_all_but<const PENDING: u32>() {
    // SAFETY: waits for loads of this thread.
    unsafe {
        asm!("cp.async.wait_group {};", const PENDING, options(nostack, preserves_flags));
    }
}
