//! Numbering of many assignments: a warp numbers a tile of them, then the tiles of every expert are summed,
//! 32 experts a warp.

use ferry_layout::{Counter, TILE_ASSIGNMENTS, Table, assignment_index, tile_counts_index};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::send::ids::read_id;
use crate::dispatch::send::numbering::block::count_below;
use crate::machine::{LANES, Machine};

/// Words that a lane has in flight. measured: T-014, H200
const DEPTH: usize = 8;

impl<M: Machine> Dispatch<'_, M> {
    /// Numbers the assignments of a tile, for each expert in the order of assignments, and counts them.
    #[inline(always)]
    pub fn number_tile(&self, tile: u32) {
        let (machine, common) = (self.machine, self.common);
        let (experts, assignments) = (common.shape.experts, self.tokens * common.shape.top_k);
        debug_assert!(
            tile * TILE_ASSIGNMENTS < assignments,
            "tile {tile} of {assignments}"
        );
        let counts = tile_counts_index(experts, tile as u64);
        let count = |id: u32| counts + id as u64;
        for expert in (0..experts).step_by(LANES as usize) {
            machine.lanes(|lane| {
                if expert + lane < experts {
                    machine.write(Table::TileCounts, count(expert + lane), 0);
                }
            });
        }
        let end = assignments.min((tile + 1) * TILE_ASSIGNMENTS);
        let mut first = tile * TILE_ASSIGNMENTS;
        let mut ahead = self.read_ids(first, end);
        while first < end {
            let ids = ahead;
            ahead = self.read_ids(first + LANES, end);
            let alike = machine.matching(ids);
            // Makes the writes of the lanes in the last step readable.
            machine.converge();
            machine.lanes(|lane| {
                let (at, id) = (first + lane, machine.own(ids, lane));
                if at >= end || id >= experts {
                    return;
                }
                let alike = machine.own(alike, lane) & valid_lanes(end - first);
                let so_far = machine.read(Table::TileCounts, count(id));
                let before = count_below(alike, lane);
                machine.write(Table::RanksInExpert, at as u64, so_far + before);
                if alike >> lane == 1 {
                    machine.write(Table::TileCounts, count(id), so_far + before + 1);
                }
            });
            first += LANES;
        }
        machine.add(Counter::TilesDone, 1);
    }

    /// The expert ids of 32 assignments from `first` on; that of the last one before `end` again if there are
    /// fewer.
    #[inline(always)]
    fn read_ids(&self, first: u32, end: u32) -> M::Lanes<u32> {
        self.machine.lanes(|lane| {
            let at = (first + lane).min(end - 1);
            read_id(self.machine, self.wide_ids, at as u64)
        })
    }
}

/// Bits of the lanes that have an assignment if `left` assignments are left.
#[inline(always)]
fn valid_lanes(left: u32) -> u32 {
    if left < LANES {
        (1 << left) - 1
    } else {
        u32::MAX
    }
}

impl<M: Machine> Dispatch<'_, M> {
    /// Turns the counts of each tile, for 32 experts, into exclusive prefix sums over the tiles. Returns the
    /// number of assignments for each of these experts.
    #[inline(always)]
    pub fn scan_tiles(&self, tiles: u32, task: u32) -> M::Lanes<u32> {
        let (machine, common) = (self.machine, self.common);
        let experts = common.shape.experts;
        machine.lanes(|lane| {
            let expert = task * LANES + lane;
            let at = |tile: u32| {
                tile_counts_index(experts, tile as u64) + expert.min(experts - 1) as u64
            };
            // Repeats loads rather than branch.
            let read = |first: u32| {
                core::array::from_fn::<u32, DEPTH, _>(|step| {
                    machine.read(Table::TileCounts, at((first + step as u32).min(tiles - 1)))
                })
            };
            let (mut total, mut first) = (0, 0);
            let mut write = |first: u32, counts: [u32; DEPTH]| {
                core::array::from_fn::<(), DEPTH, _>(|step| {
                    let tile = first + step as u32;
                    if tile < tiles && expert < experts {
                        machine.write(Table::TileCounts, at(tile), total);
                        total += counts[step];
                    }
                });
            };
            let mut ahead = read(0);
            while first < tiles {
                let counts = ahead;
                ahead = read(first + DEPTH as u32);
                write(first, counts);
                first += DEPTH as u32;
            }
            total
        })
    }

    /// The rank of each of a token's assignments within its expert, after the tiles are scanned.
    #[inline(always)]
    pub fn read_ranks_in_expert(&self, token: u32, experts_of: M::Lanes<u32>) -> M::Lanes<u32> {
        let (machine, common) = (self.machine, self.common);
        let (experts, top_k) = (common.shape.experts, common.shape.top_k);
        let before = assignment_index(top_k, token, 0);
        machine.lanes(|lane| {
            let at = before + lane.min(top_k - 1) as u64;
            let expert = machine.own(experts_of, lane).min(experts - 1);
            let counts = tile_counts_index(experts, at / TILE_ASSIGNMENTS as u64);
            let earlier = machine.read(Table::TileCounts, counts + expert as u64);
            earlier + machine.read(Table::RanksInExpert, at)
        })
    }
}
