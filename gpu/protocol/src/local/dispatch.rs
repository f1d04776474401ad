//! Dispatch of every token that names an expert of this rank, from the input straight into the outputs.

use ferry_layout::{
    Counter, DispatchArgs, DispatchOptions, Header, Kernel, OVERFLOWED, Table, assignment_index,
};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::launch::read_tokens;
use crate::dispatch::place::padding::Groups;
use crate::dispatch::place::shared::SharedGroup;
use crate::dispatch::send::ids::read_id;
use crate::dispatch::send::route::read_weights;
use crate::local::counting::Ids;
use crate::local::numbering::BlockNumbering;
use crate::local::tables;
use crate::machine::Machine;
use crate::machine::rows::{OutputRow, TokenPart};
use crate::sync::launch::{Aborted, Launch};
use crate::tactics::local::LocalTactics;
use crate::work::item::Item;
use crate::work::lanes::lane_or_none;
use crate::work::partition::Partition;

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
    let dispatch = Dispatch {
        launch,
        args,
        options,
    };
    dispatch.check()?;
    dispatch.end(number_and_place(&dispatch, numbering, ids, first, items))
}

/// Numbers the assignments of this block's tokens, and puts the tokens into their places, this warp's items:
/// `first`, then `items`.
#[inline(always)]
fn number_and_place<M: Machine>(
    dispatch: &Dispatch<M>,
    numbering: BlockNumbering,
    ids: Ids<M>,
    first: [Option<ReadItem<M::Lanes<u32>>>; 2],
    mut items: impl Iterator<Item = ReadItem<M::Lanes<u32>>>,
) -> Result<(), Aborted> {
    let (machine, common) = (dispatch.machine, dispatch.common);
    let position = machine.warp_position();
    if position.warp() == 0 {
        machine.leave(Counter::CombineTickets, 0);
        if dispatch.options.tokens_on_device != 0 {
            dispatch.keep_tokens();
        }
    }
    let [first, mut following] = first;
    let mut current = first.map(|read| route(dispatch, numbering, read));
    let shared = dispatch.shared_group(dispatch.tokens);
    let everywhere = Partition {
        index: position.warp(),
        of: position.warps(),
    };
    shared.write(dispatch, everywhere);
    numbering.count(machine, ids, || {
        // The first item's payload is loaded while the assignments are numbered, and not before the ids.
        load(dispatch, current.and_then(|item| item.part(dispatch)));
    });
    note(dispatch, current);
    machine.block_barrier();
    let is_first = position.index == 0;
    let ends = is_first.then(|| numbering.find_rows(dispatch, shared));
    machine.block_barrier();
    if is_first {
        numbering.number(dispatch);
    }
    machine.block_barrier();
    if let (Some(ends), 0) = (ends, position.block) {
        tables::end(dispatch, shared, ends);
        groups_of(dispatch, numbering, shared).describe();
    }
    while let Some(item) = current {
        current = following.map(|read| route(dispatch, numbering, read));
        note(dispatch, current);
        following = items.next();
        let loads_next = current.and_then(|item| item.part(dispatch));
        place_item(dispatch, numbering, item, loads_next);
    }
    if common.shape.has_tiled_scales() {
        dispatch.wait_for_offsets()?;
        dispatch.clear_unused_scales(shared.groups, everywhere);
    }
    if dispatch.options.groups.writes_padding() {
        dispatch.wait_for_offsets()?;
        groups_of(dispatch, numbering, shared).pad(everywhere);
    }
    Ok(())
}

/// Groups of a launch, whose blocks have all counted the rows.
#[inline(always)]
fn groups_of<'a, M: Machine>(
    dispatch: &'a Dispatch<'a, M>,
    numbering: BlockNumbering,
    shared: SharedGroup,
) -> Groups<'a, M, impl Fn(u32) -> u32> {
    let count = move |expert| numbering.count_of(dispatch.machine, expert);
    Groups {
        dispatch,
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
    fn part<M: Machine>(self, dispatch: &Dispatch<M>) -> Option<TokenPart> {
        let item = self.read.item;
        let (token, range) = (item.token, item.range(dispatch.common.row.payload_bytes));
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
    dispatch: &Dispatch<M>,
    numbering: BlockNumbering,
    read: ReadItem<M::Lanes<u32>>,
) -> RoutedItem<M::Lanes<u32>> {
    let machine = dispatch.machine;
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
fn note<M: Machine>(dispatch: &Dispatch<M>, routed: Option<RoutedItem<M::Lanes<u32>>>) {
    let Some(RoutedItem { read, is_here, .. }) = routed else {
        return;
    };
    let Item { token, part, .. } = read.item;
    if dispatch.common.debug_checks != 0 {
        dispatch.report_duplicates(token, dispatch.options.all_experts, read.given);
    }
    dispatch.report_invalid(token, dispatch.options.all_experts, read.given);
    if is_here && part == 0 {
        keep_weights(dispatch, token, read.weights);
    }
}

/// Begins to load a part, if there is one and it is to be encoded.
#[inline(always)]
fn load<M: Machine>(dispatch: &Dispatch<M>, part: Option<TokenPart>) {
    let is_encoded = dispatch.is_encoded();
    if let (Some(part), false) = (part, is_encoded) {
        dispatch.machine.load_token(part);
    }
}

/// Puts an item into its places, and writes the sources of its rows. Begins to load `next`.
#[inline(always)]
fn place_item<M: Machine>(
    dispatch: &Dispatch<M>,
    numbering: BlockNumbering,
    routed: RoutedItem<M::Lanes<u32>>,
    next: Option<TokenPart>,
) {
    let (machine, common) = (dispatch.machine, dispatch.common);
    let (item, experts) = (routed.read.item, routed.experts);
    let Some(part) = routed.part(dispatch) else {
        return load(dispatch, next);
    };
    let positions = numbering.positions(dispatch, item);
    // Neither other ranks' experts nor rows that do not fit. The experts were read for this warp alone: if
    // the user has changed the ids since, they are others than those of the positions.
    let here = machine.ballot(machine.lanes(|lane| {
        let position = machine.own(positions, lane);
        position < OVERFLOWED && numbering.has_room(dispatch, machine.own(experts, lane), position)
    }));
    let scales = machine.lanes(|lane| {
        let position = machine.own(positions, lane);
        if here >> lane & 1 == 0 {
            return 0;
        }
        debug_assert!(
            (position as u64) < dispatch.args.row_capacity,
            "row {position}"
        );
        if item.part == 0 && dispatch.options.groups.weights == 0 {
            machine.write(Table::SrcInfo, 2 * position as u64, item.token);
            machine.write(Table::SrcInfo, 2 * position as u64 + 1, lane);
        }
        let row = numbering.scales_row(dispatch, machine.own(experts, lane), position);
        common
            .row
            .first_scale_word(common.shape.format(), position, row)
    });
    if item.part == 0 && dispatch.options.groups.describes_rows() {
        dispatch.describe_own_rows(item, positions, here, experts);
    }
    let to = |k| OutputRow {
        row: machine.broadcast(positions, k),
        scales: machine.broadcast(scales, k),
    };
    let format = common.shape.format();
    let stride = dispatch.scale_stride();
    match dispatch.is_encoded() {
        true => dispatch.place_encoded(part, stride, here, to),
        false => machine.write_loaded(format, part, next, stride, here, to),
    }
}

/// Keeps a token's weights, if there are any, where combine always reads them.
#[inline(always)]
fn keep_weights<M: Machine>(dispatch: &Dispatch<M>, token: u32, weights: M::Lanes<u32>) {
    let (machine, common) = (dispatch.machine, dispatch.common);
    let top_k = common.shape.top_k;
    let row = common.window.dispatch_row(common.rank(), token);
    let header = row.plus(common.row.header);
    machine.lanes(|lane| {
        if lane < top_k {
            let bits = match dispatch.args.topk_weights != 0 {
                true => machine.own(weights, lane),
                false => 1f32.to_bits(),
            };
            machine.write_window(header.plus(Header::weight(top_k, lane)), bits);
        }
    });
}
