//! What the warps of a block share: counters and words in shared memory.

use core::arch::asm;

use ferry_protocol::{Gate, LANES};

use super::thread;

/// A counter for each gate that the warps of a block pass once in a launch, and a double word for each
/// warp, to hand over.
#[derive(Clone, Copy)]
pub struct Gates {
    base: u32,
}

/// Bytes from the start to the double words.
const WORDS: u32 = 16;

const _: () = assert!(
    4 * Gate::COUNT <= WORDS as usize && WORDS + 8 * LANES == 272,
    "as many bytes are declared below"
);

impl Gates {
    /// The block's gates, not passed by anybody, and no words. Called once in a kernel, by all threads.
    #[inline(always)]
    pub fn set_up() -> Self {
        let base: u32;
        // SAFETY: declares shared memory of the block and takes its address.
        unsafe {
            asm!("{{ .shared .align 16 .b8 ferry_gates[272]; mov.u32 {}, ferry_gates; }}",
                out(reg32) base, options(nostack, preserves_flags));
        }
        let at = base + 16 * thread::thread();
        if 16 * thread::thread() < WORDS + 8 * LANES {
            // SAFETY: sixteen of the bytes above, written by this thread alone.
            unsafe {
                asm!("st.shared.v4.u32 [{}], {{0, 0, 0, 0}};", in(reg32) at,
                    options(nostack, preserves_flags));
            }
        }
        thread::block_barrier();
        Self { base }
    }

    /// Passes a gate: how many did before. Releases what this thread wrote and acquires what those
    /// before it released. For one lane.
    #[inline(always)]
    pub fn pass(self, gate: Gate) -> u32 {
        let at = self.base + 4 * gate as u32;
        let passed: u32;
        // SAFETY: one of the words of `set_up`.
        unsafe {
            asm!("atom.acq_rel.cta.shared.add.u32 {}, [{}], 1;", out(reg32) passed, in(reg32) at,
                options(nostack, preserves_flags));
        }
        passed
    }

    /// Leaves a word for whoever passes a gate later. `warp` is this one's number in the block. For
    /// one lane.
    #[inline(always)]
    pub fn leave(self, warp: u32, word: u64) {
        let at = self.base + WORDS + 8 * warp;
        // SAFETY: one of the double words of `set_up`, written by this warp alone.
        unsafe {
            asm!("st.shared.u64 [{}], {};", in(reg32) at, in(reg64) word,
                options(nostack, preserves_flags));
        }
    }

    /// What a warp of the block has left.
    #[inline(always)]
    pub fn left_by(self, warp: u32) -> u64 {
        let at = self.base + WORDS + 8 * warp;
        let word;
        // SAFETY: one of the double words of `set_up`.
        unsafe {
            asm!("ld.shared.u64 {}, [{}];", out(reg64) word, in(reg32) at,
                options(nostack, preserves_flags));
        }
        word
    }
}
