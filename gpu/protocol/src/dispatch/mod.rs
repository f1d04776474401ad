//! Dispatch: the entries, and which warp does what.

mod destination;
mod notify;
pub mod numbering;
mod offsets;
mod receive;
mod scales;
mod send;

use ferry_layout::{Counter, DispatchArgs, Kernel, TokenFormat};

use crate::dispatch::notify::{notify, tasks};
use crate::dispatch::receive::receive;
use crate::dispatch::send::send_items;
use crate::machine::Machine;
use crate::machine::position::WarpPosition;
use crate::machine::rows::ByteRange;
use crate::sync::launch::{Aborted, Launch};
use crate::work::partition::Partition;

/// From so many whole rows on, some warps send and do nothing else, also where there are more warps
/// than rows: the first rows are in their places before the last ones leave. Found by measuring
/// (BENCHMARKS.md).
const MANY_ROWS: u32 = 512;

/// Bytes of a bare part's payload from which on its sender is kept apart from others. Found by measuring
/// (BENCHMARKS.md).
const LARGE_PART: u32 = 3584;

/// Warps that send and do nothing else: so many fill the wire, and the others put rows in their places
/// meanwhile. Encoding takes more warps than copying. Found by measuring (BENCHMARKS.md).
#[inline(always)]
fn enough_senders(format: TokenFormat) -> u32 {
    match format {
        TokenFormat::Bf16 => 396,
        TokenFormat::Mxfp4(_) => 1056,
        _ => 528,
    }
}

/// As [`enough_senders`], of few `warps`: what they can spare.
#[inline(always)]
fn spared_senders(format: TokenFormat, warps: u32) -> u32 {
    match format {
        TokenFormat::Bf16 => warps * 5 / 16,
        _ => warps * 9 / 16,
    }
}

/// Sends this rank's tokens and counts; waits for nothing that a peer does. Collective.
#[inline(always)]
pub fn dispatch_async<M: Machine>(machine: &M, args: &DispatchArgs) -> Result<(), Aborted> {
    let launch = Launch::begin(machine, &args.common, Kernel::DispatchAsync);
    launch.check()?;
    launch.end(DispatchRoles::of(&launch, false).send(&launch, args))
}

/// Waits for all ranks' tokens and puts them in expert order, with offsets and sources.
/// After `dispatch_async`, in stream order. Collective.
#[inline(always)]
pub fn dispatch_wait<M: Machine>(machine: &M, args: &DispatchArgs) -> Result<(), Aborted> {
    let launch = Launch::begin(machine, &args.common, Kernel::DispatchWait);
    launch.check()?;
    let warp_position = machine.warp_position();
    let partition = Partition {
        index: warp_position.warp(),
        of: warp_position.warps(),
    };
    launch.end(receive(&launch, args, partition))
}

/// Both in one launch. Collective. All warps must be resident at once: they wait for peers,
/// which wait for all of them.
#[inline(always)]
pub fn dispatch<M: Machine>(machine: &M, args: &DispatchArgs) -> Result<(), Aborted> {
    let launch = Launch::begin(machine, &args.common, Kernel::Dispatch);
    launch.check()?;
    let roles = DispatchRoles::of(&launch, true);
    let sent = roles.send(&launch, args);
    launch.end(sent.and_then(|()| match roles.receiver {
        Some(partition) => receive(&launch, args, partition),
        None => Ok(()),
    }))
}

/// What a warp does in a launch that sends: the first ones announce, the next ones send, and all
/// receive but those that send much.
struct DispatchRoles {
    notifier: Option<Partition>,
    sender: Option<Partition>,
    /// Whether senders do nothing else.
    is_specialised: bool,
    receiver: Option<Partition>,
}

/// What there is to do for the warps of a launch that sends.
#[derive(Clone, Copy)]
struct Work {
    format: TokenFormat,
    /// Warps that announcing keeps busy.
    tasks: u32,
    /// Parts of tokens to be sent.
    items: u32,
    /// Whether they are whole tokens.
    is_whole: bool,
    /// Bytes of the payload of the first one, if they go bare.
    inline_bytes: u32,
    /// Whether the launch goes on to receive.
    receives: bool,
}

impl DispatchRoles {
    /// `receives`: the launch goes on to receive.
    #[inline(always)]
    fn of<M: Machine>(launch: &Launch<M>, receives: bool) -> Self {
        let shape = &launch.common.shape;
        let parts = launch.common.row.parts(launch.common.tokens);
        let work = Work {
            format: shape.format(),
            tasks: tasks(shape, launch.common.tokens),
            items: launch.common.tokens * parts,
            is_whole: parts == 1,
            inline_bytes: match launch.common.dispatches_inline(parts) {
                true => ByteRange::part(launch.common.row.payload_bytes, 0, parts).end,
                false => 0,
            },
            receives,
        };
        Self::assign(launch.machine.warp_position(), work)
    }

    #[inline(always)]
    fn assign(warp_position: WarpPosition, work: Work) -> Self {
        let (warps, items) = (warp_position.warps(), work.items);
        // Others wait for them, and have more to do.
        let notifiers = work.tasks.min(warps / 4).max(1);
        // A launch of a single warp announces first and sends then.
        let others = if warps == 1 { 1 } else { warps - notifiers };
        let is_many = items > others || work.is_whole && items >= MANY_ROWS;
        let is_specialised = work.receives && is_many && others > 1;
        let enough = enough_senders(work.format);
        let spared = spared_senders(work.format, warps);
        // Two rows each at least where rows are copied: fewer keep the wire busy as well.
        let most = match work.format {
            TokenFormat::Bf16 => items / 2,
            _ => items,
        };
        let senders = match is_specialised {
            true => enough.min(spared).min(most).clamp(1, others - 1),
            false => others,
        };
        // Loads queue behind their multiprocessor's stores to peers: where there are enough of them,
        // some have only senders, others none.
        let by_sm = is_specialised && enough <= spared;
        // All receive here, but what the half without senders waits for comes at once.
        let sender_half = work.receives && !is_specialised && work.inline_bytes >= LARGE_PART;
        let warp = if by_sm {
            warp_position.warp_by_block()
        } else if sender_half {
            warp_position.warp_by_half(notifiers, items)
        } else {
            warp_position.warp()
        };
        let first_sender = warps - others;
        let partition = |first: u32, of: u32| {
            let index = warp.wrapping_sub(first);
            (index < of).then_some(Partition { index, of })
        };
        // Announcing takes far less than sending that much.
        let all_send = !work.receives && items > warps;
        let sender = match all_send {
            true => Some(Partition {
                index: (warp + others) % warps,
                of: warps,
            }),
            false => partition(first_sender, senders),
        };
        let receiver = match (is_specialised, sender) {
            (true, Some(_)) => None,
            (true, None) => {
                let before = if warp < first_sender { 0 } else { senders };
                partition(before, warps - senders)
            }
            // The last warps first: the first ones send meanwhile.
            (false, _) => Some(Partition {
                index: warps - 1 - warp,
                of: warps,
            }),
        };
        Self {
            notifier: partition(0, notifiers),
            sender,
            is_specialised,
            receiver,
        }
    }

    /// Announces and sends.
    #[inline(always)]
    fn send<M: Machine>(&self, launch: &Launch<M>, args: &DispatchArgs) -> Result<(), Aborted> {
        if launch.machine.warp() == 0 {
            launch.machine.reset(Counter::CombineTickets);
        }
        if let Some(partition) = self.notifier {
            notify(launch, partition)?;
        }
        match self.sender {
            Some(partition) => send_items(launch, args, (partition, self.is_specialised)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use ferry_layout::Shape;

    use super::*;
    use crate::dispatch::receive::makes_offsets;
    use crate::work::partition::each_once;

    /// Blocks, warps of a block, and what there is to do: whole tokens of every kind of count, and bare parts.
    fn launches() -> impl Iterator<Item = (u32, u32, Work)> {
        let blocks = [1, 2, 16, 66, 132];
        let in_block = [1, 4, 16];
        let items = [0u32, 1, 13, 511, 512, 4096];
        let formats = [TokenFormat::Bf16, TokenFormat::BlockwiseFp8];
        let each = blocks
            .into_iter()
            .flat_map(move |blocks| in_block.map(|in_block| (blocks, in_block)));
        let each = each.flat_map(move |(blocks, in_block)| items.map(|n| (blocks, in_block, n)));
        let each = each.flat_map(move |(blocks, in_block, items)| {
            formats.map(|format| (blocks, in_block, items, format))
        });
        each.flat_map(|(blocks, in_block, items, format)| {
            [true, false].map(|receives| {
                let work = Work {
                    format,
                    tasks: items.div_ceil(16).max(1),
                    items,
                    is_whole: items >= MANY_ROWS,
                    inline_bytes: if items < MANY_ROWS { LARGE_PART } else { 0 },
                    receives,
                };
                (blocks, in_block, work)
            })
        })
    }

    fn roles(blocks: u32, in_block: u32, work: Work) -> Vec<DispatchRoles> {
        let warps = blocks * in_block;
        let warp_position = |warp| WarpPosition {
            index: warp / blocks,
            in_block,
            block: warp % blocks,
            blocks,
        };
        (0..warps)
            .map(|warp| DispatchRoles::assign(warp_position(warp), work))
            .collect()
    }

    #[test]
    fn every_share_of_every_role_has_one_warp() {
        for (blocks, in_block, work) in launches() {
            let roles = roles(blocks, in_block, work);
            each_once(roles.iter().filter_map(|roles| roles.notifier));
            each_once(roles.iter().filter_map(|roles| roles.sender));
            each_once(roles.iter().filter_map(|roles| roles.receiver));
        }
    }

    #[test]
    fn a_large_launch_keeps_senders_and_receivers_on_different_multiprocessors() {
        let work = Work {
            format: TokenFormat::BlockwiseFp8,
            tasks: 256,
            items: 4096,
            is_whole: true,
            inline_bytes: 0,
            receives: true,
        };
        let roles = roles(132, 16, work);
        let shared = (0..132).filter(|block| {
            let of_block = || roles.iter().skip(*block).step_by(132);
            of_block().any(|roles| roles.sender.is_some())
                && of_block().any(|roles| roles.receiver.is_some())
        });
        assert_eq!(shared.count(), 0, "528 senders fill 33 blocks");
    }

    /// Four ranks with at most so many tokens.
    fn shape(max_tokens_per_rank: u32) -> Shape {
        Shape {
            ranks: 4,
            p2p_world_size: 4,
            experts: 256,
            top_k: 8,
            hidden: 7168,
            max_tokens_per_rank,
            combine_mode: 0,
            token_format: TokenFormat::Bf16.number(),
        }
    }

    #[test]
    fn of_few_tokens_who_makes_offsets_receives_nothing() {
        let (shape, of) = (shape(8), 8 * 132);
        let items = 8 * shape.ranks * shape.parts(8);
        let maker = (0..of).find(|&index| makes_offsets(&shape, Partition { index, of }));
        assert!(maker.is_some_and(|index| index >= items), "{maker:?}");
    }

    #[test]
    fn large_parts_are_sent_by_one_half_of_the_multiprocessors_and_offsets_made_by_the_other() {
        let work = Work {
            format: TokenFormat::Bf16,
            tasks: 12,
            items: 512,
            is_whole: false,
            inline_bytes: LARGE_PART,
            receives: true,
        };
        let roles = roles(132, 16, work);
        for (warp, roles) in roles.iter().enumerate() {
            let sends = roles
                .sender
                .is_some_and(|partition| partition.index < work.items);
            let receiver = roles.receiver.expect("all warps receive");
            let makes_offsets = makes_offsets(&shape(128), receiver);
            assert!(!sends || warp % 132 < 66, "warp {warp} sends");
            assert!(
                !makes_offsets || warp % 132 >= 66,
                "warp {warp} makes offsets"
            );
        }
    }
}
