//! How many warps of a launch do what, and on which multiprocessors.

use std::collections::BTreeSet;
use std::fmt;

use ferry::layout::Kernel;
use ferry_protocol::tactics::Phase;
use ferry_protocol::tactics::dispatch::notifications;
use ferry_protocol::tactics::roles::{CombineRoles, DispatchRoles, computes_offsets};
use ferry_protocol::{Grid, WarpPosition};

use super::case::{Case, dispatch_kernel};

/// More ranges of multiprocessors than these are only counted.
const MOST_RANGES: usize = 4;

/// The warps of a launch that have a role.
#[derive(Clone, Debug)]
pub struct Role {
    /// What they do.
    pub name: &'static str,
    /// What an item of theirs is.
    of: &'static str,
    /// How many there are.
    pub warps: u32,
    /// Items that they share, at most.
    items: u32,
    /// Blocks of those that have an item.
    busy: Vec<u32>,
    blocks: u32,
}

/// A warp that has a role.
struct Member {
    block: u32,
    index: u32,
}

impl Role {
    /// Of the warps of a launch of so many `blocks`.
    fn new(name: &'static str, of: &'static str, items: u32, blocks: u32) -> Self {
        Self {
            name,
            of,
            warps: 0,
            items,
            busy: Vec::new(),
            blocks,
        }
    }

    fn add(&mut self, member: Member) {
        self.warps += 1;
        if member.index < self.items {
            self.busy.push(member.block);
        }
    }

    /// Warps that have an item.
    pub fn busy(&self) -> usize {
        self.busy.len()
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
            ..
        } = self;
        write!(f, "{name:<8} {warps} warps for {items} {of}")?;
        if self.busy() < *warps as usize {
            write!(f, ", so that {} have one", self.busy())?;
        }
        let busy: BTreeSet<u32> = self.busy.iter().copied().collect();
        let ranges = ranges(&busy);
        match (busy.len(), ranges.len()) {
            (0, _) => Ok(()),
            (all, _) if all == *blocks as usize => write!(f, ", on all {all} SMs"),
            (some, MOST_RANGES..) => write!(f, ", on {some} of {blocks} SMs"),
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

/// Who does what in a launch that dispatches, in `phase`.
pub fn of_dispatch(case: &Case, phase: Phase) -> Dispatchers {
    let (common, tactics) = (case.common(), case.dispatch(phase));
    let (shape, grid) = (&common.shape, case.grid(dispatch_kernel(phase)));
    let items = common.tokens * tactics.parts;
    let told = notifications(shape, common.tokens, tactics.numbering);
    let coming = case.extent().items(shape);
    let mut notify = Role::new("notify", "notifications", told, grid.blocks);
    let mut send = Role::new("send", "items", items, grid.blocks);
    let mut receive = Role::new("receive", "items at most", coming, grid.blocks);
    let mut offsets = None;
    for position in positions(grid) {
        let roles = DispatchRoles::of(tactics, position, items);
        let member = |index| Member {
            block: position.block,
            index,
        };
        if let Some(partition) = roles.notifier {
            notify.add(member(partition.index));
        }
        if let Some(partition) = roles.sender {
            send.add(member(partition.index));
        }
        if let Some(partition) = roles.receiver {
            receive.add(member(partition.index));
            if computes_offsets(shape, partition) {
                offsets = Some(position);
            }
        }
    }
    let senders = send.warps;
    match phase {
        Phase::Send => Dispatchers {
            roles: vec![notify, send],
            senders,
            offsets: None,
        },
        _ => Dispatchers {
            roles: vec![notify, send, receive],
            senders,
            offsets,
        },
    }
}

/// Who does what in a launch of combine: its senders and its reducers.
pub fn of_combine(case: &Case) -> [Role; 2] {
    let (common, tactics) = (case.common(), case.combine());
    let grid = case.grid(Kernel::Combine);
    let coming = case.extent().items(&common.shape);
    let parts = common.tokens * tactics.reduce_parts;
    let mut send = Role::new("send", "items at most", coming, grid.blocks);
    let mut reduce = Role::new("reduce", "parts of tokens", parts, grid.blocks);
    for position in positions(grid) {
        let roles = CombineRoles::of(tactics, position);
        let member = |index| Member {
            block: position.block,
            index,
        };
        if let Some(partition) = roles.sender {
            send.add(member(partition.index));
        }
        if let Some(partition) = roles.reducer {
            reduce.add(member(partition.index));
        }
    }
    [send, reduce]
}
