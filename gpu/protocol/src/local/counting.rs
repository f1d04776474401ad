//! Numbers of assignments for each expert of this rank, before those of the block's tokens and in all, and
//! its first row: the first steps of a block's [numbering](crate::local::numbering).

use ferry_layout::{NOT_ROUTED, scale_placement};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::place::shared::SharedGroup;
use crate::dispatch::send::ids::{IdVector, VECTOR_IDS, read_id, read_id_vector};
use crate::local::numbering::{BlockNumbering, PerExpert, VECTOR_WORDS};
use crate::local::tables::{self, Ends};
use crate::machine::{LANES, Machine};

use core::array::from_fn;

/// Vectors of ids that a lane has in flight.
/// measured: T-118, H200
const DEPTH: usize = 4;
/// Experts of a lane at a time.
const EACH: usize = 4;

/// Ids that are being loaded.
pub type Ids<M> = [<M as Machine>::Lanes<IdVector>; DEPTH];

impl BlockNumbering {
    /// Clears the counts. All warps of the block; a barrier must follow.
    #[inline(always)]
    pub fn clear<M: Machine>(self, machine: &M) {
        let end = self.at(PerExpert::Rest, 0) + 4 * self.experts;
        machine.lanes(|lane| {
            let mut at = 4 * VECTOR_WORDS * machine.thread(lane);
            while at < end {
                machine.store_block_vector(at, [0; 4]);
                at += 4 * VECTOR_WORDS * machine.threads();
            }
        });
    }

    /// Loads the ids that this warp counts first. If there is nothing to count, there may be no ids.
    #[inline(always)]
    pub fn load_first_ids<M: Machine>(self, machine: &M) -> Ids<M> {
        match self.assignments {
            0 => from_fn(|_| machine.lanes(|_| [NOT_ROUTED; VECTOR_IDS as usize])),
            _ => self.load_ids(machine, 0),
        }
    }

    /// Loads the ids of the block's next threads from assignment `first` on; the last ones again if there are
    /// fewer, as the assembler waits for conditional loads.
    #[inline(always)]
    fn load_ids<M: Machine>(self, machine: &M, first: u32) -> Ids<M> {
        let index = |step: usize, lane: u32| {
            first + VECTOR_IDS * (step as u32 * machine.threads() + machine.thread(lane))
        };
        let last = self.assignments - 1;
        // Each way of its own, so that the ids stay in registers.
        match (self.has_vectors, self.is_wide) {
            (true, _) => from_fn(|step| {
                let last = self.assignments - VECTOR_IDS;
                machine.lanes(|lane| {
                    let index = index(step, lane).min(last);
                    read_id_vector(machine, index as u64)
                })
            }),
            (false, false) => from_fn(|step| {
                machine.lanes(|lane| {
                    let index = index(step, lane);
                    from_fn(|word| read_id(machine, false, (index + word as u32).min(last) as u64))
                })
            }),
            (false, true) => from_fn(|step| {
                machine.lanes(|lane| {
                    let index = index(step, lane);
                    from_fn(|word| read_id(machine, true, (index + word as u32).min(last) as u64))
                })
            }),
        }
    }

    /// Counts all assignments of this rank's experts. All warps of the block, after all have
    /// [cleared](Self::clear) the counts; a barrier must follow. `ids` are the result of
    /// [`load_first_ids`](Self::load_first_ids). `all_asked` is called after the loads of all other ids are
    /// issued.
    #[inline(always)]
    pub fn count<M: Machine>(self, machine: &M, mut ids: Ids<M>, all_asked: impl FnOnce()) {
        let batch = DEPTH as u32 * VECTOR_IDS * machine.threads();
        let mut first = 0;
        while first + batch < self.assignments {
            let next = self.load_ids(machine, first + batch);
            self.count_ids(machine, first, ids);
            ids = next;
            first += batch;
        }
        all_asked();
        self.count_ids(machine, first, ids);
    }

    /// Counts the `ids` of [`load_ids`](Self::load_ids) from assignment `first` on, and keeps those of the
    /// block's tokens for [`number`](Self::number).
    #[inline(always)]
    fn count_ids<M: Machine>(self, machine: &M, first: u32, ids: Ids<M>) {
        let step = |index: u32| first + index * VECTOR_IDS * machine.threads();
        let has = |index: u32| step(index) < self.assignments;
        // Spelled out: the compiler does not unroll this. With few assignments the later steps are skipped,
        // whose instructions would have to be fetched.
        let [zeroth, first, second, third] = ids;
        if has(0) {
            self.count_vectors(machine, step(0), zeroth);
        }
        if has(1) {
            self.count_vectors(machine, step(1), first);
        }
        if has(2) {
            self.count_vectors(machine, step(2), second);
        }
        if has(3) {
            self.count_vectors(machine, step(3), third);
        }
    }

    /// Counts a vector of ids a thread, like [`count_ids`](Self::count_ids).
    #[inline(always)]
    fn count_vectors<M: Machine>(self, machine: &M, first: u32, ids: M::Lanes<IdVector>) {
        let keeps_ids = self.keeps_ids();
        machine.lanes(|lane| {
            let vector = machine.own(ids, lane);
            from_fn::<(), { VECTOR_IDS as usize }, _>(|word| {
                let index = first + VECTOR_IDS * machine.thread(lane) + word as u32;
                let expert = self.local(vector[word]);
                if index < self.assignments && expert < self.experts {
                    let count = match index < self.first {
                        true => PerExpert::Before,
                        false => PerExpert::Rest,
                    };
                    machine.count_in_block(self.at(count, expert));
                }
                if keeps_ids && self.is_own(index) {
                    machine.store_block(self.at_id(index), expert);
                }
            });
        });
    }

    /// Computes the first row of each expert, after those of the shared expert. The first block also writes
    /// the experts' entries of the user's tables. Returns the ends of all rows, and of all blocks of scales.
    /// One warp, after the [counts](Self::count); a barrier must follow.
    #[inline(always)]
    pub fn find_rows<M: Machine>(self, dispatch: &Dispatch<M>, shared: SharedGroup) -> Ends {
        let (machine, common) = (dispatch.machine, dispatch.common);
        let is_tiled = common.shape.has_tiled_scales();
        let writes_tables = machine.warp_position().block == 0;
        let (mut rows, mut blocks) = (shared.rows, scale_placement::blocks(shared.rows));
        let mut first = 0;
        while first < self.experts {
            let expert = |lane: u32, index: usize| first + EACH as u32 * lane + index as u32;
            let counts = machine.lanes(|lane| {
                from_fn::<u32, EACH, _>(|index| self.rows_of(dispatch, expert(lane, index)))
            });
            let of_lane = |lane| machine.own(counts, lane);
            let (rows_before, more_rows) =
                machine.exclusive_sum(machine.lanes(|lane| of_lane(lane).iter().sum()));
            let (blocks_before, more_blocks) = match is_tiled {
                true => machine.exclusive_sum(machine.lanes(|lane| {
                    of_lane(lane)
                        .iter()
                        .map(|&rows| scale_placement::blocks(rows))
                        .sum()
                })),
                false => (machine.lanes(|_| 0), 0),
            };
            machine.lanes(|lane| {
                let mut row = rows + machine.own(rows_before, lane);
                let mut block = blocks + machine.own(blocks_before, lane);
                from_fn::<(), EACH, _>(|index| {
                    let (expert, count) = (expert(lane, index), of_lane(lane)[index]);
                    if expert >= self.experts {
                        return;
                    }
                    let before = machine.load_block(self.at(PerExpert::Before, expert));
                    machine.store_block(self.at(PerExpert::NextRow, expert), row + before);
                    if is_tiled {
                        // The blocks of an expert's scales have room for at least its rows.
                        let to_scales = block * scale_placement::BLOCK_ROWS - row;
                        machine.store_block(self.at(PerExpert::ToScales, expert), to_scales);
                    }
                    if writes_tables {
                        tables::describe(dispatch, shared.groups + expert, row, block);
                    }
                    row += count;
                    if is_tiled {
                        block += scale_placement::blocks(count);
                    }
                });
            });
            rows += more_rows;
            blocks += more_blocks;
            first += EACH as u32 * LANES;
        }
        Ends { rows, blocks }
    }

    /// The rows of an expert, including those that align the next one's; none if there is no such expert. For
    /// one lane.
    #[inline(always)]
    fn rows_of<M: Machine>(self, dispatch: &Dispatch<M>, expert: u32) -> u32 {
        if expert >= self.experts {
            return 0;
        }
        let rows = self.count_of(dispatch.machine, expert);
        dispatch.common.row.padded(rows)
    }

    /// Assignments to an expert, once all are [counted](Self::count). For one lane.
    #[inline(always)]
    pub fn count_of<M: Machine>(self, machine: &M, expert: u32) -> u32 {
        let count = |word| machine.load_block(self.at(word, expert));
        count(PerExpert::Before) + count(PerExpert::Rest)
    }
}
