//! Exact mode: every expert output of a token goes back as it is, into the row of its top-k slot.

use ferry_layout::{CombineArgs, CombineOptions, Tensor};

use crate::combine::received::{read_positions, slots_here};
use crate::combine::work::Work;
use crate::machine::Machine;
use crate::machine::rows::{Put, Row};
use crate::sync::launch::Launch;
use crate::wire::flagged;
use crate::work::item::Item;
use crate::work::route::{for_each_bit, is_p2p};

/// Sends an item back, if it came. `written` is called once its rows, if any, are written.
#[inline(always)]
pub fn send_exact<M: Machine>(
    launch: &Launch<M>,
    args: &CombineArgs,
    options: &CombineOptions,
    work: Work,
    written: impl FnOnce(),
) {
    let Some(item) = work.item else {
        return written();
    };
    let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
    let (window, me) = (&common.window, common.rank());
    let Item { source, token, .. } = item;
    let positions = read_positions(launch, item);
    let here = slots_here(machine, args, positions);
    let range = item.range(common.shape.combine_row_bytes());
    // The shared expert's rows, which stand before the others, are not staged.
    let staging = |position: u32| match options.shared_of {
        0 => window.exact_staging(position),
        _ => {
            let shared = common.row.padded(options.shared(launch.tokens).count);
            let last = common.shape.max_rows() as u32 - 1;
            window.exact_staging(position.wrapping_sub(shared).min(last))
        }
    };
    let on_node = is_p2p(machine, common, source);
    for_each_bit(here, |k| {
        let position = machine.broadcast(positions, k);
        debug_assert!((position as u64) < args.row_capacity, "row {position}");
        let to = match on_node {
            true => Row::Window(source, window.combine_row(token, k)),
            false => Row::Window(me, staging(position)),
        };
        let row = Row::Tensor(Tensor::Expert, position);
        machine.copy_arrived(range, row, 1u32, |_| to);
    });
    written();
    machine.release();
    if on_node {
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
                from: staging(machine.broadcast(positions, k)),
                to: window.combine_row(token, k),
                bytes: common.shape.combine_row_bytes(),
                signal: window.combine_flag(item.flag(), k),
                value: epoch.0,
            });
        });
    }
}
