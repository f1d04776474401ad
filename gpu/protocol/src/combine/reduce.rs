//! Combine on the source: the rows that return for a token are summed as they arrive.

use ferry_layout::{
    CombineMode, Counter, Kernel, NOT_ROUTED, Rank, Region, Table, Tensor, assignment_index,
};

use crate::combine::ending::Ending;
use crate::combine::launch::Combine;
use crate::machine::Machine;
use crate::machine::counters::BlockCounter;
use crate::machine::finishing::{Finish, Rounding};
use crate::machine::miss::TimedOut;
use crate::machine::position::WarpPosition;
use crate::machine::rows::{ByteRange, Row};
use crate::sync::arrivals;
use crate::sync::launch::{Aborted, Awaited};
use crate::tactics::Wire;
use crate::tactics::combine::CombineTactics;
use crate::wire::{flagged, inline, remote};
use crate::work::item::Item;
use crate::work::lanes::lane_or_none;
use crate::work::partition::Partition;
use crate::work::rank_set::RankSet;

impl<M: Machine> Combine<'_, M> {
    /// Sums the rows that return for every token of this rank, and ends the round.
    #[inline(always)]
    pub fn reduce_rows(
        &self,
        tactics: CombineTactics,
        reducer: Option<Partition>,
        ending: impl Ending<M>,
    ) -> Result<(), Aborted> {
        let (_machine, common) = (self.machine, self.common);
        if let Some(partition) = reducer {
            partition.debug_assert_is_one();
            let parts = tactics.reduce_parts;
            let mut index = partition.index;
            while index < self.tokens * parts {
                let item = Item {
                    source: common.rank(),
                    token: index >> parts.trailing_zeros(),
                    part: index & (parts - 1),
                    parts,
                };
                let finish = ending.of_token(self, item.token);
                self.reduce_item(tactics, item, finish)?;
                index += partition.of;
            }
        }
        remote::wait_until_delivered(self)?;
        // A fused self ended the round when it returned its credits.
        if self.kernel != Kernel::Combine {
            self.leave_round();
        }
        Ok(())
    }

    /// Ends the round with the launch's last block: by then all warps have read its number.
    #[inline(always)]
    pub fn leave_round(&self) {
        let machine = self.machine;
        let WarpPosition {
            in_block, blocks, ..
        } = machine.warp_position();
        if machine.arrives_last(BlockCounter::Left, in_block) {
            arrivals::pass(machine, Counter::Arrivals, blocks, || {
                self.end_round();
            });
        }
    }

    /// Waits for a part of one token's rows and writes that part of its output.
    #[inline(always)]
    fn reduce_item(
        &self,
        tactics: CombineTactics,
        item: Item,
        finish: impl Finish<M>,
    ) -> Result<(), Aborted> {
        let (machine, common) = (self.machine, self.common);
        let (shape, window, me) = (&common.shape, &common.window, common.rank());
        let Item {
            token, part, parts, ..
        } = item;
        let experts = machine.lanes(|lane| {
            lane_or_none(lane, shape.top_k, || {
                machine.read(Table::Routes, assignment_index(shape.top_k, token, lane))
            })
        });
        let range = ByteRange::part(shape.combine_row_bytes(), part, parts);
        let at = |slot| Row::Window(me, window.combine_row(token, slot));
        let to = Row::Tensor(Tensor::Combined, token);
        match self.mode() {
            CombineMode::Reduced => {
                let ranks = RankSet::of_experts(machine, shape, experts);
                let slots = low_bits(ranks.count());
                if tactics.wire == Wire::Inline {
                    let row = |slot| window.inline_combine_row(token, slot);
                    let summed =
                        inline::sum(machine, range, slots, tactics.polls_all, row, to, finish);
                    let taken = summed.and_then(|()| match part {
                        0 => self.take_weights(token, true, experts),
                        _ => Ok(()),
                    });
                    return taken.or_else(|TimedOut { row: slot }| {
                        self.time_out_on(Awaited {
                            peer: ranks.nth(slot),
                            region: Region::CombineRow,
                            index: token as u64,
                            saw: 0,
                        })
                    });
                }
                self.wait_for_slots(item, slots, |slot| ranks.nth(slot))?;
                machine.sum_rows(range, slots, |slot| (at(slot), 1.0), to, finish);
                if part == 0 {
                    // They have arrived with the rows.
                    let _ = self.take_weights(token, false, experts);
                }
            }
            CombineMode::Exact => {
                let slots =
                    machine.ballot(machine.lanes(|lane| machine.own(experts, lane) != NOT_ROUTED));
                self.wait_for_slots(item, slots, |slot| {
                    shape.rank_of(
                        machine.read(Table::Routes, assignment_index(shape.top_k, token, slot)),
                    )
                })?;
                if self.args.topk_weights == 0 {
                    self.copy_slots(item, slots, at);
                } else {
                    let weights = machine.lanes(|lane| {
                        lane_or_none(lane, shape.top_k, || {
                            machine.read(
                                Table::TopkWeights,
                                assignment_index(shape.top_k, token, lane),
                            )
                        })
                    });
                    let weighted =
                        |slot| (at(slot), f32::from_bits(machine.broadcast(weights, slot)));
                    machine.sum_rows(range, slots, weighted, to, finish);
                }
            }
        }
        Ok(())
    }

    /// Waits until the rows in `slots` of a token are whole; `sender` returns the rank that fills a slot.
    #[inline(always)]
    fn wait_for_slots(
        &self,
        item: Item,
        slots: u32,
        sender: impl Fn(u32) -> Rank,
    ) -> Result<(), Aborted> {
        let (machine, common, epoch) = (self.machine, self.common, self.epoch);
        let flag = |slot| common.window.combine_flag(item.flag(), slot);
        self.wait_lanes(
            |lane| {
                let full = slots >> lane & 1 == 0 || flagged::is_full(machine, flag(lane), epoch);
                full.then_some(())
            },
            |lane| Awaited {
                peer: sender(lane),
                region: Region::CombineRow,
                index: item.token as u64,
                saw: machine.load_signal(flag(lane)),
            },
        )?;
        Ok(())
    }

    /// Copies the rows `from(k)` of `slots` as they are, and writes zeros for all other slots.
    #[inline(always)]
    pub fn copy_slots(&self, item: Item, slots: u32, from: impl Fn(u32) -> Row) {
        let (machine, shape) = (self.machine, &self.common.shape);
        let Item {
            token, part, parts, ..
        } = item;
        let range = ByteRange::part(shape.combine_row_bytes(), part, parts);
        for k in 0..shape.top_k {
            let to = Row::Tensor(Tensor::Combined, token * shape.top_k + k);
            if slots >> k & 1 != 0 {
                machine.copy_arrived(range, from(k), 1u32, |_| to);
            } else {
                machine.sum_rows(range, 0, |_| (to, 0.0), to, Rounding);
            }
        }
    }
}

/// The lowest `count` bits, at most 32.
#[inline(always)]
fn low_bits(count: u32) -> u32 {
    debug_assert!(count <= u32::BITS, "{count} bits");
    ((1u64 << count) - 1) as u32
}
