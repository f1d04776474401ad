//! Combine on the experts' rank where there are many rows for few warps: a warp sends several back together.

use ferry_layout::{ABSENT, CombineArgs, Header, NOT_ROUTED, Table, Tensor};

use crate::groups::Groups;
use crate::places::row_map_entry;
use crate::route::{ranks_of, reduced_slot};
use crate::send_back::slots_here;
use crate::units::{Extent, Unit};
use crate::wait::Launch;
use crate::{Machine, Row, Span, slot};

/// Sends a group of units from unit `first` on back, which are whole and near, those of them that have come here:
/// what dispatch has brought is read for all of them at once, and all are released at once.
#[inline(always)]
pub fn send_group_back<M: Machine>(
    launch: &Launch<M>,
    args: &CombineArgs,
    (extent, first): (Extent, u32),
    written: impl FnOnce(),
) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let groups = Groups::of(shape);
    let index_of = |lane| first + groups.unit(lane);
    let unit_of = |lane| extent.unit(shape, me, (index_of(lane), 1));
    let present = machine.lanes(|lane| extent.presence(launch, index_of(lane)));
    // The last lanes read of an entry again rather than branch.
    let slot_of = |lane| groups.slot(lane).min(shape.top_k - 1);
    let read = |word: u32, lane| {
        let Unit { source, token, .. } = unit_of(lane);
        let header = window.dispatch_row(source, token).plus(common.row.header);
        machine.read_window(header.plus(word))
    };
    let positions = machine.lanes(|lane| {
        let Unit { source, token, .. } = unit_of(lane);
        machine.read(
            Table::RowMap,
            row_map_entry(shape, source, token, slot_of(lane)),
        )
    });
    let words = machine.lanes(|lane| read(Header::entry(slot_of(lane)), lane));
    let weights = machine.lanes(|lane| read(Header::weight(shape.top_k, slot_of(lane)), lane));
    // Who has an entry, of those units that have come.
    let coming = machine.ballot(machine.lanes(|lane| {
        let is_here = machine.own(present, lane).is_some_and(|parts| parts != 0);
        is_here && groups.slot(lane) < shape.top_k
    }));
    let here = coming & slots_here(*machine, args, positions);
    let slots = slots_of(launch, groups, (words, coming));
    let mut unit = 0;
    while unit < groups.most() {
        let lane = groups.first(unit);
        let slot = machine.broadcast(slots, lane);
        let Unit { source, token, .. } = unit_of(lane);
        let from = |lane| {
            let weight = f32::from_bits(machine.broadcast(weights, lane));
            let row = machine.broadcast(positions, lane);
            (Row::Tensor(Tensor::Expert, row), weight)
        };
        if slot != ABSENT {
            let to = window.combine_row(token, slot);
            let span = Span::part(shape.combine_row_bytes(), 0, 1);
            machine.sum_rows(
                span,
                here & groups.lanes(unit),
                from,
                Row::Window(source, to),
            );
        }
        unit += 1;
    }
    written();
    machine.release();
    machine.lanes(|lane| {
        if groups.slot(lane) == 0 && machine.own(slots, lane) != ABSENT {
            let unit = unit_of(lane);
            let flag = window.combine_flag(unit.flag(), machine.own(slots, lane));
            slot::publish(*machine, unit.source, flag, *epoch);
        }
    });
}

/// The slot that each unit's row has at its source, on the unit's lanes; [`ABSENT`] if the unit has not come. `coming`:
/// the lanes whose words are entries.
#[inline(always)]
fn slots_of<M: Machine>(
    launch: &Launch<M>,
    groups: Groups,
    (words, coming): (M::Lanes<u32>, u32),
) -> M::Lanes<u32> {
    let Launch {
        machine, common, ..
    } = launch;
    let shape = &common.shape;
    let mut slots = machine.lanes(|_| ABSENT);
    let mut unit = 0;
    while unit < groups.most() {
        let experts = machine.lanes(|lane| {
            let entry = shape.entries().entry(machine.own(words, lane));
            match (coming & groups.lanes(unit)) >> lane & 1 != 0 {
                true => entry.expert,
                false => NOT_ROUTED,
            }
        });
        let slot = reduced_slot(
            &common.window,
            ranks_of(*machine, shape, experts),
            common.rank(),
        );
        let has_come = coming & groups.lanes(unit) != 0;
        slots = machine.lanes(|lane| match has_come && groups.unit(lane) == unit {
            true => slot,
            false => machine.own(slots, lane),
        });
        unit += 1;
    }
    slots
}
