//! Dispatch: the entries, and which warp does what.

use ferry_layout::{Counter, DispatchArgs, Kernel, TokenFormat};

use crate::Machine;
use crate::announce::{announce, tasks};
use crate::receive::receive;
use crate::send::send_units;
use crate::share::Share;
use crate::wait::{Launch, Stopped};

/// From so many whole rows on, some warps send and do nothing else, also where there are more warps
/// than rows: the first rows are in their places before the last ones leave. Found by measuring
/// (BENCHMARKS.md).
const MANY_ROWS: u32 = 512;

/// Warps that send and do nothing else, of `warps` for `units`: so many fill the wire, and the others
/// put rows in their places meanwhile. Of a few warps, a larger share is needed. Encoding takes more
/// warps than copying. Found by measuring (BENCHMARKS.md).
#[inline(always)]
fn senders(format: TokenFormat, units: u32, warps: u32) -> u32 {
    let (enough, share_of_32) = match format {
        TokenFormat::Bf16 => (264, 12),
        TokenFormat::Mxfp4(_) => (1056, 16),
        _ => (924, 16),
    };
    (warps * share_of_32 / 32).min(enough).min(units / 2)
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
        let (warp, warps) = (launch.machine.warp(), launch.machine.warps());
        let shape = &launch.common.shape;
        let tasks = tasks(shape, args.tokens);
        let announcers = tasks.min(warps / 2).max(1);
        // A launch of a single warp announces first and sends then.
        let others = if warps == 1 { 1 } else { warps - announcers };
        let parts = shape.parts(args.tokens);
        let units = args.tokens * parts;
        let is_many = units > others || parts == 1 && units >= MANY_ROWS;
        let is_crowded = receives && is_many && others > 1;
        let senders = match is_crowded {
            true => senders(shape.format(), units, warps).clamp(1, others - 1),
            false => others,
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
