//! A kernel on a warp.

use ferry_layout::{Args, DispatchWith, Kernel};

use crate::combines::Combines;
use crate::silu;
use crate::warp::Warp;

/// Runs a kernel on a warp, with `combines` if it is a combine.
pub fn run(warp: &Warp<'_>, kernel: Kernel, combines: Combines) {
    // An aborted warp just returns, as on a GPU; the host reads the reason from the fault page.
    let _ = match (&*warp.args, kernel) {
        (Args::Silu(args), _) => {
            silu::run(warp, args);
            Ok(())
        }
        // They would take most of the time that unit tests take to compile.
        _ if cfg!(test) => unreachable!("unit tests launch none of the protocol's kernels"),
        (Args::Dispatch(DispatchWith { args, options }), kernel) => match kernel {
            Kernel::DispatchAsync => ferry_protocol::dispatch_async(warp, args, options),
            Kernel::DispatchWait => ferry_protocol::dispatch_wait(warp, args, options),
            Kernel::LocalDispatch => ferry_protocol::dispatch_local(warp, args, options),
            _ => ferry_protocol::dispatch(warp, args, options),
        },
        (Args::Combine(with), kernel) => combines.run(warp, kernel, with),
        (Args::Counts(args), _) => ferry_protocol::dispatch_counts(warp, args),
        (Args::GiveUp(args), _) => ferry_protocol::give_up(warp, args),
        (Args::Links(args), _) => {
            ferry_protocol::links(warp, args);
            Ok(())
        }
    };
    assert_eq!(warp.loading.take(), None, "what was loaded is written");
    warp.leave_block();
}
