//! Launches that tell the host of counts, repeated as no host enqueues them. What they tell is compared in
//! every suite of drawn cases.

use ferry::layout::Kernel;
use ferry::*;
use ferry_rig::{Case, HALVES, Session, Settings, any_case, drawn, some_keep_rows};
use ferry_tests::damaged::guarded::GuardedGroup;

/// Counts that come after the dispatch was received, or twice before, as a graph of them could be launched:
/// the former are refused, the latter are told again.
#[test]
fn counts_out_of_turn_are_refused() {
    for seed in drawn(64_000..64_040) {
        let case = some_keep_rows(Case {
            counted: None,
            split: u64::MAX,
            ..any_case(seed)
        });
        let group = Group::simulated_with(case.machine()).unwrap();
        // SAFETY: neither group is closed.
        let guarded = unsafe { GuardedGroup::new(&group, 0) }.unwrap();
        let settings = Settings {
            split: true,
            ..case.settings(case.config(), &case.problems())
        };
        let mut session = Session::new(&guarded.group, &settings).unwrap();
        session.upload(0, &case.problem(0)).unwrap();
        session.launch_halves(0..1).unwrap();
        guarded.take_launches();
        for rank in 0..case.ranks {
            let (communicator, stream) = session.local(rank);
            communicator.dispatch_counts(stream).unwrap();
        }
        let counts = guarded.take_launches();
        // SAFETY: the session has all that its launches name.
        unsafe { guarded.repeat(&counts) }.unwrap();
        for rank in 0..case.ranks {
            let told = session.local(rank).0.received().unwrap();
            assert!(told.is_some(), "rank {rank}: {case:?}");
        }
        session.launch_halves(1..2).unwrap();
        session.synchronize().unwrap();
        // SAFETY: as above.
        unsafe { guarded.repeat(&counts) }.unwrap();
        for (rank, outcome) in session.outcomes() {
            let Err(Error::Fault(fault)) = outcome else {
                panic!("rank {rank}: {outcome:?}: {case:?}");
            };
            let found = (fault.kind, fault.kernel, fault.last_launch());
            let last = Some((Kernel::DispatchWait, 1));
            let wanted = (FaultKind::OutOfTurn, Kernel::DispatchCounts, last);
            assert_eq!(found, wanted, "{fault}: {case:?}");
        }
        assert!(session.launch_halves(2..HALVES).is_err(), "{case:?}");
        session.close_after_fault().unwrap();
    }
}
