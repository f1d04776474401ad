//! Dispatch of every token that names an expert of this rank, from the input straight into the outputs.

use ferry_layout::{
    Counter, DispatchArgs, DispatchOptions, Header, Kernel, OVERFLOWED, Table, assignment_index,
};

use crate::dispatch::entries;
use crate::dispatch::ids::read_id;
use crate::dispatch::offsets::wait_for_offsets;
use crate::dispatch::padding::Groups;
use crate::dispatch::route::{read_weights, report_duplicates, report_invalid};
use crate::dispatch::shared::SharedGroup;
use crate::dispatch::{keep_tokens, read_tokens};
use crate::dispatch::{pass_through, scales};
use crate::local::counting::Ids;
use crate::local::numbering::BlockNumbering;
use crate::local::tables;
use crate::machine::Machine;
use crate::machine::rows::{OutputRow, TokenPart};
use crate::sync::launch::{Aborted, Launch};
use crate::tactics::local::LocalTactics;
use crate::work::item::Item;
use crate::work::partition::Partition;
use crate::work::ranks::lane_or_none;

/// Puts this rank's tokens, which all ranks have, in the order of this rank's experts, with offsets and
/// sources. Waits for no other rank.
#[inline(always)]
pub fn dispatch_local<M: Machine>(
    machine: &M,
    args: &DispatchArgs,
    options: &DispatchOptions,
) -> Result<(), Aborted> {
    let common = &args.common;
    let loading = machine.begin();
    let mut tokens = common.tokens;
    if options.tokens_on_device != 0 {
        tokens = tokens.min(read_tokens(machine));
    }
    let tactics = LocalTactics::decide(common, tokens, machine.warp_position());
    let numbering = BlockNumbering::of(args, options, tokens, tactics);
    // The first ids to be counted, and the tables' entries for the first items, arrive while the block is set
    // up.
    let ids = numbering.load_first_ids(machine);
    let items = tactics.items(common.rank());
    let mut items = items.map(|item| read_item(machine, args, numbering.is_wide, item));
    let first = [items.next(), items.next()];
    machine.clear_block();
    numbering.clear(machine);
    let launch = Launch {
        wide_ids: numbering.is_wide,
        ..Launch::begun(machine, common, Kernel::LocalDispatch, tokens, loading)
    };
    launch.check()?;
    launch.end(number_and_place(
        &launch, args, options, numbering, ids, first, items,
    ))
}

/// Numbers the assignments of this block's tokens, and puts the tokens into their places, this warp's items:
/// `first`, then `items`.
#[inline(always)]
fn number_and_place<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    options: &DispatchOptions,
    numbering: BlockNumbering,
    ids: Ids<M>,
    first: [Option<ReadItem<M::Lanes<u32>>>; 2],
    mut items: impl Iterator<Item = ReadItem<M::Lanes<u32>>>,
) -> Result<(), Aborted> {
    let (machine, common) = (launch.machine, launch.common);
    let position = machine.warp_position();
    if position.warp() == 0 {
        machine.leave(Counter::CombineTickets, 0);
        if options.tokens_on_device != 0 {
            keep_tokens(launch);
        }
    }
    let [first, mut following] = first;
    let mut current = first.map(|read| route(launch, numbering, read));
    let shared = SharedGroup::of(common, options, launch.tokens);
    let everywhere = Partition {
        index: position.warp(),
        of: position.warps(),
    };
    shared.write(launch, args, options, everywhere);
    numbering.count(machine, ids, || {
        // The first item's payload is loaded while the assignments are numbered, and not before the ids.
        load(launch, options, current.and_then(|item| item.part(launch)));
    });
    note(launch, args, options, current);
    machine.block_barrier();
    let is_first = position.index == 0;
    let ends = is_first.then(|| numbering.find_rows(launch, shared));
    machine.block_barrier();
    if is_first {
        numbering.number(launch, args);
    }
    machine.block_barrier();
    if let (Some(ends), 0) = (ends, position.block) {
        tables::end(launch, args, shared, ends);
        groups_of(launch, args, options, numbering, shared).describe();
    }
    while let Some(item) = current {
        current = following.map(|read| route(launch, numbering, read));
        note(launch, args, options, current);
        following = items.next();
        let loads_next = current.and_then(|item| item.part(launch));
        place_item(launch, args, options, numbering, item, loads_next);
    }
    if common.shape.has_tiled_scales() {
        wait_for_offsets(launch)?;
        scales::clear_unused(launch, args, shared.groups, everywhere);
    }
    if options.groups.writes_padding() {
        wait_for_offsets(launch)?;
        groups_of(launch, args, options, numbering, shared).pad(everywhere);
    }
    Ok(())
}

/// Groups of a launch, whose blocks have all counted the rows.
#[inline(always)]
fn groups_of<'a, M: Machine>(
    launch: &'a Launch<'a, M>,
    args: &'a DispatchArgs,
    options: &'a DispatchOptions,
    numbering: BlockNumbering,
    shared: SharedGroup,
) -> Groups<'a, M, impl Fn(u32) -> u32> {
    let count = move |expert| numbering.count_of(launch.machine, expert);
    Groups {
        launch,
        args,
        options,
        shared,
        count,
    }
}

/// An item, with the entries of the user's tables for its token, being loaded. `L`: one value a lane.
#[derive(Clone, Copy)]
struct ReadItem<L> {
    item: Item,
    /// The token's experts, with the user's ids.
    given: L,
    /// The router's weights for them, as f32 bits, if the user passed any.
    weights: L,
}

/// An item with its experts. `L`: one value a lane.
#[derive(Clone, Copy)]
struct RoutedItem<L> {
    read: ReadItem<L>,
    /// The token's experts, counted from this rank's first one.
    experts: L,
    /// Whether any of them is this rank's: otherwise nothing of the token is loaded.
    is_here: bool,
}

impl<L> RoutedItem<L> {
    /// Part of the payload that is loaded, if any.
    #[inline(always)]
    fn part<M: Machine>(self, launch: &Launch<M>) -> Option<TokenPart> {
        let item = self.read.item;
        let (token, range) = (item.token, item.range(launch.common.row.payload_bytes));
        self.is_here.then_some(TokenPart { token, range })
    }
}

/// Loads the entries of the user's tables for an item's token.
#[inline(always)]
fn read_item<M: Machine>(
    machine: &M,
    args: &DispatchArgs,
    is_wide: bool,
    item: Item,
) -> ReadItem<M::Lanes<u32>> {
    let top_k = args.common.shape.top_k;
    let given = machine.lanes(|lane| {
        lane_or_none(lane, top_k, || {
            read_id(machine, is_wide, assignment_index(top_k, item.token, lane))
        })
    });
    ReadItem {
        item,
        given,
        weights: read_weights(machine, args, item.token),
    }
}

/// Finds the experts of this rank to which an item's token goes.
#[inline(always)]
fn route<M: Machine>(
    launch: &Launch<M>,
    numbering: BlockNumbering,
    read: ReadItem<M::Lanes<u32>>,
) -> RoutedItem<M::Lanes<u32>> {
    let machine = launch.machine;
    let experts = machine.lanes(|lane| numbering.local(machine.own(read.given, lane)));
    let is_local = machine.lanes(|lane| machine.own(experts, lane) < numbering.experts);
    RoutedItem {
        read,
        experts,
        is_here: machine.ballot(is_local) != 0,
    }
}

/// Keeps the weights of an item's token, if there is one. Reports ids that do not exist, and with
/// `debug_checks` those that a token lists twice.
#[inline(always)]
fn note<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    options: &DispatchOptions,
    routed: Option<RoutedItem<M::Lanes<u32>>>,
) {
    let Some(RoutedItem { read, is_here, .. }) = routed else {
        return;
    };
    let Item { token, part, .. } = read.item;
    if launch.common.debug_checks != 0 {
        report_duplicates(launch, token, options.all_experts, read.given);
    }
    report_invalid(launch, token, options.all_experts, read.given);
    if is_here && part == 0 {
        keep_weights(launch, args, token, read.weights);
    }
}

/// Begins to load a part, if there is one and it is to be encoded.
#[inline(always)]
fn load<M: Machine>(launch: &Launch<M>, options: &DispatchOptions, part: Option<TokenPart>) {
    let is_encoded = pass_through::is_encoded(launch.common.shape.format(), options);
    if let (Some(part), false) = (part, is_encoded) {
        launch.machine.load_token(part);
    }
}

/// Puts an item into its places, and writes the sources of its rows. Begins to load `next`.
#[inline(always)]
fn place_item<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    options: &DispatchOptions,
    numbering: BlockNumbering,
    routed: RoutedItem<M::Lanes<u32>>,
    next: Option<TokenPart>,
) {
    let (machine, common) = (launch.machine, launch.common);
    let (item, experts) = (routed.read.item, routed.experts);
    let Some(part) = routed.part(launch) else {
        return load(launch, options, next);
    };
    let positions = numbering.positions(launch, item);
    // Neither other ranks' experts nor rows that do not fit. The experts were read for this warp alone: if
    // the user has changed the ids since, they are others than those of the positions.
    let here = machine.ballot(machine.lanes(|lane| {
        let position = machine.own(positions, lane);
        position < OVERFLOWED
            && numbering.has_room(launch, args, machine.own(experts, lane), position)
    }));
    let scales = machine.lanes(|lane| {
        let position = machine.own(positions, lane);
        if here >> lane & 1 == 0 {
            return 0;
        }
        debug_assert!((position as u64) < args.row_capacity, "row {position}");
        if item.part == 0 && options.groups.weights == 0 {
            machine.write(Table::SrcInfo, 2 * position as u64, item.token);
            machine.write(Table::SrcInfo, 2 * position as u64 + 1, lane);
        }
        let row = numbering.scales_row(launch, machine.own(experts, lane), position);
        common
            .row
            .first_scale_word(common.shape.format(), position, row)
    });
    if item.part == 0 && options.groups.describes_rows() {
        entries::describe_rows(launch, options, item, positions, here, experts);
    }
    let to = |k| OutputRow {
        row: machine.broadcast(positions, k),
        scales: machine.broadcast(scales, k),
    };
    let format = common.shape.format();
    let stride = scales::stride(machine, &common.shape, args, options);
    match pass_through::is_encoded(format, options) {
        true => pass_through::place(launch, &options.encoded, part, stride, here, to),
        false => machine.write_loaded(format, part, next, stride, here, to),
    }
}

/// Keeps a token's weights, if there are any, where combine always reads them.
#[inline(always)]
fn keep_weights<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    token: u32,
    weights: M::Lanes<u32>,
) {
    let (machine, common) = (launch.machine, launch.common);
    let top_k = common.shape.top_k;
    let row = common.window.dispatch_row(common.rank(), token);
    let header = row.plus(common.row.header);
    machine.lanes(|lane| {
        if lane < top_k {
            let bits = match args.topk_weights != 0 {
                true => machine.own(weights, lane),
                false => 1f32.to_bits(),
            };
            machine.write_window(header.plus(Header::weight(top_k, lane)), bits);
        }
    });
}
