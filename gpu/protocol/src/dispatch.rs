//! Dispatch: the entries, and which warp does what.

use ferry_layout::{Counter, DispatchArgs, Kernel, TokenFormat};

use crate::Machine;
use crate::announce::{announce, is_few, tasks};
use crate::receive::receive;
use crate::send::send_units;
use crate::share::Share;
use crate::wait::{Launch, Stopped};

/// From so many whole rows on, some warps send and do nothing else, also where there are more warps
/// than rows: the first rows are in their places before the last ones leave. Found by measuring
/// (BENCHMARKS.md).
const MANY_ROWS: u32 = 512;

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
        TokenFormat::Bf16 => warps * 3 / 8,
        _ => warps / 2,
    }
}

/// Sends this rank's tokens and counts; waits for nothing that a peer does. Collective.
#[inline(always)]
pub fn dispatch_async<M: Machine>(machine: &M, args: &DispatchArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::DispatchAsync);
    launch.check()?;
    Roles::of(&launch, args, false).send(&launch, args)
}

/// Waits for all ranks' tokens and puts them in expert order, with offsets and sources.
/// After `dispatch_async`, in stream order. Collective.
#[inline(always)]
pub fn dispatch_wait<M: Machine>(machine: &M, args: &DispatchArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::DispatchWait);
    launch.check()?;
    let share = Share {
        index: machine.warp(),
        of: machine.warps(),
    };
    receive(&launch, args, share)
}

/// Both in one launch. Collective. All warps must be resident at once: they wait for peers,
/// which wait for all of them.
#[inline(always)]
pub fn dispatch<M: Machine>(machine: &M, args: &DispatchArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::Dispatch);
    launch.check()?;
    let roles = Roles::of(&launch, args, true);
    roles.send(&launch, args)?;
    match roles.receiver {
        Some(share) => receive(&launch, args, share),
        None => Ok(()),
    }
}

/// What a warp does in a launch that sends: the first ones announce, the next ones send, and all
/// receive but those that send much.
struct Roles {
    announcer: Option<Share>,
    sender: Option<Share>,
    receiver: Option<Share>,
}

impl Roles {
    /// `receives`: the launch goes on to receive.
    #[inline(always)]
    fn of<M: Machine>(launch: &Launch<M>, args: &DispatchArgs, receives: bool) -> Self {
        let machine = launch.machine;
        let (warp, warps, blocks) = (machine.warp(), machine.warps(), machine.blocks());
        let shape = &launch.common.shape;
        let tasks = tasks(shape, args.tokens);
        let announcers = tasks.min(warps / 2).max(1);
        // A launch of a single warp announces first and sends then.
        let others = if warps == 1 { 1 } else { warps - announcers };
        let parts = shape.parts(args.tokens);
        let units = args.tokens * parts;
        let is_many = units > others || parts == 1 && units >= MANY_ROWS;
        let is_crowded = receives && is_many && others > 1;
        let (enough, spared) = (
            enough_senders(shape.format()),
            spared_senders(shape.format(), warps),
        );
        let senders = match is_crowded {
            true => enough.min(spared).min(units / 2).clamp(1, others - 1),
            false => others,
        };
        // Loads queue behind their multiprocessor's stores to peers: where there are enough of them,
        // some have only senders, others none. Few entries are counted by the first warps of all.
        let is_apart = is_crowded && enough <= spared && !is_few(shape, args.tokens);
        let warp = match is_apart {
            true => warp % blocks * (warps / blocks) + warp / blocks,
            false => warp,
        };
        let first_sender = warps - others;
        let share = |first: u32, of: u32| {
            let index = warp.wrapping_sub(first);
            (index < of).then_some(Share { index, of })
        };
        let sender = share(first_sender, senders);
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
            announce(launch, args, share)?;
        }
        match self.sender {
            Some(share) => send_units(launch, args, share),
            None => Ok(()),
        }
    }
}
