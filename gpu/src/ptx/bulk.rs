//! Bulk copies through shared memory by the copy unit of sm_90 ("TMA"), and the barriers in shared memory
//! that signal when one has landed (PTX ISA 8.x, "cp.async.bulk", "mbarrier").
//!
//! One thread of a block issues them. The same unit reads a landed piece, so no proxy fence is needed between
//! the two copies.

use core::arch::asm;

/// Bytes of a stage: the most that one copy moves.
pub const STAGE_BYTES: u32 = 15_360;
/// Stages of a block. With their barriers they fill the 48 KiB that need no opt-in.
pub const STAGES: u32 = 3;

/// A block's stages in shared memory, and a barrier for each.
#[derive(Clone, Copy)]
pub struct Stages {
    base: u32,
}

impl Stages {
    /// The block's only instance, its barriers set up for one arrival a phase. Called once in a
    /// kernel, by one thread.
    #[inline(always)]
    pub fn set_up() -> Self {
        let base: u32;
        // SAFETY: declares shared memory of the block and takes its address: 3 * 15,360 bytes
        // and three words.
        unsafe {
            asm!("{{ .shared .align 128 .b8 ferry_stages[46104]; mov.u32 {}, ferry_stages; }}",
                out(reg32) base, options(nostack, preserves_flags));
        }
        let stages = Self { base };
        for stage in 0..STAGES {
            // SAFETY: the barrier lies in the memory above.
            unsafe {
                asm!("mbarrier.init.shared::cta.b64 [{}], 1;", in(reg32) stages.barrier(stage),
                    options(nostack, preserves_flags));
            }
        }
        // SAFETY: a fence touches no memory of its own; it shows the barriers to the copy unit.
        unsafe { asm!("fence.proxy.async;", options(nostack, preserves_flags)) }
        stages
    }

    #[inline(always)]
    fn memory(self, stage: u32) -> u32 {
        self.base + stage * STAGE_BYTES
    }

    #[inline(always)]
    fn barrier(self, stage: u32) -> u32 {
        self.base + STAGES * STAGE_BYTES + 8 * stage
    }

    /// Starts to load `bytes` from global memory into a stage.
    ///
    /// # Safety
    /// `from` and `bytes` are multiples of 16 inside a live allocation, `bytes` is at most
    /// [`STAGE_BYTES`], nobody writes there, and nothing reads or fills the stage now.
    #[inline(always)]
    pub unsafe fn load(self, stage: u32, from: u64, bytes: u32) {
        // SAFETY: `bytes` live bytes from `from`, which nobody writes, fit in the idle stage: documented
        // above.
        unsafe {
            asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {bytes};",
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
                 [{stage}], [{from}], {bytes}, [{barrier}];",
                barrier = in(reg32) self.barrier(stage), bytes = in(reg32) bytes,
                stage = in(reg32) self.memory(stage), from = in(reg64) from,
                options(nostack, preserves_flags));
        }
    }

    /// Whether the stage's load number `load` (0, 1, ..) has landed.
    #[inline(always)]
    pub fn has_landed(self, stage: u32, load: u32) -> bool {
        let landed: u32;
        // SAFETY: the barrier was set up.
        unsafe {
            asm!("{{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{}], {};",
                "selp.u32 {}, 1, 0, p; }}", in(reg32) self.barrier(stage), in(reg32) load & 1,
                out(reg32) landed, options(nostack, preserves_flags));
        }
        landed != 0
    }

    /// Starts to store `bytes` of a stage to global memory, as a group of its own.
    ///
    /// # Safety
    /// The stage's load has landed with as many bytes; `to` is a multiple of 16 inside a live
    /// allocation that nobody else accesses.
    #[inline(always)]
    pub unsafe fn store(self, stage: u32, to: u64, bytes: u32) {
        // SAFETY: the stage holds `bytes` bytes, for which `to` has room: documented above.
        unsafe {
            asm!("cp.async.bulk.global.shared::cta.bulk_group [{}], [{}], {};",
                "cp.async.bulk.commit_group;", in(reg64) to, in(reg32) self.memory(stage),
                in(reg32) bytes, options(nostack, preserves_flags));
        }
    }
}

/// Waits until all stores but the last one have read their stage.
#[inline(always)]
pub fn wait_all_but_last_read() {
    // SAFETY: waits for copies of this thread.
    unsafe {
        asm!(
            "cp.async.bulk.wait_group.read 1;",
            options(nostack, preserves_flags)
        )
    }
}

/// Waits until all stores are done.
#[inline(always)]
pub fn wait_all_stored() {
    // SAFETY: waits for copies of this thread.
    unsafe {
        asm!(
            "cp.async.bulk.wait_group 0;",
            options(nostack, preserves_flags)
        )
    }
}
