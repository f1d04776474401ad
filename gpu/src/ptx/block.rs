//! What the warps of a block share: a few words in shared memory.

use core::arch::asm;

use ferry_layout::{FEW_ENTRIES, MAX_RANKS};
use ferry_protocol::{Gate, LANES};

use super::{memory, thread};

/// A counter for each gate that the warps of a block pass once in a launch, when it began, a double word
/// for each warp to hand over, the peers' windows, what some counters held, and the router's ids, where
/// they are few.
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
/// Bytes from the start to the counters.
const HELD: u32 = WINDOWS + 8 * MAX_RANKS;
/// Bytes from the start to the ids.
const IDS: u32 = HELD + 32;

/// Ids that a thread loads at a time.
const DEPTH: u32 = 4;
/// Counters that are looked at.
pub const COUNTERS: usize = 3;

/// Bytes from the start to the counts of entries.
const ENTRIES: u32 = IDS + 4 * FEW_ENTRIES;
/// Experts whose entries a block counts.
pub const BLOCK_EXPERTS: u32 = 1024;

const _: () = assert!(
    4 * Gate::COUNT <= STARTED as usize
        && 8 * COUNTERS <= (IDS - HELD) as usize
        && ENTRIES + 4 * BLOCK_EXPERTS == 13120,
    "as many bytes are declared below"
);

/// What a block keeps close. Addresses are device addresses.
pub struct SetUp {
    /// The windows of `ranks` peers.
    pub peers: u64,
    /// How many there are.
    pub ranks: u32,
    /// Counters to look at.
    pub counters: [u64; COUNTERS],
    /// Address and number of the router's ids, at most [`FEW_ENTRIES`]; `None` where nobody asks.
    pub ids: Option<(u64, u32)>,
    /// Experts of the group.
    pub experts: u32,
}

impl Block {
    /// No gate passed by anybody, no words, and what `set_up` says. Called once in a kernel, by all
    /// threads. All loads are on their way before one is waited for.
    ///
    /// # Safety
    /// The addresses are those of as many words. Nobody writes windows and ids.
    #[inline(always)]
    pub unsafe fn set_up(set_up: &SetUp) -> Self {
        let base: u32;
        // SAFETY: declares shared memory of the block and takes its address.
        unsafe {
            asm!("{{ .shared .align 16 .b8 ferry_block[13120]; mov.u32 {}, ferry_block; }}",
                out(reg32) base, options(nostack, preserves_flags));
        }
        let block = Self { base };
        let (thread, threads) = (thread::thread(), thread::threads());
        let (ids_at, ids_count) = set_up.ids.unwrap_or((0, 0));
        // SAFETY: the caller's promise; looked at again rather than beyond the end.
        let id_at = |index: u32| unsafe {
            let index = index.min(ids_count.wrapping_sub(1));
            memory::load_constant_u32(ids_at + 4 * index as u64)
        };
        // SAFETY: the caller's promise.
        let window_of =
            |rank: u32| unsafe { memory::load_constant_u64(set_up.peers + 8 * rank as u64) };
        let (mut held, mut window) = (0, 0);
        let mut ids = [0; DEPTH as usize];
        for (index, &counter) in set_up.counters.iter().enumerate() {
            if thread == index as u32 {
                // SAFETY: the caller's promise.
                held = unsafe { memory::load_relaxed_gpu(counter) };
            }
        }
        if thread < set_up.ranks {
            window = window_of(thread);
        }
        if ids_count != 0 {
            ids = core::array::from_fn(|step| id_at(thread + step as u32 * threads));
        }
        if thread < COUNTERS as u32 {
            block.store(HELD + 8 * thread, held);
        }
        let mut rank = thread;
        while rank < set_up.ranks {
            block.store(WINDOWS + 8 * rank, window);
            rank += threads;
            window = window_of(rank.min(set_up.ranks - 1));
        }
        let mut first = thread;
        while first < ids_count {
            core::array::from_fn::<(), { DEPTH as usize }, _>(|step| {
                let index = first + step as u32 * threads;
                if index < ids_count {
                    block.store_word(IDS + 4 * index, ids[step]);
                }
            });
            first += DEPTH * threads;
            if first < ids_count {
                ids = core::array::from_fn(|step| id_at(first + step as u32 * threads));
            }
        }
        let counts = set_up.ids.is_some() && thread::block() * LANES < set_up.experts;
        if counts {
            let mut expert = thread;
            while expert < set_up.experts.min(BLOCK_EXPERTS) {
                block.store_word(ENTRIES + 4 * expert, 0);
                expert += threads;
            }
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
        if counts {
            let mut index = thread;
            while index < ids_count {
                block.count_entry(block.load_word(IDS + 4 * index));
                index += threads;
            }
            thread::block_barrier();
        }
        let after: u32;
        // SAFETY: copies a register. Not pure: it stays behind the barrier, and with it whatever needs
        // its result.
        unsafe {
            asm!("mov.u32 {}, {};", out(reg32) after, in(reg32) base,
                options(nostack, preserves_flags));
        }
        Self { base: after }
    }

    /// What a counter held when the launch began.
    #[inline(always)]
    pub fn counter(self, index: u32) -> u64 {
        self.load_constant(HELD + 8 * index)
    }

    /// One of the router's ids.
    #[inline(always)]
    pub fn id(self, index: u32) -> u32 {
        self.load_constant_word(IDS + 4 * index)
    }

    /// Counts one entry more for an expert.
    #[inline(always)]
    fn count_entry(self, expert: u32) {
        if expert < BLOCK_EXPERTS {
            // SAFETY: one of the words of `set_up`.
            unsafe {
                asm!("red.relaxed.cta.shared.add.u32 [{}], 1;",
                    in(reg32) self.base + ENTRIES + 4 * expert, options(nostack, preserves_flags));
            }
        }
    }

    /// Entries of an expert below [`BLOCK_EXPERTS`], in the first `experts / 32` blocks.
    #[inline(always)]
    pub fn entries_of(self, expert: u32) -> u32 {
        self.load_constant_word(ENTRIES + 4 * expert)
    }

    /// Loads the word `at` bytes from the start, which stays as `set_up` left it.
    #[inline(always)]
    fn load_constant_word(self, at: u32) -> u32 {
        let word;
        // SAFETY: one of the words of `set_up`; `pure` and `nomem` hold because nobody writes there after
        // it.
        unsafe {
            asm!("ld.shared.u32 {}, [{}];", out(reg32) word, in(reg32) self.base + at,
                options(pure, nomem, nostack, preserves_flags));
        }
        word
    }

    /// Loads the word `at` bytes from the start.
    #[inline(always)]
    fn load_word(self, at: u32) -> u32 {
        let word;
        // SAFETY: the callers name words of `set_up`.
        unsafe {
            asm!("ld.shared.u32 {}, [{}];", out(reg32) word, in(reg32) self.base + at,
                options(nostack, preserves_flags));
        }
        word
    }

    /// Stores the word `at` bytes from the start.
    #[inline(always)]
    fn store_word(self, at: u32, word: u32) {
        // SAFETY: the callers name words of `set_up`, which nobody else writes meanwhile.
        unsafe {
            asm!("st.shared.u32 [{}], {};", in(reg32) self.base + at, in(reg32) word,
                options(nostack, preserves_flags));
        }
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
        self.load_constant(WINDOWS + 8 * rank)
    }

    /// Loads the double word `at` bytes from the start, which stays as `set_up` left it.
    #[inline(always)]
    fn load_constant(self, at: u32) -> u64 {
        let word;
        // SAFETY: one of the double words of `set_up`; `pure` and `nomem` hold because nobody writes
        // there after it.
        unsafe {
            asm!("ld.shared.u64 {}, [{}];", out(reg64) word, in(reg32) self.base + at,
                options(pure, nomem, nostack, preserves_flags));
        }
        word
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
