//! Numbers of warps of a launch that do what, and on which multiprocessors.

use std::collections::BTreeSet;
use std::fmt;

use ferry::layout::Kernel;
use ferry_protocol::tactics::Phase;
use ferry_protocol::tactics::dispatch::notifications;
use ferry_protocol::tactics::roles::{CombineRoles, DispatchRoles, computes_offsets};
use ferry_protocol::{Grid, WarpPosition};

use super::case::{Case, dispatch_kernel};

/// Number of ranges from which on their multiprocessors are counted rather than listed.
const COUNTED_FROM: usize = 4;

/// The warps of a launch that have a role.
#[derive(Clone, Debug)]
pub struct Role {
    name: &'static str,
    /// Name of its items.
    of: &'static str,
    /// Number of the warps.
    pub warps: u32,
    /// Items that they share, at most.
    items: u32,
    /// Blocks of those that have an item.
    busy: Vec<u32>,
    blocks: u32,
}

impl Role {
    /// Collects the warps on `grid` that have an index among those that share so many `items`.
    fn new(
        name: &'static str,
        of: &'static str,
        items: u32,
        grid: Grid,
        index: impl Fn(WarpPosition) -> Option<u32>,
    ) -> Self {
        let all = positions(grid).filter_map(|at| Some((at.block, index(at)?)));
        let all: Vec<_> = all.collect();
        let busy = all.iter().filter(|(_, index)| *index < items);
        Self {
            name,
            of,
            warps: all.len() as u32,
            items,
            busy: busy.map(|(block, _)| *block).collect(),
            blocks: grid.blocks,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            of,
            warps,
            items,
            blocks,
            busy,
        } = self;
        write!(f, "{name:<8} {warps} warps for {items} {of}")?;
        if busy.len() < *warps as usize {
            write!(f, ", so that {} have one", busy.len())?;
        }
        let busy: BTreeSet<u32> = busy.iter().copied().collect();
        let ranges = ranges(&busy);
        match (busy.len(), ranges.len()) {
            (0, _) => Ok(()),
            (all, _) if all == *blocks as usize => write!(f, ", on all {all} SMs"),
            (some, COUNTED_FROM..) => write!(f, ", on {some} of {blocks} SMs"),
            _ => write!(f, ", on SMs {}", ranges.join(", ")),
        }
    }
}

/// Numbers as ranges, in order.
fn ranges(numbers: &BTreeSet<u32>) -> Vec<String> {
    let firsts = numbers.iter().filter(|number| {
        number
            .checked_sub(1)
            .is_none_or(|before| !numbers.contains(&before))
    });
    firsts
        .map(|&first| {
            let last = (first..)
                .take_while(|number| numbers.contains(number))
                .last();
            match last {
                Some(last) if last > first => format!("{first} to {last}"),
                _ => first.to_string(),
            }
        })
        .collect()
}

/// All warps of a launch.
fn positions(grid: Grid) -> impl Iterator<Item = WarpPosition> {
    (0..grid.blocks).flat_map(move |block| {
        (0..grid.in_block).map(move |index| WarpPosition {
            index,
            in_block: grid.in_block,
            block,
            blocks: grid.blocks,
        })
    })
}

/// The roles of a launch that dispatches.
#[derive(Clone, Debug)]
pub struct Dispatchers {
    /// Warps that notify, send and, in a fused launch, receive.
    pub roles: Vec<Role>,
    /// Warps that the items to be sent are shared among.
    pub senders: u32,
    /// The warp that turns counts into offsets, in a fused launch.
    pub offsets: Option<WarpPosition>,
}

/// Works out who does what in a launch that dispatches, in `phase`.
pub fn of_dispatch(case: &Case, phase: Phase) -> Dispatchers {
    let (common, tactics) = (case.common(), case.dispatch(phase));
    let (shape, grid) = (&common.shape, case.grid(dispatch_kernel(phase)));
    let items = common.tokens * tactics.parts;
    let told = notifications(shape, common.tokens, tactics.numbering);
    let of = |at| DispatchRoles::of(tactics, at, items);
    let notify = Role::new("notify", "notifications", told, grid, |at| {
        Some(of(at).notifier?.index)
    });
    let send = Role::new("send", "items", items, grid, |at| {
        Some(of(at).sender?.index)
    });
    let senders = send.warps;
    let (mut roles, mut offsets) = (vec![notify, send], None);
    if phase != Phase::Send {
        let coming = case.extent().items(shape);
        let index = |at| Some(of(at).receiver?.index);
        roles.push(Role::new("receive", "items at most", coming, grid, index));
        let computes = |at: &WarpPosition| {
            let receiver = of(*at).receiver;
            receiver.is_some_and(|receiver| computes_offsets(shape, receiver))
        };
        offsets = positions(grid).find(computes);
    }
    Dispatchers {
        roles,
        senders,
        offsets,
    }
}

/// Works out who does what in a launch of combine: its senders and its reducers.
pub fn of_combine(case: &Case) -> [Role; 2] {
    let (common, tactics) = (case.common(), case.combine());
    let grid = case.grid(Kernel::Combine);
    let coming = case.extent().items(&common.shape);
    let parts = common.tokens * tactics.reduce_parts;
    let of = |at| CombineRoles::of(tactics, at);
    [
        Role::new("send", "items at most", coming, grid, |at| {
            Some(of(at).sender?.index)
        }),
        Role::new("reduce", "parts of tokens", parts, grid, |at| {
            Some(of(at).reducer?.index)
        }),
    ]
}
