//! Numbering of a small batch: every block numbers all assignments of its rank for itself, in its own memory,
//! so that no warp waits for another block.
//!
//! Assignments are numbered in groups of 32, each by one warp. The block keeps the id of every assignment,
//! its rank among those of its group for the same expert, and a histogram: for every expert and group a byte
//! with the number of assignments of the group for the expert ([`BlockHistogram`]). The rank within the
//! expert is the sum over the groups before, plus the rank in the group.

use ferry_layout::{
    BlockHistogram, Common, DispatchArgs, HISTOGRAM_BYTES, NOT_ROUTED, SMALL_BATCH_ASSIGNMENTS,
};

use crate::dispatch::send::ids::read_id;
use crate::machine::{LANES, Machine};

use core::array::from_fn;

/// Bytes from the start of the block's memory to the ranks within groups. The ids are at the start.
const GROUP_RANKS: u32 = 4 * SMALL_BATCH_ASSIGNMENTS;
/// Bytes from the start to the histogram.
const HISTOGRAM: u32 = GROUP_RANKS + SMALL_BATCH_ASSIGNMENTS;
/// Bytes of a block's memory.
pub const BLOCK_MEMORY_BYTES: u32 = HISTOGRAM + HISTOGRAM_BYTES;

/// Bytes that a lane clears at a time.
const VECTOR: u32 = 16;

/// Ids that a lane has in flight. A block of 512 threads loads all ids of the largest small batch at once.
const DEPTH: usize = 4;

/// Ids that are being loaded.
pub type Ids<M> = [<M as Machine>::Lanes<u32>; DEPTH];

/// The assignments of this rank, if they are a [small batch](ferry_layout::Shape::is_small_batch).
#[derive(Clone, Copy)]
pub struct SmallBatch {
    assignments: u32,
    experts: u32,
    /// Whether the user's ids are i64. Only of a batch [to be numbered](Self::to_number).
    is_wide: bool,
}

impl SmallBatch {
    /// Small batch of a launch, for the steps after the numbering.
    #[inline(always)]
    pub fn of(common: &Common, tokens: u32) -> Self {
        debug_assert!(common.shape.is_small_batch(tokens), "{tokens} tokens");
        Self {
            assignments: tokens * common.shape.top_k,
            experts: common.shape.experts,
            is_wide: false,
        }
    }

    /// Whether there is nothing to number.
    #[inline(always)]
    pub fn is_empty(self) -> bool {
        self.assignments == 0
    }

    /// Assignments that a launch with `tokens` tokens numbers as it begins: none if they are no small batch.
    #[inline(always)]
    pub fn to_number(args: &DispatchArgs, tokens: u32, is_wide: bool) -> Self {
        let common = &args.common;
        // A rank without tokens may have no ids.
        let is_small = args.topk_ids != 0 && common.shape.is_small_batch(tokens);
        match is_small {
            true => Self {
                is_wide,
                ..Self::of(common, tokens)
            },
            false => Self {
                assignments: 0,
                experts: common.shape.experts,
                is_wide,
            },
        }
    }

    #[inline(always)]
    fn histogram(self) -> BlockHistogram {
        BlockHistogram::of(self.assignments)
    }

    /// Loads the ids that this warp numbers first: zeros if there is nothing to number.
    #[inline(always)]
    pub fn load_ids<M: Machine>(self, machine: &M) -> Ids<M> {
        match self.is_empty() {
            true => from_fn(|_| machine.lanes(|_| 0)),
            false => self.load_from(machine, |lane| machine.thread(lane)),
        }
    }

    /// Loads the ids from assignment `first(lane)` on, one for each step of the block's width; the last id
    /// again if there are fewer, as the assembler waits for conditional loads.
    #[inline(always)]
    fn load_from<M: Machine>(self, machine: &M, first: impl Fn(u32) -> u32) -> Ids<M> {
        from_fn(|step| {
            machine.lanes(|lane| {
                let index = first(lane) + step as u32 * machine.threads();
                read_id(
                    machine,
                    self.is_wide,
                    index.min(self.assignments - 1) as u64,
                )
            })
        })
    }

    /// Clears the used part of the histogram. All warps of the block; a barrier must follow.
    #[inline(always)]
    pub fn clear<M: Machine>(self, machine: &M) {
        let bytes = self.histogram().bytes(self.experts);
        debug_assert!(bytes <= HISTOGRAM_BYTES, "{bytes} bytes");
        machine.lanes(|lane| {
            let mut at = VECTOR * machine.thread(lane);
            while at < bytes {
                machine.store_block_vector(HISTOGRAM + at, [0; 4]);
                at += VECTOR * machine.threads();
            }
        });
    }

    /// Numbers all assignments. All warps of the block, after all have [cleared](Self::clear) the histogram;
    /// a barrier must follow. `ids` are the result of [`load_ids`](Self::load_ids).
    #[inline(always)]
    pub fn number<M: Machine>(self, machine: &M, mut ids: Ids<M>) {
        let threads = machine.threads();
        // The first assignment of a group, the same on all lanes.
        let mut first = machine.warp_position().index * LANES;
        while first < self.assignments {
            let firsts: [u32; DEPTH] = from_fn(|step| first + step as u32 * threads);
            // All groups are compared before a result is waited for.
            let alike: Ids<M> = from_fn(|step| {
                ids[step] = self.mask(machine, firsts[step], ids[step]);
                match firsts[step] < self.assignments {
                    true => self.alike(machine, ids[step]),
                    false => machine.lanes(|_| 0),
                }
            });
            from_fn::<(), DEPTH, _>(|step| {
                if firsts[step] < self.assignments {
                    self.keep(machine, firsts[step], ids[step], alike[step]);
                }
            });
            first += DEPTH as u32 * threads;
            if first < self.assignments {
                ids = self.load_from(machine, |lane| first + lane);
            }
        }
    }

    /// The ids of the group that begins with assignment `first`. Lanes after the last assignment get an id
    /// that is not counted.
    #[inline(always)]
    fn mask<M: Machine>(self, machine: &M, first: u32, ids: M::Lanes<u32>) -> M::Lanes<u32> {
        machine.lanes(|lane| match first + lane < self.assignments {
            true => machine.own(ids, lane),
            false => NOT_ROUTED,
        })
    }

    /// The lanes with the same expert, for each lane; ids that are no expert count as the same. Compared bit
    /// by bit, which takes a GPU less time than one instruction that matches whole words.
    #[inline(always)]
    fn alike<M: Machine>(self, machine: &M, ids: M::Lanes<u32>) -> M::Lanes<u32> {
        let most = self.experts;
        let is_set = |lane: u32, bit: u32| machine.own(ids, lane).min(most) & bit != 0;
        let same = |bit: u32| {
            let set = machine.ballot(machine.lanes(|lane| is_set(lane, bit)));
            machine.lanes(|lane| if is_set(lane, bit) { set } else { !set })
        };
        let (mut lanes, mut bit) = (machine.lanes(|_| u32::MAX), 1);
        // Three bits at a time: no id has a bit above the highest one of `most`.
        while bit != 0 && bit <= most {
            let bits = [same(bit), same(bit << 1), same(bit << 2)];
            lanes = machine.lanes(|lane| {
                let [first, second, third] = bits.map(|bit| machine.own(bit, lane));
                machine.own(lanes, lane) & first & second & third
            });
            bit <<= 3;
        }
        lanes
    }

    /// Keeps the ids of a group and their ranks in it. For each expert of the group, one lane counts all
    /// lanes of that expert.
    #[inline(always)]
    fn keep<M: Machine>(self, machine: &M, first: u32, ids: M::Lanes<u32>, alike: M::Lanes<u32>) {
        machine.lanes(|lane| {
            let (index, id) = (first + lane, machine.own(ids, lane));
            let alike = machine.own(alike, lane);
            let before = count_below(alike, lane);
            if index < self.assignments {
                machine.store_block(4 * index, id);
                machine.store_block_byte(GROUP_RANKS + index, before);
            }
            if before == 0 && id < self.experts {
                let at = self.histogram().at(id, index);
                machine.store_block_byte(HISTOGRAM + at, alike.count_ones());
            }
        });
    }

    /// The id of an assignment, after the numbering. For one lane.
    #[inline(always)]
    pub fn id<M: Machine>(self, machine: &M, index: u32) -> u32 {
        debug_assert!(index < self.assignments, "assignment {index}");
        machine.load_block(4 * index)
    }

    /// Assignments for an expert, which exists, after the numbering. For one lane.
    #[inline(always)]
    pub fn total<M: Machine>(self, machine: &M, expert: u32) -> u32 {
        debug_assert!(expert < self.experts, "expert {expert}");
        self.histogram().total(
            expert,
            |at| machine.load_block_vector(HISTOGRAM + at),
            |a, b, sum| machine.dot_bytes(a, b, sum),
        )
    }

    /// Number of assignments for `expert`, a valid one, before this one. After the numbering. For one lane.
    #[inline(always)]
    pub fn expert_index<M: Machine>(self, machine: &M, index: u32, expert: u32) -> u32 {
        debug_assert!(index < self.assignments, "assignment {index}");
        debug_assert!(expert < self.experts, "expert {expert}");
        let in_group = machine.load_block_byte(GROUP_RANKS + index);
        let before = self.histogram().before(
            expert,
            index,
            |at| machine.load_block_vector(HISTOGRAM + at),
            |a, b, sum| machine.dot_bytes(a, b, sum),
        );
        in_group + before
    }
}

/// Number of `lanes` below `lane`.
#[inline(always)]
pub const fn count_below(lanes: u32, lane: u32) -> u32 {
    // Shifted out at the top rather than masked: a mask would occupy a register all the time.
    (lanes << 1 << (LANES - 1 - lane)).count_ones()
}
