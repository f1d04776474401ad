//! Dispatch: the entries, and which warp does what.

use ferry_layout::{Counter, DispatchArgs, Kernel, TokenFormat};

use crate::announce::{announce, tasks};
use crate::receive::receive;
use crate::send::send_units;
use crate::share::{Seat, Share};
use crate::wait::{Launch, Stopped};
use crate::{Machine, Span};

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
pub fn dispatch_async<M: Machine>(machine: &M, args: &DispatchArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::DispatchAsync);
    launch.check()?;
    launch.end(Roles::of(&launch, false).send(&launch, args))
}

/// Waits for all ranks' tokens and puts them in expert order, with offsets and sources.
/// After `dispatch_async`, in stream order. Collective.
#[inline(always)]
pub fn dispatch_wait<M: Machine>(machine: &M, args: &DispatchArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::DispatchWait);
    launch.check()?;
    let seat = machine.seat();
    let share = Share {
        index: seat.warp(),
        of: seat.warps(),
    };
    launch.end(receive(&launch, args, share))
}

/// Both in one launch. Collective. All warps must be resident at once: they wait for peers,
/// which wait for all of them.
#[inline(always)]
pub fn dispatch<M: Machine>(machine: &M, args: &DispatchArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::Dispatch);
    launch.check()?;
    let roles = Roles::of(&launch, true);
    let sent = roles.send(&launch, args);
    launch.end(sent.and_then(|()| match roles.receiver {
        Some(share) => receive(&launch, args, share),
        None => Ok(()),
    }))
}

/// What a warp does in a launch that sends: the first ones announce, the next ones send, and all
/// receive but those that send much.
struct Roles {
    announcer: Option<Share>,
    sender: Option<Share>,
    /// Whether senders do nothing else.
    is_crowded: bool,
    receiver: Option<Share>,
}

/// What there is to do for the warps of a launch that sends.
#[derive(Clone, Copy)]
struct Work {
    format: TokenFormat,
    /// Warps that announcing keeps busy.
    tasks: u32,
    /// Parts of tokens to be sent.
    units: u32,
    /// Whether they are whole tokens.
    is_whole: bool,
    /// Bytes of the payload of the first one, if they go bare.
    bare_bytes: u32,
    /// Whether the launch goes on to receive.
    receives: bool,
}

impl Roles {
    /// `receives`: the launch goes on to receive.
    #[inline(always)]
    fn of<M: Machine>(launch: &Launch<M>, receives: bool) -> Self {
        let shape = &launch.common.shape;
        let parts = launch.common.row.parts(launch.common.tokens);
        let work = Work {
            format: shape.format(),
            tasks: tasks(shape, launch.common.tokens),
            units: launch.common.tokens * parts,
            is_whole: parts == 1,
            bare_bytes: match launch.common.dispatches_bare(parts) {
                true => Span::part(launch.common.row.payload_bytes, 0, parts).end,
                false => 0,
            },
            receives,
        };
        Self::assign(launch.machine.seat(), work)
    }

    #[inline(always)]
    fn assign(seat: Seat, work: Work) -> Self {
        let (warps, units) = (seat.warps(), work.units);
        // Others wait for them, and have more to do.
        let announcers = work.tasks.min(warps / 4).max(1);
        // A launch of a single warp announces first and sends then.
        let others = if warps == 1 { 1 } else { warps - announcers };
        let is_many = units > others || work.is_whole && units >= MANY_ROWS;
        let is_crowded = work.receives && is_many && others > 1;
        let enough = enough_senders(work.format);
        let spared = spared_senders(work.format, warps);
        // Two rows each at least where rows are copied: fewer keep the wire busy as well.
        let most = match work.format {
            TokenFormat::Bf16 => units / 2,
            _ => units,
        };
        let senders = match is_crowded {
            true => enough.min(spared).min(most).clamp(1, others - 1),
            false => others,
        };
        // Loads queue behind their multiprocessor's stores to peers: where there are enough of them,
        // some have only senders, others none.
        let is_apart = is_crowded && enough <= spared;
        // All receive here, but what the half without senders waits for comes at once.
        let is_halved = work.receives && !is_crowded && work.bare_bytes >= LARGE_PART;
        let warp = if is_apart {
            seat.warp_by_block()
        } else if is_halved {
            seat.warp_by_half(announcers, units)
        } else {
            seat.warp()
        };
        let first_sender = warps - others;
        let share = |first: u32, of: u32| {
            let index = warp.wrapping_sub(first);
            (index < of).then_some(Share { index, of })
        };
        // Announcing takes far less than sending that much.
        let joins = !work.receives && units > warps;
        let sender = match joins {
            true => Some(Share {
                index: (warp + others) % warps,
                of: warps,
            }),
            false => share(first_sender, senders),
        };
        let receiver = match (is_crowded, sender) {
            (true, Some(_)) => None,
            (true, None) => {
                let before = if warp < first_sender { 0 } else { senders };
                share(before, warps - senders)
            }
            // The last warps first: the first ones send meanwhile.
            (false, _) => Some(Share {
                index: warps - 1 - warp,
                of: warps,
            }),
        };
        Self {
            announcer: share(0, announcers),
            sender,
            is_crowded,
            receiver,
        }
    }

    /// Announces and sends.
    #[inline(always)]
    fn send<M: Machine>(&self, launch: &Launch<M>, args: &DispatchArgs) -> Result<(), Stopped> {
        if launch.machine.warp() == 0 {
            launch.machine.reset(Counter::CombineDraws);
        }
        if let Some(share) = self.announcer {
            announce(launch, share)?;
        }
        match self.sender {
            Some(share) => send_units(launch, args, (share, self.is_crowded)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use ferry_layout::Shape;

    use super::*;
    use crate::receive::makes_offsets;
    use crate::share::each_once;

    /// Blocks, warps of a block, and what there is to do: whole tokens of every kind of count, and bare parts.
    fn launches() -> impl Iterator<Item = (u32, u32, Work)> {
        let blocks = [1, 2, 16, 66, 132];
        let in_block = [1, 4, 16];
        let units = [0u32, 1, 13, 511, 512, 4096];
        let formats = [TokenFormat::Bf16, TokenFormat::BlockwiseFp8];
        let each = blocks
            .into_iter()
            .flat_map(move |blocks| in_block.map(|in_block| (blocks, in_block)));
        let each = each.flat_map(move |(blocks, in_block)| units.map(|n| (blocks, in_block, n)));
        let each = each.flat_map(move |(blocks, in_block, units)| {
            formats.map(|format| (blocks, in_block, units, format))
        });
        each.flat_map(|(blocks, in_block, units, format)| {
            [true, false].map(|receives| {
                let work = Work {
                    format,
                    tasks: units.div_ceil(16).max(1),
                    units,
                    is_whole: units >= MANY_ROWS,
                    bare_bytes: if units < MANY_ROWS { LARGE_PART } else { 0 },
                    receives,
                };
                (blocks, in_block, work)
            })
        })
    }

    fn roles(blocks: u32, in_block: u32, work: Work) -> Vec<Roles> {
        let warps = blocks * in_block;
        let seat = |warp| Seat {
            index: warp / blocks,
            in_block,
            block: warp % blocks,
            blocks,
        };
        (0..warps)
            .map(|warp| Roles::assign(seat(warp), work))
            .collect()
    }

    #[test]
    fn every_share_of_every_role_has_one_warp() {
        for (blocks, in_block, work) in launches() {
            let roles = roles(blocks, in_block, work);
            each_once(roles.iter().filter_map(|roles| roles.announcer));
            each_once(roles.iter().filter_map(|roles| roles.sender));
            each_once(roles.iter().filter_map(|roles| roles.receiver));
        }
    }

    #[test]
    fn a_large_launch_keeps_senders_and_receivers_on_different_multiprocessors() {
        let work = Work {
            format: TokenFormat::BlockwiseFp8,
            tasks: 256,
            units: 4096,
            is_whole: true,
            bare_bytes: 0,
            receives: true,
        };
        let roles = roles(132, 16, work);
        let both = (0..132).filter(|block| {
            let of_block = || roles.iter().skip(*block).step_by(132);
            of_block().any(|roles| roles.sender.is_some())
                && of_block().any(|roles| roles.receiver.is_some())
        });
        assert_eq!(both.count(), 0, "528 senders fill 33 blocks");
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
        let units = 8 * shape.ranks * shape.parts(8);
        let maker = (0..of).find(|&index| makes_offsets(&shape, Share { index, of }));
        assert!(maker.is_some_and(|index| index >= units), "{maker:?}");
    }

    #[test]
    fn large_parts_are_sent_by_one_half_of_the_multiprocessors_and_offsets_made_by_the_other() {
        let work = Work {
            format: TokenFormat::Bf16,
            tasks: 12,
            units: 512,
            is_whole: false,
            bare_bytes: LARGE_PART,
            receives: true,
        };
        let roles = roles(132, 16, work);
        for (warp, roles) in roles.iter().enumerate() {
            let sends = roles.sender.is_some_and(|share| share.index < work.units);
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
