//! Entries of rows by expert in the tables that the user asks for.

use ferry_layout::{DispatchArgs, DispatchOptions, Header, Table};

use crate::dispatch::batch::Batch;
use crate::machine::Machine;
use crate::sync::launch::Launch;
use crate::work::item::Item;

/// This rank's number in the group: with `skip_a2a`, a launch knows itself as rank 0.
#[inline(always)]
pub fn own_number<M: Machine>(launch: &Launch<M>, options: &DispatchOptions) -> u32 {
    match options.all_experts {
        0 => launch.common.rank().0,
        _ => options.shared_index,
    }
}

/// Writes the entries of the rows of all of a warp's items that came, from `batch` on: after the rows, as
/// their positions and headers would occupy registers meanwhile.
#[inline(always)]
pub fn describe_received<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    options: &DispatchOptions,
    mut batch: Batch,
) {
    let (machine, common) = (launch.machine, launch.common);
    let shape = &common.shape;
    let first_expert = common.rank().0 * shape.local_experts();
    // Each lane reads words that other lanes wrote.
    machine.converge();
    while batch.is_some() {
        let item = |lane, parts| batch.item(lane, parts, shape, common.rank());
        // They have arrived, and the first part of a row describes it.
        let parts = machine.lanes(|lane| batch.present(launch, lane).unwrap_or(0));
        let described = machine.lanes(|lane| {
            let parts = machine.own(parts, lane);
            parts != 0 && item(lane, parts).part == 0
        });
        for slot in 0..shape.top_k {
            machine.lanes(|lane| {
                if !machine.own(described, lane) {
                    return;
                }
                let Item { source, token, .. } = item(lane, 1);
                let index = shape.row_map_index(source, token, slot);
                let header = common.window.dispatch_row(source, token);
                let header = header.plus(common.row.header);
                // All are loaded before any is used.
                let position = machine.read(Table::RowMap, index) as u64;
                let word = machine.read_window(header.plus(Header::assignment(slot)));
                let weight = machine.read_window(header.plus(Header::weight(shape.top_k, slot)));
                // Neither other ranks' experts nor rows that do not fit.
                if position < args.row_capacity {
                    let expert = shape.assignment_words().decode(word).expert;
                    let group = expert.wrapping_sub(first_expert);
                    let group = group.wrapping_add(options.has_shared_expert() as u32);
                    let source = [source.0, token, slot];
                    write_entries(launch, options, position, group, weight, source);
                }
            });
        }
        batch = batch.next();
    }
}

/// Writes the entries of the rows `positions` of a token that has not travelled, one a top-k slot, for the
/// slots `here`. `experts`: of each slot, counted from this rank's first. Its weights are in the own window.
#[inline(always)]
pub fn describe_rows<M: Machine>(
    launch: &Launch<M>,
    options: &DispatchOptions,
    item: Item,
    positions: M::Lanes<u32>,
    here: u32,
    experts: M::Lanes<u32>,
) {
    let (machine, common) = (launch.machine, launch.common);
    let row = common.window.dispatch_row(item.source, item.token);
    let header = row.plus(common.row.header);
    machine.lanes(|lane| {
        if here >> lane & 1 != 0 {
            let weight = Header::weight(common.shape.top_k, lane);
            let weight = machine.read_window(header.plus(weight));
            let group = machine.own(experts, lane) + options.has_shared_expert() as u32;
            let position = machine.own(positions, lane) as u64;
            let source = [options.shared_index, item.token, lane];
            write_entries(launch, options, position, group, weight, source);
        }
    });
}

/// Writes a row's entries of the tables that there are. For one lane.
#[inline(always)]
pub fn write_entries<M: Machine>(
    launch: &Launch<M>,
    options: &DispatchOptions,
    row: u64,
    group: u32,
    weight: u32,
    [source, token, slot]: [u32; 3],
) {
    let (machine, tables) = (launch.machine, &options.groups);
    if tables.m_indices != 0 {
        machine.write(Table::GroupsOfRows, row, group);
    }
    if tables.weights != 0 {
        machine.write(Table::WeightsOfRows, row, weight);
        machine.write(Table::SrcInfo, 3 * row, source);
        machine.write(Table::SrcInfo, 3 * row + 1, token);
        machine.write(Table::SrcInfo, 3 * row + 2, slot);
    }
}
