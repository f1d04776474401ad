//! Reactions of simulated ranks to a peer that does not come: a fault that says so, results that are right
//! wherever there are any, and an end.

use std::collections::BTreeMap;
use std::ops::Range;

use ferry::layout::{Kernel, Region};
use ferry::simulator::{Lost, Stalled};
use ferry::*;
use ferry_rig::verify::Received;
use ferry_rig::*;

use crate::bad_inputs::{any_slot, run_with_id};

/// A case with a rank that dies somewhere on the way.
fn lost_case(seed: u64) -> Case {
    losing(any_case(seed), seed)
}

/// The same with a rank that dies somewhere on the way.
fn losing(case: Case, seed: u64) -> Case {
    let mut dice = Dice::new(!seed);
    let rank = dice.below(case.ranks) as u32;
    let steps = dice.pick(&[10, 100, 400, 1_500, 4_000]);
    let after_steps = dice.below(steps) as u64;
    Case {
        lost: Some(Lost { rank, after_steps }),
        ..case
    }
}

/// Every rank but `missing` has finished, or names it as the culprit, whether it waited for that
/// rank or for one that gave up itself.
fn assert_explained(run: &Run, missing: usize) {
    let mut named = false;
    let mut gave_up = false;
    for (r, outcome) in run.outcomes.iter().enumerate() {
        let Outcome::Fault(fault) = outcome else {
            assert!(
                r == missing || *outcome == Outcome::Finished,
                "{:?}",
                run.case
            );
            continue;
        };
        let place = || format!("rank {r}: {fault}\n{:?}\n{:?}", run.outcomes, run.case);
        assert_eq!(fault.kind, FaultKind::PeerTimeout, "{}", place());
        assert_eq!(fault.rank.0 as usize, r, "{}", place());
        let peer = fault.peer.0 as usize;
        assert!(
            peer == missing || matches!(run.outcomes[peer], Outcome::Fault(_)),
            "{}",
            place()
        );
        gave_up = true;
        assert_eq!(fault.culprit.0 as usize, missing, "{}", place());
        named |= peer == missing;
    }
    assert_eq!(gave_up, named, "{:?}\n{:?}", run.outcomes, run.case);
}

/// Runs cases that lose a rank, which all others explain. How many had a fault of which `is_counted`.
fn lose(
    seeds: Range<u64>,
    case: impl Fn(u64) -> Case,
    mut is_counted: impl FnMut(&Fault, &Case) -> bool,
) -> u64 {
    let mut count = 0;
    for seed in drawn(seeds) {
        let case = case(seed);
        let run = Run::of(&case);
        assert_explained(&run, case.lost.map_or(0, |lost| lost.rank as usize));
        run.compare();
        let is_counted = |outcome: &&Outcome| match outcome {
            Outcome::Fault(fault) => is_counted(fault, &case),
            _ => false,
        };
        count += u64::from(run.outcomes.iter().filter(is_counted).count() > 0);
        run.close();
    }
    count
}

/// Most runs lose a rank before it has done its part.
fn lose_ranks(seeds: Range<u64>, case: impl Fn(u64) -> Case) {
    let all = seeds.end - seeds.start;
    let gave_up = lose(seeds, case, |_, _| true);
    assert!(gave_up > all / 2 || !draws_all(), "{gave_up}");
}

#[test]
fn a_lost_rank_is_named_1() {
    lose_ranks(10_000..10_200, lost_case);
}

#[test]
fn a_lost_rank_is_named_2() {
    lose_ranks(10_200..10_400, lost_case);
}

#[test]
fn a_lost_rank_is_named_if_rows_stay_as_they_came() {
    lose_ranks(16_000..16_300, |seed| losing(any_rows_case(seed), seed));
}

/// A rank whose way to other nodes stalls gives up by itself, whatever it was about to put: its rows, its
/// notifications, sums or credits. All others finish, or wait for it in vain.
#[test]
fn a_stalled_network_is_a_fault_of_its_own_in_every_call() {
    let mut stalls = BTreeMap::new();
    for seed in drawn(19_000..19_300) {
        let mut dice = Dice::new(!seed);
        let case = many_nodes(seed);
        let rank = dice.below(case.ranks) as u32;
        let most = dice.pick(&[1, 8, 40, 200]);
        let case = Case {
            stalled: Some(Stalled {
                rank,
                after_puts: dice.below(most) as u64,
            }),
            ..case
        };
        let mut run = Run::of(&case);
        let outcome = &mut run.outcomes[rank as usize];
        if let Outcome::Fault(fault) = outcome
            && fault.kind == FaultKind::NetworkStalled
        {
            assert_eq!((fault.rank, fault.region), (Rank(rank), Region::Channel));
            *stalls.entry(fault.kernel.name()).or_insert(0) += 1;
            // As a lost one, as far as its peers know.
            *outcome = Outcome::Lost;
        }
        assert_explained(&run, rank as usize);
        run.compare();
        run.close();
    }
    println!("{stalls:?}");
    assert!(stalls.len() > 4 || !draws_all(), "{stalls:?}");
}

/// A case whose ranks are on several nodes.
fn many_nodes(seed: u64) -> Case {
    (0..)
        .map(|step| match seed % 2 {
            0 => any_case(seed + (step << 32)),
            _ => any_rows_case(seed + (step << 32)),
        })
        .find(|case| case.p2p_world_size < case.ranks && !case.skip_a2a)
        .unwrap_or_else(|| unreachable!("cases end"))
}

/// Nothing tells of a bare row; whoever waits for its words names the source.
#[test]
fn a_rank_that_is_lost_before_its_bare_rows_is_named() {
    let case = |seed: u64| {
        let (case, mut dice) = (inline_case(seed), Dice::new(seed));
        let lost = Lost {
            rank: dice.below(case.ranks) as u32,
            after_steps: dice.below(1_500) as u64,
        };
        Case {
            lost: Some(lost),
            ..case
        }
    };
    let waited_for_rows = lose(17_000..17_300, case, |fault, _| {
        fault.region == Region::DispatchRow
    });
    assert!(waited_for_rows > 20 || !draws_all(), "{waited_for_rows}");
}

/// A rank that has its rows ends its combine. What is still missing of a lost one is its credit, which the
/// next dispatch waits for; where ranks are on other nodes, the same combine.
#[test]
fn a_rank_that_is_lost_before_its_credit_is_missed_by_the_next_dispatch() {
    let mut missed = [0, 0];
    lose(18_000..18_400, lost_case, |fault, case| {
        if fault.region != Region::Credit {
            return false;
        }
        let is_far = case.p2p_world_size < case.ranks;
        let (is_right, round) = match fault.kernel {
            Kernel::Dispatch | Kernel::DispatchAsync => (!is_far, fault.epoch - 1),
            Kernel::Combine | Kernel::CombineWait | Kernel::GiveUp => (is_far, fault.epoch),
            _ => (false, 0),
        };
        assert!(is_right, "{fault}\n{case:?}");
        assert_eq!(fault.wanted, round, "{fault}\n{case:?}");
        assert!(fault.saw < round, "{fault}\n{case:?}");
        missed[usize::from(is_far)] += 1;
        true
    });
    let are_seen = missed[0] > 10 && missed[1] > 10;
    assert!(
        are_seen || !draws_all(),
        "on one node, on several: {missed:?}"
    );
}

/// A warp looks at the credits of 32 ranks at a time. A lost rank behind the first 32 is missed as any other.
#[test]
fn of_more_ranks_than_lanes_the_last_ones_are_missed_by_their_credits_too() {
    let case = |seed: u64| {
        let mut dice = Dice::new(seed);
        let ranks = 33 + dice.below(8);
        let lost = Lost {
            rank: 32 + dice.below(ranks - 32) as u32,
            after_steps: 10_000 + dice.below(6_000) as u64,
        };
        // Nobody waits for rows: all combines end, whatever has become of a peer. All other credits
        // are there when the next dispatch begins.
        Case {
            tokens: vec![vec![0; ranks]; 2],
            warps: 2,
            synchronize: true,
            lost: Some(lost),
            ..Case::small(seed).on_one_node(ranks)
        }
    };
    let missed = lose(19_000..19_030, case, |fault, case| {
        let is_lost = case.lost.is_some_and(|lost| fault.peer == Rank(lost.rank));
        fault.region == Region::Credit && is_lost
    });
    assert!(missed > 2 || !draws_all(), "{missed}");
}

/// A rank that never launches is named by all that wait for it. How many of the absent ones were told.
fn leave_out(seeds: Range<u64>, case: fn(u64) -> Case) -> usize {
    let mut told = 0;
    for seed in drawn(seeds) {
        let case = case(seed);
        let absent = Dice::new(!seed).below(case.ranks);
        let case = Case {
            absent: Some(absent),
            ..case
        };
        let run = Run::of(&case);
        for (r, outcome) in run.outcomes.iter().enumerate() {
            let Outcome::Fault(fault) = outcome else {
                assert_eq!(r, absent, "{case:?}");
                told += usize::from(matches!(outcome, Outcome::Late { .. }));
                continue;
            };
            let wanted = (FaultKind::PeerTimeout, Rank(absent as u32), 1);
            assert_eq!((fault.kind, fault.peer, fault.epoch), wanted, "{case:?}");
        }
        run.compare();
        run.close();
    }
    told
}

#[test]
fn a_rank_that_never_launches_is_named_by_all() {
    let told = leave_out(11_000..11_100, any_case);
    // By those whose turn came before the absent one's.
    assert!(told > 20 || !draws_all(), "{told}");
    leave_out(46_000..46_060, any_rows_case);
}

/// Every byte of every output, also of those that gave up.
fn memory(run: &Run) -> Vec<(Received, Vec<u8>)> {
    let rounds = run.tensors.iter();
    let tensors = rounds.flat_map(|round| run.ranks.iter().zip(round));
    let held = tensors.map(|(rank, tensors)| {
        let device = &**rank.device();
        let received = Received::download(device, &tensors.output, &run.case.config());
        (received.unwrap(), tensors.result(device).unwrap())
    });
    held.collect()
}

#[test]
fn a_seed_decides_everything() {
    for seed in drawn(12_000..12_050) {
        for case in [any_case(seed), lost_case(seed)] {
            let (one, two) = (Run::of(&case), Run::of(&case));
            assert_eq!(one.outcomes, two.outcomes, "{case:?}");
            assert!(memory(&one) == memory(&two), "{case:?}");
            one.close();
            two.close();
        }
    }
}

/// The rank with the bad input also waits for the lost one: the second fault must not hide
/// behind the first.
#[test]
fn a_lost_rank_is_found_behind_a_bad_input() {
    let mut hidden = 0;
    for seed in drawn(14_000..14_200) {
        let case = lost_case(seed);
        let lost = case.lost.map_or(0, |lost| lost.rank as usize);
        let Some(place) = any_slot(&case, &mut Dice::new(!seed)) else {
            continue;
        };
        let rank = place[1];
        if rank == lost {
            continue;
        }
        let run = run_with_id(&case, place, case.experts as i64);
        assert_explained(&run, lost);
        run.compare();
        let gave_up = matches!(run.outcomes[rank], Outcome::Fault(_));
        hidden += u32::from(gave_up && !run.case.synchronize);
        run.close();
    }
    assert!(hidden > 20 || !draws_all(), "{hidden}");
}
