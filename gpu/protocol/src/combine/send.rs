//! Combine on the experts' rank: what it received goes back to where it came from.

use ferry_layout::{CombineArgs, CombineMode, Counter, Header, Rank, Region, Tensor};

use crate::combine::CombineRoles;
use crate::combine::received::{item_here, read_positions, slots_here};
use crate::combine::send_batched::send_batched;
use crate::machine::Machine;
use crate::machine::counters::BlockCounter;
use crate::machine::rows::{ByteRange, Put, Row};
use crate::sync::arrivals;
use crate::sync::launch::{Aborted, Launch};
use crate::wire::{credit, flagged};
use crate::work::batches::Batches;
use crate::work::item::{Extent, Item};
use crate::work::partition::{Partition, WorkQueue, warps_of_block};
use crate::work::route::{for_each_bit, lane_or_none, on_each_rank, ranks_of, reduced_slot};
use crate::work::sub_warps::SubWarps;

/// From so many units a warp on, units are sent together.
const MANY_ITEMS: u32 = 32;

/// Every row that this rank received, back to where it came from.
#[inline(always)]
pub fn send_back<M: Machine>(
    launch: &Launch<M>,
    args: &CombineArgs,
    roles: CombineRoles,
) -> Result<(), Aborted> {
    let (machine, common) = (launch.machine, launch.common);
    let shape = &common.shape;
    if machine.warp() == 0 {
        machine.reset(Counter::DispatchTickets);
    }
    let Some(partition) = roles.sender else {
        return Ok(());
    };
    let extent = Extent::of_word(machine.peek(Counter::Extent));
    let items = extent.items(shape);
    let at_once = items <= partition.of;
    let is_remote = machine.spans_nodes();
    let batches = match at_once || roles.is_inline || extent.parts > 1 || is_remote {
        true => Batches::none(items),
        false => {
            let size = batch_of(launch, items / MANY_ITEMS >= partition.of);
            Batches::of(items, partition.of, size)
        }
    };
    let tickets = batches.tickets();
    let mut queue = WorkQueue::new(machine, partition, tickets, Counter::CombineTickets);
    let credits = CreditReturn { roles, at_once };
    // The last warp of a block flags the units of all.
    let is_reduced = shape.mode() == CombineMode::Reduced;
    let is_by_block = at_once && !roles.is_inline && !is_remote && is_reduced;
    let by_block = is_by_block.then_some((partition, items));
    let mut has_read = false;
    while let Some(ticket) = queue.next_item() {
        let index = batches.first_item(ticket);
        if batches.is_batch(ticket) {
            send_batched(launch, args, (extent, index), || queue.take_ticket());
            continue;
        }
        let item = item_here(launch, extent, index);
        // Where units are flagged together, a warp without one takes part, too.
        if item.is_none() && by_block.is_none() {
            queue.take_ticket();
            continue;
        }
        let part = item.map(|item| Part {
            item,
            is_inline: roles.is_inline,
            is_p2p: !is_remote || shape.same_node(common.rank(), item.source),
        });
        let read = || {
            // Before the rows are written, which would have to be waited for.
            if at_once {
                has_read = true;
                credits.read(launch);
            }
        };
        send_item_back(launch, args, part, by_block, (read, || queue.take_ticket()));
    }
    if !has_read {
        credits.read(launch);
    }
    // A warp that gathers late, if at all.
    if at_once && partition.index == partition.of / 2 {
        credits.return_all(launch)?;
    }
    Ok(())
}

/// How many units a warp sends together, of which it has `many`.
#[inline(always)]
fn batch_of<M: Machine>(launch: &Launch<M>, many: bool) -> u32 {
    let shape = &launch.common.shape;
    match shape.mode() == CombineMode::Reduced && many {
        true => SubWarps::of(shape).most(),
        false => 1,
    }
}

/// How every rank is told that its rows were read, with counts, presence and headers.
#[derive(Clone, Copy)]
struct CreditReturn {
    roles: CombineRoles,
    /// Every warp has one unit at most: it says so before it writes, which nobody waits for, and one warp
    /// waits for all. Otherwise the last one through tells.
    at_once: bool,
}

impl CreditReturn {
    /// This warp has read all that it has to: each that sends back calls this once.
    #[inline(always)]
    fn read<M: Machine>(self, launch: &Launch<M>) {
        let machine = launch.machine;
        if !machine.arrives_last(BlockCounter::Read, self.roles.senders_in_block) {
            return;
        }
        match self.at_once {
            true => machine.count(Counter::Reads),
            false => arrivals::pass(machine, Counter::Reads, machine.blocks(), || {
                return_credits(launch);
            }),
        }
    }

    /// Waits until all warps have read, and tells.
    #[inline(always)]
    fn return_all<M: Machine>(self, launch: &Launch<M>) -> Result<(), Aborted> {
        let machine = launch.machine;
        launch.wait_local(Counter::Reads, Region::Credit, || {
            machine.load(Counter::Reads) >= machine.blocks() as u64
        })?;
        return_credits(launch);
        machine.store(Counter::Reads, 0);
        Ok(())
    }
}

/// Tells every rank that its rows were read.
#[inline(always)]
fn return_credits<M: Machine>(launch: &Launch<M>) {
    let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
    let word = common.window.credit(common.rank());
    let credit = credit::Credit::release(machine, word, epoch);
    on_each_rank(machine, common.shape.ranks, |rank| {
        credit.return_to(machine, rank);
    });
}

/// Releases what the warps of a block have written, once for all of them, and sets the flags that they
/// hand over. `partition` is this warp's, of `items`.
#[inline(always)]
fn publish_by_block<M: Machine>(
    launch: &Launch<M>,
    (partition, items): (Partition, u32),
    flag: u64,
) {
    let (machine, epoch) = (launch.machine, launch.epoch);
    let callers = warps_of_block(machine, machine.warp() - partition.index, items);
    let Some(flags) = machine.hand_to_last(BlockCounter::Sent, callers, flag) else {
        return;
    };
    machine.release();
    machine.lanes(|lane| {
        let flag = machine.own(flags, lane);
        if flag != 0 {
            let (source, item, slot) = Flag::of_word(flag);
            let flag = launch.common.window.combine_flag(item, slot);
            flagged::publish(machine, source, flag, epoch);
        }
    });
}

/// What of the expert outputs of a token a warp sends back.
#[derive(Clone, Copy)]
struct Part {
    item: Item,
    is_inline: bool,
    /// Whether its source is on this node.
    is_p2p: bool,
}

impl Part {
    /// What of a row of `bytes`.
    #[inline(always)]
    fn range(self, bytes: u32) -> ByteRange {
        ByteRange::part(bytes, self.item.part, self.item.parts)
    }
}

/// The flag of a unit that was sent back.
struct Flag {
    item: Item,
    slot: u32,
}

impl Flag {
    /// In a word that is not 0. Ranks and their slots are up to 64.
    #[inline(always)]
    fn to_word(&self) -> u64 {
        let (item, source) = (self.item.flag(), self.item.source.0);
        1 << 63 | (item as u64) << 16 | (self.slot << 8 | source) as u64
    }

    /// The source, the index of the unit among the source's, and the slot.
    #[inline(always)]
    fn of_word(word: u64) -> (Rank, u32, u32) {
        (
            Rank(word as u32 & 0xff),
            (word >> 16) as u32,
            word as u32 >> 8 & 0xff,
        )
    }
}

/// A part of the expert outputs of one token, if there is `item`. `by_block`: this warp's share of how
/// many units that are flagged together. `read` is called once all of the unit is read that dispatch
/// has brought, in reduced mode; `written` once its rows, if any, are written.
#[inline(always)]
fn send_item_back<M: Machine>(
    launch: &Launch<M>,
    args: &CombineArgs,
    part: Option<Part>,
    by_block: Option<(Partition, u32)>,
    (read, written): (impl FnOnce(), impl FnOnce()),
) {
    match (launch.common.shape.mode(), part) {
        (CombineMode::Reduced, part) => {
            let slot = match part {
                Some(part) => sum_part(launch, args, part, read),
                None => 0,
            };
            written();
            let flagged = part.filter(|part| !part.is_inline);
            match (by_block, flagged) {
                (Some(by_block), flagged) => {
                    let flag = flagged.map_or(0, |Part { item, .. }| Flag { item, slot }.to_word());
                    publish_by_block(launch, by_block, flag);
                }
                (None, Some(part)) => publish_reduced(launch, part, slot),
                (None, None) => {}
            }
        }
        (CombineMode::Exact, Some(part)) => send_exact(launch, args, part, written),
        (CombineMode::Exact, None) => written(),
    }
}

/// Flags the sum that a unit's source gets.
#[inline(always)]
fn publish_reduced<M: Machine>(launch: &Launch<M>, part: Part, slot: u32) {
    let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
    let window = &common.window;
    let Part { item, is_p2p, .. } = part;
    let flag = window.combine_flag(item.flag(), slot);
    machine.release();
    if is_p2p {
        machine.lanes(|lane| {
            if lane == 0 {
                flagged::publish(machine, item.source, flag, epoch);
            }
        });
    } else {
        machine.put(Put {
            peer: item.source,
            from: window.reduced_staging(item.source, item.token),
            to: window.combine_row(item.token, slot),
            bytes: common.shape.combine_row_bytes(),
            signal: flag,
            value: epoch.0,
        });
    }
}

/// Sums a token's expert outputs on this rank, weighted, into the row at the source, or if that is not
/// near, into the staging. Gives the slot that the row has there. `read`: as for [`send_item_back`].
#[inline(always)]
fn sum_part<M: Machine>(
    launch: &Launch<M>,
    args: &CombineArgs,
    work: Part,
    read: impl FnOnce(),
) -> u32 {
    let (machine, common) = (launch.machine, launch.common);
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let item = work.item;
    let Item { source, token, .. } = item;
    let header = window.dispatch_row(source, token).plus(common.row.header);
    // Everything is read before anything is waited for.
    let positions = read_positions(launch, item);
    // The last lanes read of an entry again rather than branch.
    let assignment = |lane: u32| Header::assignment(lane.min(shape.top_k - 1));
    let weight = |lane: u32| Header::weight(shape.top_k, lane.min(shape.top_k - 1));
    let words = machine.lanes(|lane| machine.read_window(header.plus(assignment(lane))));
    let weights = machine.lanes(|lane| machine.read_window(header.plus(weight(lane))));
    let experts = machine.lanes(|lane| {
        let assignment = shape.assignment_words().decode(machine.own(words, lane));
        lane_or_none(lane, shape.top_k, || assignment.expert)
    });
    let here = slots_here(machine, args, positions);
    let slot_index = reduced_slot(window, ranks_of(machine, shape, experts), me);
    read();

    let to = if work.is_inline {
        Row::Inline(source, window.inline_combine_row(token, slot_index))
    } else if work.is_p2p {
        Row::Window(source, window.combine_row(token, slot_index))
    } else {
        Row::Window(me, window.reduced_staging(source, token))
    };
    machine.sum_rows(
        work.range(shape.combine_row_bytes()),
        here,
        |k| {
            let weight = f32::from_bits(machine.broadcast(weights, k));
            (
                Row::Tensor(Tensor::Expert, machine.broadcast(positions, k)),
                weight,
            )
        },
        to,
    );
    slot_index
}

/// Into one row a top-k slot: each as it is.
#[inline(always)]
fn send_exact<M: Machine>(
    launch: &Launch<M>,
    args: &CombineArgs,
    work: Part,
    written: impl FnOnce(),
) {
    let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
    let (window, me) = (&common.window, common.rank());
    let Part { item, is_p2p, .. } = work;
    let Item { source, token, .. } = item;
    let positions = read_positions(launch, item);
    let here = slots_here(machine, args, positions);
    let range = work.range(common.shape.combine_row_bytes());
    let home = Rank(if is_p2p { source.0 } else { me.0 });
    for_each_bit(here, |k| {
        let position = machine.broadcast(positions, k);
        let at = if is_p2p {
            window.combine_row(token, k)
        } else {
            window.exact_staging(position)
        };
        let row = Row::Tensor(Tensor::Expert, position);
        let to = |_| Row::Window(home, at);
        machine.copy_row((range, row), machine.read_ahead(range, row), 1u32, to);
    });
    written();
    machine.release();
    if is_p2p {
        machine.lanes(|lane| {
            if here >> lane & 1 != 0 {
                let flag = window.combine_flag(item.flag(), lane);
                flagged::publish(machine, source, flag, epoch);
            }
        });
    } else {
        for_each_bit(here, |k| {
            machine.put(Put {
                peer: source,
                from: window.exact_staging(machine.broadcast(positions, k)),
                to: window.combine_row(token, k),
                bytes: common.shape.combine_row_bytes(),
                signal: window.combine_flag(item.flag(), k),
                value: epoch.0,
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_read_back_from_their_words() {
        for (source, slot) in [(0, 0), (1, 2), (63, 63)] {
            for (token, part) in [(0, 0), (5, 3), (1 << 20, 0)] {
                let item = Item {
                    source: Rank(source),
                    token,
                    part,
                    parts: 4,
                };
                let word = Flag { item, slot }.to_word();
                assert_ne!(word, 0, "a warp that hands over a flag is seen to");
                assert_eq!(Flag::of_word(word), (Rank(source), 4 * token + part, slot));
            }
        }
    }
}
