//! Order of the launches of a round.

use ferry_layout::{Epoch, Kernel, LastLaunch};

const ROUND: [Kernel; 7] = [
    Kernel::DispatchAsync,
    Kernel::DispatchWait,
    Kernel::Dispatch,
    Kernel::CombineAsync,
    Kernel::CombineWait,
    Kernel::Combine,
    Kernel::GiveUp,
];

/// Kernels that may follow the last launch, with whether they are of its round or of the next.
fn next(last: Option<Kernel>) -> &'static [(Kernel, bool)] {
    use Kernel::*;
    match last {
        None | Some(Combine | CombineWait | GiveUp) => &[(Dispatch, false), (DispatchAsync, false)],
        Some(DispatchAsync) => &[(DispatchWait, true), (DispatchCounts, true)],
        Some(Dispatch | DispatchWait) => &[(Combine, true), (CombineAsync, true), (GiveUp, true)],
        Some(CombineAsync) => &[(CombineWait, true)],
        Some(other) => panic!("{other:?} has no place in a round"),
    }
}

#[test]
fn a_launch_follows_in_the_order_of_a_round_alone() {
    for round in [1, 2, 0xffff_ffff, 0x1_0000_0001] {
        for last in ROUND {
            let word = LastLaunch::of(Epoch(round), last);
            assert_eq!((word.epoch(), word.kernel()), (round, last as u64));
            // Its round is finished, so the device works in the next.
            let is_over = matches!(last, Kernel::Combine | Kernel::CombineWait | Kernel::GiveUp);
            let epoch = if is_over {
                Epoch::after(round)
            } else {
                Epoch(round)
            };
            for kernel in ROUND.into_iter().chain([Kernel::DispatchCounts]) {
                let wanted = next(Some(last)).contains(&(kernel, !is_over));
                assert_eq!(word.precedes(epoch, kernel), wanted, "{last:?}, {kernel:?}");
            }
        }
    }
    for kernel in ROUND {
        let wanted = next(None).contains(&(kernel, false));
        assert_eq!(
            LastLaunch(0).precedes(Epoch(1), kernel),
            wanted,
            "{kernel:?}"
        );
    }
}
