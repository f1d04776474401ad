//! The receiving half of dispatch.
//!
//! One warp turns the counts into row offsets while payload is still in flight; all warps then
//! wait for rows, each for its own, and copy them to their final places as they come.

use ferry_layout::{
    Counter, DispatchArgs, Fault, FaultKind, Header, NOT_ROUTED, Rank, Region, Shape, Table,
    Tagged, Tensor,
};

use crate::route::lane_or_none;
use crate::wait::{Awaited, Launch, Stopped};
use crate::{LANES, Machine, Row, slot};

#[inline(always)]
pub fn receive<M: Machine>(launch: &Launch<M>, args: &DispatchArgs) -> Result<(), Stopped> {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let shape = &common.shape;
    // The last warp: in a fused launch the first ones are busy counting.
    if machine.warp() + 1 == machine.warps() {
        compute_offsets(launch, args)?;
    }
    wait_for_token_counts(launch)?;
    launch.wait_local(Counter::OffsetsReady, Region::Offsets, || {
        machine.load(Counter::OffsetsReady) >= epoch.0
    })?;
    let mut next = Batch::first(*machine, shape);
    while let Some(batch) = next {
        let present = launch.wait_lanes(
            |lane: u32| batch.presence(launch, lane).map(u32::from),
            |lane| batch.awaited(launch, lane),
        )?;
        let mut coming =
            machine.ballot(machine.lanes(|lane| machine.own(present, lane) == Some(1)));
        while coming != 0 {
            let (source, token) = batch.unit(coming.trailing_zeros(), shape, common.rank());
            receive_row(launch, args, source, token)?;
            coming &= coming - 1;
        }
        next = batch.next();
    }
    Ok(())
}

/// 32 units of work `(source, token)` of a warp, one a lane. Units are dealt to the warps one by
/// one, sources interleaved, and taken 32 at a time so that the lanes look at 32 presence bits
/// at once.
#[derive(Clone, Copy)]
pub struct Batch {
    first: u64,
    units: u64,
    warps: u32,
}

impl Batch {
    /// The first batch of a warp, if it has any.
    #[inline(always)]
    pub fn first<M: Machine>(machine: &M, shape: &Shape) -> Option<Self> {
        let units = shape.ranks as u64 * shape.max_tokens_per_rank as u64;
        Self {
            first: machine.warp() as u64,
            units,
            warps: machine.warps(),
        }
        .if_any()
    }

    /// The warp's next batch, if there is one.
    #[inline(always)]
    pub fn next(self) -> Option<Self> {
        Self {
            first: self.first + LANES as u64 * self.warps as u64,
            ..self
        }
        .if_any()
    }

    #[inline(always)]
    fn if_any(self) -> Option<Self> {
        (self.first < self.units).then_some(self)
    }

    /// The source and token of a lane's unit. Each rank starts with itself, so that not all read
    /// from the same source at the same time.
    #[inline(always)]
    pub fn unit(&self, lane: u32, shape: &Shape, me: Rank) -> (Rank, u32) {
        let unit = self.index(lane);
        let token = (unit / shape.ranks as u64) as u32;
        let source = (unit as u32 % shape.ranks + me.0) % shape.ranks;
        (Rank(source), token)
    }

    #[inline(always)]
    fn index(&self, lane: u32) -> u64 {
        self.first + lane as u64 * self.warps as u64
    }

    /// Whether the lane's token comes here; `None` while that is not known.
    #[inline(always)]
    pub fn presence<M: Machine>(&self, launch: &Launch<M>, lane: u32) -> Option<bool> {
        let Launch {
            machine,
            common,
            epoch,
            ..
        } = launch;
        if self.index(lane) >= self.units {
            return Some(false);
        }
        let (source, token) = self.unit(lane, &common.shape, common.rank());
        let tokens =
            Tagged(machine.load_signal(common.window.token_count(source))).value(*epoch)?;
        if token >= tokens {
            return Some(false);
        }
        let word = machine.load_signal(common.window.presence(source, token / LANES));
        Some(Tagged(word).value(*epoch)? >> (token % LANES) & 1 != 0)
    }

    #[inline(always)]
    fn awaited<M: Machine>(&self, launch: &Launch<M>, lane: u32) -> Awaited {
        let Launch {
            machine, common, ..
        } = launch;
        let (peer, token) = self.unit(lane, &common.shape, common.rank());
        let index = (token / LANES) as u64;
        let saw = machine.load_signal(common.window.presence(peer, token / LANES)) >> 32;
        Awaited {
            peer,
            region: Region::Presence,
            index,
            saw,
        }
    }
}

/// Waits until every source has said how many tokens it has, and refuses more than planned.
#[inline(always)]
fn wait_for_token_counts<M: Machine>(launch: &Launch<M>) -> Result<(), Stopped> {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let (shape, window) = (&common.shape, &common.window);
    for first in (0..shape.ranks).step_by(LANES as usize) {
        let source = |lane: u32| Rank((first + lane).min(shape.ranks - 1));
        let word = |lane| machine.load_signal(window.token_count(source(lane)));
        let counts = launch.wait_lanes(
            |lane| Tagged(word(lane)).value(*epoch),
            |lane| Awaited {
                peer: source(lane),
                region: Region::Counts,
                index: shape.local_experts() as u64,
                saw: word(lane) >> 32,
            },
        )?;
        let too_many = machine.ballot(machine.lanes(|lane| {
            machine
                .own(counts, lane)
                .is_some_and(|count| count > shape.max_tokens_per_rank)
        }));
        if too_many != 0 {
            machine.lanes(|lane| {
                if lane == too_many.trailing_zeros() {
                    let fault = Fault {
                        peer: source(lane),
                        region: Region::Counts,
                        wanted: shape.max_tokens_per_rank as u64,
                        saw: word(lane) & 0xffff_ffff,
                        ..launch.fault()
                    };
                    launch.record(FaultKind::TooManyTokens, fault);
                }
            });
            return launch.stop();
        }
    }
    Ok(())
}

/// Turns all counts into the first row of every (expert, source) and the user's `row_offsets`.
#[inline(always)]
fn compute_offsets<M: Machine>(launch: &Launch<M>, args: &DispatchArgs) -> Result<(), Stopped> {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let (shape, window) = (&common.shape, &common.window);
    let mut rows = 0u32;
    // In the order of the output: by expert, then source.
    for first in (0..shape.experts).step_by(LANES as usize) {
        let pair = |lane: u32| {
            let index = (first + lane).min(shape.experts - 1);
            (index / shape.ranks, Rank(index % shape.ranks))
        };
        let word = |lane| {
            let (expert, source) = pair(lane);
            machine.load_signal(window.count(source, expert))
        };
        let counts = launch.wait_lanes(
            |lane| Tagged(word(lane)).value(*epoch),
            |lane| {
                let (expert, peer) = pair(lane);
                Awaited {
                    peer,
                    region: Region::Counts,
                    index: expert as u64,
                    saw: word(lane) >> 32,
                }
            },
        )?;
        let counts = machine.lanes(|lane| match machine.own(counts, lane) {
            Some(count) if first + lane < shape.experts => count,
            _ => 0,
        });
        let (before, total) = machine.exclusive_sum(counts);
        machine.lanes(|lane| {
            if first + lane < shape.experts {
                let (expert, source) = pair(lane);
                let base = rows + machine.own(before, lane);
                machine.write(Table::Bases, (first + lane) as u64, base);
                if source == Rank(0) {
                    machine.write(Table::RowOffsets, expert as u64, base);
                    machine.write(Table::ExpertIds, expert as u64, expert);
                }
            }
        });
        rows += total;
    }
    machine.lanes(|lane| {
        if lane == 0 {
            machine.write(Table::RowOffsets, shape.local_experts() as u64, rows);
        }
    });
    if rows as u64 > args.row_capacity {
        machine.lanes(|lane| {
            if lane == 0 {
                let fault = Fault {
                    wanted: args.row_capacity,
                    saw: rows as u64,
                    ..launch.fault()
                };
                launch.record(FaultKind::OutputTooSmall, fault);
            }
        });
        return launch.stop();
    }
    machine.store(Counter::OffsetsReady, epoch.0);
    Ok(())
}

/// Waits for one row and copies it to each of its places in the output.
#[inline(always)]
fn receive_row<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    source: Rank,
    token: u32,
) -> Result<(), Stopped> {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let flag = window.dispatch_flag(source, token);
    launch.wait_lanes(
        |_| slot::is_full(*machine, flag, *epoch).then_some(()),
        |_| Awaited {
            peer: source,
            region: Region::DispatchRow,
            index: token as u64,
            saw: machine.load_signal(flag),
        },
    )?;

    let row = window.dispatch_row(source, token);
    let header = row.plus(shape.payload_bytes());
    let (top_k, first_expert) = (shape.top_k, me.0 * shape.local_experts());
    let positions = machine.lanes(|lane| {
        lane_or_none(lane, top_k, || {
            let expert = machine.read_window(header.word(Header::expert(lane)));
            let local = expert.wrapping_sub(first_expert);
            if local >= shape.local_experts() {
                return NOT_ROUTED;
            }
            let ordinal = machine.read_window(header.word(Header::ordinal(top_k, lane)));
            let base = machine.read(
                Table::Bases,
                local as u64 * shape.ranks as u64 + source.0 as u64,
            );
            base.wrapping_add(ordinal)
        })
    });
    let here = machine.ballot(machine.lanes(|lane| machine.own(positions, lane) != NOT_ROUTED));
    let outside = machine.ballot(machine.lanes(|lane| {
        here >> lane & 1 != 0 && machine.own(positions, lane) as u64 >= args.row_capacity
    }));
    if outside != 0 {
        return refuse_row(
            launch,
            args,
            (source, token),
            positions,
            outside.trailing_zeros(),
        );
    }
    machine.copy_row(
        shape.payload_bytes(),
        Row::Window(me, row),
        here as u64,
        |k| Row::Tensor(Tensor::Output, machine.broadcast(positions, k)),
    );
    machine.lanes(|lane| {
        let position = machine.own(positions, lane);
        if here >> lane & 1 != 0 {
            machine.write(Table::SrcInfo, 2 * position as u64, token);
            machine.write(Table::SrcInfo, 2 * position as u64 + 1, lane);
        }
        if lane < top_k {
            machine.write(
                Table::RowMap,
                row_map_entry(shape, source, token, lane),
                position,
            );
        }
    });
    Ok(())
}

/// Reports a row position that lies outside the outputs.
#[inline(always)]
fn refuse_row<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    (source, token): (Rank, u32),
    positions: M::Lanes<u32>,
    k: u32,
) -> Result<(), Stopped> {
    let saw = launch.machine.broadcast(positions, k) as u64;
    launch.machine.lanes(|lane| {
        if lane == 0 {
            let fault = Fault {
                peer: source,
                region: Region::DispatchRow,
                index: token as u64,
                wanted: args.row_capacity,
                saw,
                ..launch.fault()
            };
            launch.record(FaultKind::RowOutOfBounds, fault);
        }
    });
    launch.stop()
}

/// Index of entry `k` of `source`'s token in the row map.
#[inline(always)]
pub fn row_map_entry(shape: &Shape, source: Rank, token: u32, k: u32) -> u64 {
    let row = source.0 as u64 * shape.max_tokens_per_rank as u64 + token as u64;
    row * shape.top_k as u64 + k as u64
}
