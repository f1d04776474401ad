//! Counts for the host: the numbers of rows that come, as soon as all sources have said them.

use ferry_layout::{DispatchCountsArgs, HostCounts, Kernel, Rank, Region, Table};

use crate::dispatch::receive::counts::{wait_for_experts, wait_for_token_counts};
use crate::machine::{LANES, Machine};
use crate::sync::launch::{Aborted, Awaited, Launch};
use crate::wire::ticket::Ticket;

/// Waits for the counts of all sources, and for the presence of their tokens if rows stay as they came, and
/// writes their sums for the host, last the ticket. Between `dispatch_async` and `dispatch_wait`, in stream
/// order. One block, and of that one warp. Collective only in that it waits for all ranks' dispatches.
#[inline(always)]
pub fn dispatch_counts<M: Machine>(machine: &M, args: &DispatchCountsArgs) -> Result<(), Aborted> {
    let is_counted = args.tokens_on_device != 0;
    let launch = Launch::begin(machine, &args.common, Kernel::DispatchCounts, is_counted);
    launch.require_turn()?;
    if machine.warp() != 0 {
        return Ok(());
    }
    launch.end(tell_counts(&launch, args))
}

/// Writes the counts. One warp.
#[inline(always)]
fn tell_counts<M: Machine>(launch: &Launch<M>, args: &DispatchCountsArgs) -> Result<(), Aborted> {
    let (machine, shape) = (launch.machine, &launch.common.shape);
    wait_for_token_counts(launch)?;
    for first in (0..shape.ranks).step_by(LANES as usize) {
        let rows = match args.keeps_rows {
            0 => wait_for_assignments(launch, first)?,
            _ => wait_for_presence(launch, first)?,
        };
        machine.lanes(|lane| {
            let (source, rows) = (first + lane, machine.own(rows, lane));
            if source < shape.ranks {
                machine.write(
                    Table::HostCounts,
                    HostCounts::source(source),
                    rows.unwrap_or(0),
                );
            }
        });
    }
    for first in (0..shape.local_experts()).step_by(LANES as usize) {
        let rows = wait_for_experts(launch, first)?;
        machine.lanes(|lane| {
            let (expert, rows) = (first + lane, machine.own(rows, lane));
            if expert < shape.local_experts() {
                machine.write(
                    Table::HostCounts,
                    HostCounts::expert(shape, expert),
                    rows.unwrap_or(0),
                );
            }
        });
    }
    machine.lanes(|lane| {
        if lane == 0 {
            machine.write(Table::HostCounts, HostCounts::TOKENS, launch.tokens);
        }
    });
    let ticket = Ticket::release(machine, args.ticket);
    machine.lanes(|lane| {
        if lane == 0 {
            ticket.tell(machine);
        }
    });
    Ok(())
}

/// Waits for the number of rows of 32 sources from `first` on, if rows stay as they came: of tokens that come
/// to this rank. The last source again for lanes after it.
#[inline(always)]
fn wait_for_presence<M: Machine>(
    launch: &Launch<M>,
    first: u32,
) -> Result<M::Lanes<Option<u32>>, Aborted> {
    let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
    let window = &common.window;
    let source = |lane: u32| Rank((first + lane).min(common.shape.ranks - 1));
    launch.wait_lanes(
        |lane| {
            let source = source(lane);
            let tokens = machine.load_tagged(window.token_count(source));
            let words = tokens.value(epoch)?.div_ceil(LANES);
            let (mut rows, mut word) = (0, 0);
            while word < words {
                let bits = machine.load_tagged(window.presence(source, word));
                rows += bits.value(epoch)?.count_ones();
                word += 1;
            }
            Some(rows)
        },
        |lane| Awaited {
            peer: source(lane),
            region: Region::Presence,
            index: 0,
            saw: machine.load_tagged(window.presence(source(lane), 0)).0 >> 32,
        },
    )
}

/// Waits for the number of assignments of 32 sources from `first` on to all experts of this rank. The last
/// source again for lanes after it.
#[inline(always)]
fn wait_for_assignments<M: Machine>(
    launch: &Launch<M>,
    first: u32,
) -> Result<M::Lanes<Option<u32>>, Aborted> {
    let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
    let source = |lane: u32| Rank((first + lane).min(common.shape.ranks - 1));
    let word = |lane, expert| machine.load_tagged(common.window.count(source(lane), expert));
    launch.wait_lanes(
        |lane| {
            let (mut rows, mut expert) = (0u32, 0);
            while expert < common.shape.local_experts() {
                rows = rows.wrapping_add(word(lane, expert).value(epoch)?);
                expert += 1;
            }
            Some(rows)
        },
        |lane| Awaited {
            peer: source(lane),
            region: Region::Counts,
            index: 0,
            saw: word(lane, 0).0 >> 32,
        },
    )
}
