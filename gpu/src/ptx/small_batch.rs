//! Few entries in a block's shared memory: their ids, and their numbers (`ferry_layout::BlockHistogram`).

use core::arch::asm;

use ferry_layout::{BlockHistogram, HISTOGRAM_BYTES, NOT_ROUTED, SMALL_BATCH_ASSIGNMENTS};
use ferry_protocol::count_below;

use super::memory::Vector;
use super::thread;

/// The ids, an entry's number in its group, a byte each, and the counts of groups.
#[derive(Clone, Copy)]
pub struct SmallBatch {
    base: u32,
}

/// Bytes from the start to the numbers.
const NUMBERS: u32 = 4 * SMALL_BATCH_ASSIGNMENTS;
/// Bytes from the start to the counts.
const COUNTS: u32 = NUMBERS + SMALL_BATCH_ASSIGNMENTS;

/// Ids that a thread has in flight: as many as are few, in a block of 512 threads.
const DEPTH: usize = 4;

/// Ids on their way, those of a thread.
pub type Ids = [u32; DEPTH];

impl SmallBatch {
    /// Bytes of all.
    pub const BYTES: u32 = COUNTS + HISTOGRAM_BYTES;

    /// At a multiple of 16 in shared memory.
    #[inline(always)]
    pub fn at(base: u32) -> Self {
        Self { base }
    }

    /// Asks for the first of `assignments` ids. `id_at` loads one.
    #[inline(always)]
    pub fn load(self, assignments: u32, id_at: impl Fn(u32) -> u32) -> Ids {
        match assignments {
            0 => [0; DEPTH],
            _ => self.load_from(thread::thread(), assignments, id_at),
        }
    }

    /// Those from `first` on that this thread takes; of the last entry again where there are fewer.
    #[inline(always)]
    fn load_from(self, first: u32, assignments: u32, id_at: impl Fn(u32) -> u32) -> Ids {
        core::array::from_fn(|step| {
            let index = first + step as u32 * thread::threads();
            id_at(index.min(assignments - 1))
        })
    }

    /// Sets what will be used of the counts to zero. By all threads.
    #[inline(always)]
    pub fn clear(self, assignments: u32, experts: u32) {
        let (vector, bytes) = (
            size_of::<Vector>() as u32,
            BlockHistogram::of(assignments).bytes(experts),
        );
        let mut at = vector * thread::thread();
        while at < bytes {
            // SAFETY: inside the counts; nobody else writes there meanwhile.
            unsafe {
                asm!("st.shared.v4.u32 [{}], {{{zero}, {zero}, {zero}, {zero}}};",
                    in(reg32) self.base + COUNTS + at, zero = in(reg32) 0,
                    options(nostack, preserves_flags));
            }
            at += vector * thread::threads();
        }
    }

    /// Keeps the ids and numbers them. By all threads, after all have [cleared](Self::clear) the counts;
    /// `ids` are those that were asked for.
    #[inline(always)]
    pub fn number(self, assignments: u32, experts: u32, mut ids: Ids, id_at: impl Fn(u32) -> u32) {
        let (lane, threads) = (thread::lane(), thread::threads());
        // The first entry of the group, so that lanes stay together.
        let mut first = thread::thread() - lane;
        while first < assignments {
            let starts: Ids = core::array::from_fn(|step| first + step as u32 * threads);
            // All are compared before a result is waited for.
            let alike: Ids = core::array::from_fn(|step| {
                // Lanes without an entry are like those whose entry goes nowhere: nobody counts them.
                if starts[step] + lane >= assignments {
                    ids[step] = NOT_ROUTED;
                }
                match starts[step] < assignments {
                    true => alike(ids[step].min(experts), experts),
                    false => 0,
                }
            });
            core::array::from_fn::<(), DEPTH, _>(|step| {
                if starts[step] < assignments {
                    let index = starts[step] + lane;
                    self.keep(
                        (index, assignments),
                        (ids[step], experts),
                        alike[step],
                        lane,
                    );
                }
            });
            first += DEPTH as u32 * threads;
            if first < assignments {
                ids = self.load_from(first + lane, assignments, &id_at);
            }
        }
    }

    /// Keeps an entry, which is `alike` these lanes' of its group, and counts them, once for all. Entries and
    /// experts that there are not are left out.
    #[inline(always)]
    fn keep(
        self,
        (index, assignments): (u32, u32),
        (id, experts): (u32, u32),
        alike: u32,
        lane: u32,
    ) {
        let before = count_below(alike, lane);
        if index < assignments {
            // SAFETY: inside the ids and the numbers; nobody else writes there.
            unsafe {
                asm!("st.shared.u32 [{}], {};", in(reg32) self.base + 4 * index, in(reg32) id,
                    options(nostack, preserves_flags));
            }
            self.store_byte(NUMBERS + index, before);
        }
        if before == 0 && id < experts {
            let at = BlockHistogram::of(assignments).at(id, index);
            self.store_byte(COUNTS + at, alike.count_ones());
        }
    }

    /// One of the ids.
    #[inline(always)]
    pub fn id(self, index: u32) -> u32 {
        let id;
        // SAFETY: one of the ids; `pure` and `nomem` hold because nobody writes there after `number`.
        unsafe {
            asm!("ld.shared.u32 {}, [{}];", out(reg32) id, in(reg32) self.base + 4 * index,
                options(pure, nomem, nostack, preserves_flags));
        }
        id
    }

    /// How many of `assignments` are for an expert, which exists.
    #[inline(always)]
    pub fn count(self, expert: u32, assignments: u32) -> u32 {
        BlockHistogram::of(assignments).total(expert, |at| self.load_counts(at), dot)
    }

    /// How many before entry `index` are for its expert, which exists.
    #[inline(always)]
    pub fn number_of(self, index: u32, expert: u32, assignments: u32) -> u32 {
        let in_group: u32;
        // SAFETY: one of the numbers; `pure` and `nomem` hold because nobody writes there after `number`.
        unsafe {
            asm!("ld.shared.u8 {}, [{}];", out(reg32) in_group,
                in(reg32) self.base + NUMBERS + index,
                options(pure, nomem, nostack, preserves_flags));
        }
        let counts = BlockHistogram::of(assignments);
        in_group + counts.before(expert, index, |at| self.load_counts(at), dot)
    }

    /// Stores the byte `at` bytes from the start.
    #[inline(always)]
    fn store_byte(self, at: u32, byte: u32) {
        // SAFETY: the callers name bytes of the numbers and counts, which nobody else writes meanwhile.
        unsafe {
            asm!("st.shared.u8 [{}], {};", in(reg32) self.base + at, in(reg32) byte,
                options(nostack, preserves_flags));
        }
    }

    /// Loads 16 of the counts.
    #[inline(always)]
    fn load_counts(self, at: u32) -> Vector {
        let (a, b, c, d);
        // SAFETY: inside the counts, as far as they were cleared; `pure` and `nomem` hold because nobody
        // writes there after `number`.
        unsafe {
            asm!("ld.shared.v4.u32 {{{}, {}, {}, {}}}, [{}];", out(reg32) a, out(reg32) b,
                out(reg32) c, out(reg32) d, in(reg32) self.base + COUNTS + at,
                options(pure, nomem, nostack, preserves_flags));
        }
        [a, b, c, d]
    }
}

/// The lanes that hold the same value, at most `most`: compared bit by bit, which takes less time than
/// `match.any`. All lanes.
#[inline(always)]
fn alike(value: u32, most: u32) -> u32 {
    let same = |bit: u32| {
        let is_set = value & bit != 0;
        let set = thread::ballot(is_set);
        if is_set { set } else { !set }
    };
    let (mut lanes, mut bit) = (u32::MAX, 1);
    // Three at a time: nobody has a bit above the highest of `most`.
    while bit != 0 && bit <= most {
        lanes &= same(bit) & same(bit << 1) & same(bit << 2);
        bit <<= 3;
    }
    lanes
}

/// `dp4a`, unsigned: the products of the bytes of two words, added to a third.
#[inline(always)]
fn dot(a: u32, b: u32, sum: u32) -> u32 {
    let result;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("dp4a.u32.u32 {}, {}, {}, {};", out(reg32) result, in(reg32) a, in(reg32) b,
            in(reg32) sum, options(pure, nomem, nostack, preserves_flags));
    }
    result
}
