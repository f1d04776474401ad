//! What the warps of a block share: a few words in shared memory.

use core::arch::asm;

use ferry_layout::MAX_RANKS;
use ferry_protocol::{Gate, LANES};

use super::{memory, thread};

/// A counter for each gate that the warps of a block pass once in a launch, when it began, a double word
/// for each warp to hand over, and the peers' windows.
#[derive(Clone, Copy)]
pub struct Block {
    base: u32,
}

/// Bytes from the start to the time of the launch's start.
const STARTED: u32 = 16;
/// Bytes from the start to the double words that are handed over.
const WORDS: u32 = 32;
/// Bytes from the start to the windows.
const WINDOWS: u32 = WORDS + 8 * LANES;

const _: () = assert!(
    4 * Gate::COUNT <= STARTED as usize && WINDOWS + 8 * MAX_RANKS == 800,
    "as many bytes are declared below"
);

impl Block {
    /// No gate passed by anybody, no words, and the windows of `ranks` peers from the table at `peers`.
    /// Called once in a kernel, by all threads; `loads` gives what is loaded beside the windows, while
    /// all wait.
    ///
    /// # Safety
    /// `peers` has as many entries, which nobody writes.
    #[inline(always)]
    pub unsafe fn set_up<T>(peers: u64, ranks: u32, loads: impl FnOnce() -> T) -> (Self, T) {
        let base: u32;
        // SAFETY: declares shared memory of the block and takes its address.
        unsafe {
            asm!("{{ .shared .align 16 .b8 ferry_block[800]; mov.u32 {}, ferry_block; }}",
                out(reg32) base, options(nostack, preserves_flags));
        }
        let block = Self { base };
        let (thread, threads) = (thread::thread(), thread::threads());
        let loaded = loads();
        let mut rank = thread;
        while rank < ranks {
            // SAFETY: the caller's promise.
            let window = unsafe { memory::load_constant_u64(peers + 8 * rank as u64) };
            block.store(WINDOWS + 8 * rank, window);
            rank += threads;
        }
        let mut at = 8 * thread;
        while at < WINDOWS {
            let is_start = at == STARTED;
            block.store(
                at,
                if is_start {
                    thread::global_timer_ns()
                } else {
                    0
                },
            );
            at += 8 * threads;
        }
        thread::block_barrier();
        let after: u32;
        // SAFETY: copies a register. Not pure: it stays behind the barrier, and with it whatever needs
        // its result.
        unsafe {
            asm!("mov.u32 {}, {};", out(reg32) after, in(reg32) base,
                options(nostack, preserves_flags));
        }
        (Self { base: after }, loaded)
    }

    /// Stores the double word `at` bytes from the start.
    #[inline(always)]
    fn store(self, at: u32, word: u64) {
        // SAFETY: the callers name double words of `set_up`, which nobody else writes meanwhile.
        unsafe {
            asm!("st.shared.u64 [{}], {};", in(reg32) self.base + at, in(reg64) word,
                options(nostack, preserves_flags));
        }
    }

    /// Loads the double word `at` bytes from the start.
    #[inline(always)]
    fn load(self, at: u32) -> u64 {
        let word;
        // SAFETY: the callers name double words of `set_up`.
        unsafe {
            asm!("ld.shared.u64 {}, [{}];", out(reg64) word, in(reg32) self.base + at,
                options(nostack, preserves_flags));
        }
        word
    }

    /// When the launch began. Here rather than in registers, which it would occupy all the time.
    #[inline(always)]
    pub fn started_ns(self) -> u64 {
        self.load(STARTED)
    }

    /// The window of a rank as it is addressed from here.
    #[inline(always)]
    pub fn window(self, rank: u32) -> u64 {
        let window;
        // SAFETY: one of the double words of `set_up`; `pure` and `nomem` hold because nobody writes
        // there after it.
        unsafe {
            asm!("ld.shared.u64 {}, [{}];", out(reg64) window,
                in(reg32) self.base + WINDOWS + 8 * rank,
                options(pure, nomem, nostack, preserves_flags));
        }
        window
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
        self.store(WORDS + 8 * warp, word);
    }

    /// What a warp of the block has left.
    #[inline(always)]
    pub fn left_by(self, warp: u32) -> u64 {
        self.load(WORDS + 8 * warp)
    }
}
