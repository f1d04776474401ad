//! Dispatch: the entries, and who does what.

use ferry_layout::{DispatchArgs, Kernel};

use crate::wait::{Launch, Stopped};
use crate::{Machine, receive, send};

/// Sends this rank's tokens and counts; waits for nothing that a peer does. Collective.
#[inline(always)]
pub fn dispatch_async<M: Machine>(machine: &M, args: &DispatchArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::DispatchAsync)?;
    send::send(&launch, args, false)
}

/// Waits for all ranks' tokens and puts them in expert order, with offsets and sources.
/// After `dispatch_async`, in stream order. Collective.
#[inline(always)]
pub fn dispatch_wait<M: Machine>(machine: &M, args: &DispatchArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::DispatchWait)?;
    receive::receive(&launch, args)
}

/// Both in one launch. Collective. All warps must be resident at once: they wait for peers,
/// which wait for all of them.
#[inline(always)]
pub fn dispatch<M: Machine>(machine: &M, args: &DispatchArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::Dispatch)?;
    send::send(&launch, args, true)?;
    receive::receive(&launch, args)
}
