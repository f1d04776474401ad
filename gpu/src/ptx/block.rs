//! What the warps of a block share: counters in shared memory.

use core::arch::asm;

use ferry_layout::Counter;

use super::thread;

/// A counter for each gate that the warps of a block pass once in a launch.
#[derive(Clone, Copy)]
pub struct Gates {
    base: u32,
}

const _: () = assert!(Counter::COUNT == 8, "as many words are declared below");

impl Gates {
    /// The block's gates, not passed by anybody. Called once in a kernel, by all threads.
    #[inline(always)]
    pub fn set_up() -> Self {
        let base: u32;
        // SAFETY: declares shared memory of the block and takes its address.
        unsafe {
            asm!("{{ .shared .align 4 .b8 ferry_gates[32]; mov.u32 {}, ferry_gates; }}",
                out(reg32) base, options(nostack, preserves_flags));
        }
        let at = base + 4 * thread::thread();
        if thread::thread() < Counter::COUNT as u32 {
            // SAFETY: one of the eight words above, written by this thread alone.
            unsafe {
                asm!("st.shared.u32 [{}], 0;", in(reg32) at, options(nostack, preserves_flags));
            }
        }
        thread::block_barrier();
        Self { base }
    }

    /// Passes a gate: how many did before. Releases what this thread wrote and acquires what those
    /// before it released. For one lane.
    #[inline(always)]
    pub fn pass(self, gate: u32) -> u32 {
        let at = self.base + 4 * gate;
        let passed: u32;
        // SAFETY: one of the eight words of `set_up`.
        unsafe {
            asm!("atom.acq_rel.cta.shared.add.u32 {}, [{}], 1;", out(reg32) passed, in(reg32) at,
                options(nostack, preserves_flags));
        }
        passed
    }
}
