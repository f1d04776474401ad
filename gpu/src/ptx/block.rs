//! Shared memory of a block: a few words of the machine, and the protocol's memory.

use core::arch::asm;

use ferry_layout::{Kernel, MAX_RANKS};
use ferry_protocol::{BLOCK_MEMORY_BYTES, BlockCounter, LANES};

use super::{memory, thread};

/// The block arrival counters, on which its warps arrive once in a launch; the deadline; the fault page's
/// address; a double word for each warp to hand over; a word that the first warp brings; the peers' windows;
/// the initial values of some words; the credits; and the memory of the protocol
/// ([`BlockMemory`](ferry_protocol::BlockMemory)).
///
/// It is as large in every kernel, so that a multiprocessor may keep the division of its memory from one to
/// the next; the gain was not measured.
#[derive(Clone, Copy)]
pub struct Block {
    base: u32,
}

/// Bytes from the start to the launch's deadline.
const DEADLINE: u32 = 16;
/// Bytes from the start to the fault page's address.
const FAULT_PAGE: u32 = 24;
/// Bytes from the start to the double words that are handed over.
const WORDS: u32 = 32;
/// Bytes from the start to a word that nobody reads.
const LAST: u32 = WORDS + 8 * LANES;
/// Bytes from the start to the word that the first warp brings.
const BROUGHT: u32 = LAST + 8;
/// Bytes from the start to the windows.
const WINDOWS: u32 = LAST + 16;
/// Bytes from the start to the initial values of the words in [`SetUp::words`].
const HELD: u32 = WINDOWS + 8 * MAX_RANKS;
/// Bytes from the start to the credits.
const CREDITS: u32 = HELD + 32;
/// Bytes from the start to the protocol's memory.
const PROTOCOLS: u32 = CREDITS + 8 * MAX_RANKS;

/// Words of the workspace that are read as a launch begins.
pub const HELD_WORDS: usize = 4;

const _: () = assert!(
    4 * BlockCounter::COUNT <= DEADLINE as usize
        && 8 * HELD_WORDS <= (CREDITS - HELD) as usize
        && PROTOCOLS.is_multiple_of(16)
        && PROTOCOLS + BLOCK_MEMORY_BYTES == 44368,
    "as many bytes are declared below"
);

const _: () = assert!(
    Kernel::Dispatch.threads(1) >= 2 * MAX_RANKS && Kernel::Combine.threads(1) >= 2 * MAX_RANKS,
    "one thread for each window, and another one for each credit"
);
const _: () = assert!(
    LAST <= 8 * 2 * MAX_RANKS,
    "a thread clears a double word at most"
);

/// Addresses from which a block sets up its memory, all on the device.
pub struct SetUp {
    /// Table of the windows of `ranks` peers.
    pub peers: u64,
    /// Number of ranks.
    pub ranks: u32,
    /// Words to read as the launch begins.
    pub words: [u64; HELD_WORDS],
    /// The page for faults.
    pub fault_page: u64,
    /// The last word of the kernel's parameters that is needed soon: reading it now fetches its cache line.
    pub last_word: u64,
}

/// Loads of a thread, possibly still in flight.
pub struct Loading {
    window: u64,
    word: u64,
    /// Loaded only if credits are needed.
    credit: Option<u64>,
}

impl Block {
    /// The block's memory, with arbitrary contents. Called once in a kernel.
    #[inline(always)]
    pub fn declare() -> Self {
        let base: u32;
        // SAFETY: declares shared memory of the block and takes its address.
        unsafe {
            asm!("{{ .shared .align 16 .b8 ferry_block[44368]; mov.u32 {}, ferry_block; }}",
                out(reg32) base, options(nostack, preserves_flags));
        }
        Self { base }
    }

    /// Loads windows and words, and waits for the kernels before this one in its stream, but not for its own
    /// loads. Once in a launch, by all threads.
    ///
    /// # Safety
    /// The addresses of `set_up` are those of as many words. Nobody writes the windows.
    #[inline(always)]
    pub unsafe fn ask(self, set_up: &SetUp) -> Loading {
        let (thread, threads) = (thread::thread(), thread::threads());
        let (mut word, mut window) = (0, 0);
        if thread < set_up.ranks {
            // SAFETY: `peers` has a window for each of `ranks` ranks, which nobody writes: documented above.
            window = unsafe { memory::load_constant_u64(set_up.peers + 8 * thread as u64) };
        }
        // By threads that have nothing else to load: each line of parameters takes a wait.
        match threads - 1 - thread {
            0 => self.store(FAULT_PAGE, set_up.fault_page),
            1 => self.store(LAST, set_up.last_word),
            _ => {}
        }
        // Nothing before this depends on earlier kernels of the stream.
        thread::wait_for_earlier_kernels();
        // One load for all of them: several predicated loads would each wait for the one before. Each by its
        // name: an array that is indexed in a loop may end up in local memory.
        let [mut word_at, second, third, fourth] = set_up.words;
        if thread == 1 {
            word_at = second;
        }
        if thread == 2 {
            word_at = third;
        }
        if thread == 3 {
            word_at = fourth;
        }
        if thread < HELD_WORDS as u32 {
            // SAFETY: the address of a word: documented above.
            word = unsafe { memory::load_relaxed_gpu(word_at) };
        }
        Loading {
            window,
            word,
            credit: None,
        }
    }

    /// The rank whose credit this thread loads: the last threads, which have little else to do, one each.
    #[inline(always)]
    fn credit_of(ranks: u32) -> Option<u32> {
        let rank = thread::threads() - 1 - thread::thread();
        (rank < ranks).then_some(rank)
    }

    /// Loads the credits, double words from `credits` on, and acquires the reads that they order. The last
    /// loads of a launch's beginning: an acquire delays the loads after it. By all threads.
    ///
    /// A thread that finds a credit has acquired it, so all its sender's reads come before the barrier that
    /// follows, and that before every later store of a thread of the block: a barrier of a block passes on
    /// what was acquired before (PTX ISA, "Causality order"). A relaxed load and a branch would order nothing
    /// between two GPUs.
    ///
    /// # Safety
    /// The credits of `ranks` ranks are there.
    #[inline(always)]
    pub unsafe fn ask_credits(loading: &mut Loading, credits: u64, ranks: u32) {
        let mut credit = 0;
        if let Some(rank) = Self::credit_of(ranks) {
            // SAFETY: there is a credit for each of `ranks` ranks: documented above.
            credit = unsafe { memory::load_acquire_sys(credits + 8 * rank as u64) };
        }
        loading.credit = Some(credit);
    }

    /// Clears arrivals and words, and sets the deadline. Once in a launch, by all threads.
    #[inline(always)]
    pub fn clear(self, deadline_ns: u64) {
        match 8 * thread::thread() {
            FAULT_PAGE => {}
            DEADLINE => {
                let now_ns = thread::global_timer_ns();
                self.store(DEADLINE, now_ns.saturating_add(deadline_ns));
            }
            at if at < LAST => self.store(at, 0),
            _ => {}
        }
    }

    /// Keeps the loaded values. Once in a launch, by all threads; a [barrier](Self::barrier) follows.
    ///
    /// # Safety
    /// `loading` is the result of [`ask`](Self::ask) for the same `ranks`, and the block has a thread for
    /// each of them.
    #[inline(always)]
    pub unsafe fn keep(self, loading: Loading, ranks: u32) {
        let thread = thread::thread();
        if thread < HELD_WORDS as u32 {
            self.store(HELD + 8 * thread, loading.word);
        }
        if thread < ranks {
            self.store(WINDOWS + 8 * thread, loading.window);
        }
        if let (Some(credit), Some(rank)) = (loading.credit, Self::credit_of(ranks)) {
            self.store(CREDITS + 8 * rank, credit);
        }
    }

    /// Waits for all threads of the block; returns the same memory as it is after the barrier. All threads.
    #[inline(always)]
    pub fn barrier(self) -> Self {
        thread::block_barrier();
        let base: u32;
        // SAFETY: copies a register. Not pure: it stays after the barrier, and so does everything that needs
        // its result.
        unsafe {
            asm!("mov.u32 {}, {};", out(reg32) base, in(reg32) self.base,
                options(nostack, preserves_flags));
        }
        Self { base }
    }

    /// The shared address of a byte of the protocol's memory.
    #[inline(always)]
    pub fn protocols(self, at: u32) -> u32 {
        self.base + PROTOCOLS + at
    }

    /// Word `index` of [`SetUp::words`], as it was when the launch began.
    #[inline(always)]
    pub fn word(self, index: u32) -> u64 {
        self.load_constant(HELD + 8 * index)
    }

    /// The credit of a rank, as [`ask_credits`](Self::ask_credits) loaded it.
    #[inline(always)]
    pub fn credit(self, rank: u32) -> u64 {
        self.load_constant(CREDITS + 8 * rank)
    }

    /// Stores the double word `at` bytes from the start.
    #[inline(always)]
    fn store(self, at: u32, word: u64) {
        // SAFETY: the callers name double words of a block, which nobody else writes meanwhile.
        unsafe {
            asm!("st.shared.u64 [{}], {};", in(reg32) self.base + at, in(reg64) word,
                options(nostack, preserves_flags));
        }
    }

    /// Loads the double word `at` bytes from the start.
    #[inline(always)]
    fn load(self, at: u32) -> u64 {
        let word;
        // SAFETY: the callers name double words of a block.
        unsafe {
            asm!("ld.shared.u64 {}, [{}];", out(reg64) word, in(reg32) self.base + at,
                options(nostack, preserves_flags));
        }
        word
    }

    /// Time at which the launch gives up. Kept here rather than in registers, which it would occupy all the
    /// time, or in the parameters, whose later lines take a wait.
    #[inline(always)]
    pub fn deadline_ns(self) -> u64 {
        self.load(DEADLINE)
    }

    /// The launch's page for faults.
    #[inline(always)]
    pub fn fault_page(self) -> u64 {
        self.load(FAULT_PAGE)
    }

    /// The window of a rank as it is addressed from here.
    #[inline(always)]
    pub fn window(self, rank: u32) -> u64 {
        self.load_constant(WINDOWS + 8 * rank)
    }

    /// Loads the double word `at` bytes from the start, which stays as [`keep`](Self::keep) left it.
    #[inline(always)]
    fn load_constant(self, at: u32) -> u64 {
        let word;
        // SAFETY: one of the double words of a block; `pure` and `nomem` hold because nobody writes
        // there after it.
        unsafe {
            asm!("ld.shared.u64 {}, [{}];", out(reg64) word, in(reg32) self.base + at,
                options(pure, nomem, nostack, preserves_flags));
        }
        word
    }

    /// Arrives on a block arrival counter, and returns the number of earlier arrivals. Releases this thread's
    /// writes and acquires those that earlier threads released. For one lane.
    #[inline(always)]
    pub fn pass(self, block_counter: BlockCounter) -> u32 {
        let at = self.base + 4 * block_counter as u32;
        let passed: u32;
        // SAFETY: one of the words of a block.
        unsafe {
            asm!("atom.acq_rel.cta.shared.add.u32 {}, [{}], 1;", out(reg32) passed, in(reg32) at,
                options(nostack, preserves_flags));
        }
        passed
    }

    /// Brings a word for all warps, which may load it after the next barrier. For one lane of the block.
    #[inline(always)]
    pub fn bring(self, word: u32) {
        self.store(BROUGHT, word as u64);
    }

    /// The word that the first warp [brought](Self::bring).
    #[inline(always)]
    pub fn brought(self) -> u32 {
        self.load_constant(BROUGHT) as u32
    }

    /// Leaves a word for the warp that arrives last. `warp` is this one's number in the block. For one lane.
    #[inline(always)]
    pub fn leave(self, warp: u32, word: u64) {
        self.store(WORDS + 8 * warp, word);
    }

    /// The word that a warp of the block has left.
    #[inline(always)]
    pub fn left_by(self, warp: u32) -> u64 {
        self.load(WORDS + 8 * warp)
    }
}
