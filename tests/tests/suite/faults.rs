//! Reactions of simulated ranks to a peer that does not come and of inputs that do not fit: a fault
//! that says so, results that are right wherever there are any, and an end.

use ferry::layout::{Kernel, Region};
use ferry::simulator::{Lost, Stalled};
use ferry::*;
use ferry_reference::workload::Routing;
use ferry_rig::verify::Received;
use ferry_rig::*;

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

fn lose_ranks(seeds: std::ops::Range<u64>, lost_case: impl Fn(u64) -> Case) {
    let (mut runs_that_gave_up, count) = (0, seeds.end - seeds.start);
    for seed in drawn(seeds) {
        let case = lost_case(seed);
        let run = Run::of(&case);
        let missing = case.lost.map_or(0, |lost| lost.rank as usize);
        assert_explained(&run, missing);
        run.compare();
        runs_that_gave_up += u64::from(
            run.outcomes
                .iter()
                .any(|outcome| matches!(outcome, Outcome::Fault(_))),
        );
        run.close();
    }
    assert!(
        runs_that_gave_up > count / 2 || !draws_all(),
        "{runs_that_gave_up}"
    );
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
    let mut stalls = std::collections::BTreeMap::new();
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
    let mut waited_for_rows = 0;
    for seed in drawn(17_000..17_300) {
        let mut dice = Dice::new(seed);
        let case = inline_case(seed);
        let lost = Lost {
            rank: dice.below(case.ranks) as u32,
            after_steps: dice.below(1_500) as u64,
        };
        let case = Case {
            lost: Some(lost),
            ..case
        };
        let run = Run::of(&case);
        assert_explained(&run, lost.rank as usize);
        run.compare();
        waited_for_rows += u32::from(run.outcomes.iter().any(|outcome| {
            matches!(outcome, Outcome::Fault(fault) if fault.region == Region::DispatchRow)
        }));
        run.close();
    }
    assert!(waited_for_rows > 20 || !draws_all(), "{waited_for_rows}");
}

/// A rank that has its rows ends its combine. What is still missing of a lost one is its credit, which the
/// next dispatch waits for; where ranks are on other nodes, the same combine.
#[test]
fn a_rank_that_is_lost_before_its_credit_is_missed_by_the_next_dispatch() {
    let mut missed = [0, 0];
    for seed in drawn(18_000..18_400) {
        let case = lost_case(seed);
        let run = Run::of(&case);
        assert_explained(&run, case.lost.map_or(0, |lost| lost.rank as usize));
        run.compare();
        for outcome in &run.outcomes {
            let Outcome::Fault(fault) = outcome else {
                continue;
            };
            if fault.region != Region::Credit {
                continue;
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
        }
        run.close();
    }
    println!(
        "{} credits missed on one node, {} on several",
        missed[0], missed[1]
    );
    assert!(
        (missed[0] > 10 && missed[1] > 10) || !draws_all(),
        "{missed:?}"
    );
}

/// A warp looks at the credits of 32 ranks at a time. A lost rank behind the first 32 is missed as any other.
#[test]
fn of_more_ranks_than_lanes_the_last_ones_are_missed_by_their_credits_too() {
    let mut missed = 0;
    for seed in drawn(19_000..19_030) {
        let mut dice = Dice::new(seed);
        let ranks = 33 + dice.below(8);
        let rank = 32 + dice.below(ranks - 32) as u32;
        // Nobody waits for rows: all combines end, whatever has become of a peer. All other credits
        // are there when the next dispatch begins.
        let case = Case {
            tokens: vec![vec![0; ranks]; 2],
            warps: 2,
            synchronize: true,
            lost: Some(Lost {
                rank,
                after_steps: 10_000 + dice.below(6_000) as u64,
            }),
            ..Case::small(seed).on_one_node(ranks)
        };
        let run = Run::of(&case);
        assert_explained(&run, rank as usize);
        run.compare();
        missed += u32::from(run.outcomes.iter().any(|outcome| {
            matches!(outcome, Outcome::Fault(fault)
                if fault.region == Region::Credit && fault.peer == Rank(rank))
        }));
        run.close();
    }
    println!("{missed} lost ranks missed by their credits");
    assert!(missed > 2 || !draws_all(), "{missed}");
}

#[test]
fn a_rank_that_never_launches_is_named_by_all() {
    let mut is_told = 0;
    for seed in drawn(11_000..11_100) {
        let case = any_case(seed);
        let absent = Dice::new(!seed).below(case.ranks);
        let case = Case {
            absent: Some(absent),
            ..case
        };
        let run = Run::of(&case);
        for (r, outcome) in run.outcomes.iter().enumerate() {
            let Outcome::Fault(fault) = outcome else {
                assert_eq!(r, absent, "{case:?}");
                is_told += u32::from(matches!(outcome, Outcome::Late { .. }));
                continue;
            };
            let wanted = (FaultKind::PeerTimeout, Rank(absent as u32), 1);
            assert_eq!((fault.kind, fault.peer, fault.epoch), wanted, "{case:?}");
        }
        run.compare();
        run.close();
    }
    // By those whose turn came before the absent one's.
    assert!(is_told > 20 || !draws_all(), "{is_told}");
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

/// A slot of a token that exists, if there is one: round, rank, index into the ids.
fn any_slot(case: &Case, dice: &mut Dice) -> Option<(usize, usize, usize)> {
    let round = dice.below(case.tokens.len());
    let rank = dice.below(case.ranks);
    let slots = case.tokens[round][rank] * case.top_k;
    (slots > 0).then(|| (round, rank, dice.below(slots)))
}

/// The problems of a case, run with `id` in one slot where the oracle has -1.
fn run_with_id(case: &Case, round: usize, rank: usize, slot: usize, id: i32) -> Run {
    let mut problems = case.problems();
    let ids = &mut problems[round].inputs[rank].topk_ids;
    ids[slot] = id;
    let mut given = ids.clone();
    ids[slot] = -1;
    given.resize(given.len() + case.counted.unwrap_or(0) * case.top_k, 0);
    Run::with(case, &problems, |tensors, ranks| {
        let tensors = &tensors[round][rank];
        tensors.put_ids(&**ranks[rank].device(), &given).unwrap();
    })
}

#[test]
fn an_expert_that_does_not_exist_is_named_and_left_out() {
    let mut found = 0;
    for seed in drawn(13_000..13_100) {
        let case = any_case(seed);
        let mut dice = Dice::new(!seed);
        let Some((round, rank, slot)) = any_slot(&case, &mut dice) else {
            continue;
        };
        let beyond = case.experts as i32;
        let id = dice.pick(&[beyond, beyond + 1, i32::MAX, i32::MIN, -2]);
        let run = run_with_id(&case, round, rank, slot, id);
        let [fault] = run.input_faults[..] else {
            panic!("{:?}\n{case:?}", run.input_faults)
        };
        assert_eq!(fault.kind, FaultKind::InvalidExpert, "{case:?}");
        assert_eq!(
            (
                fault.rank.0 as usize,
                fault.index as usize,
                fault.peer.0 as usize
            ),
            (rank, slot / case.top_k, slot % case.top_k),
            "{fault}\n{case:?}"
        );
        assert_eq!(
            (fault.saw as u32 as i32, case.round_of(fault.epoch)),
            (id, round),
            "{fault}\n{case:?}"
        );
        let text = format!(
            "rank {rank}, token {}, slot {}: expert id {id} is not in -1 to {}; ",
            slot / case.top_k,
            slot % case.top_k,
            beyond - 1
        );
        assert!(fault.to_string().starts_with(&text), "{fault}");
        assert!(run.outcomes.iter().all(|o| *o == Outcome::Finished));
        run.compare();
        run.close();
        found += 1;
    }
    assert!(found > 50 || !draws_all(), "{found}");
}

/// The rank with the bad input also waits for the lost one: the second fault must not hide
/// behind the first.
#[test]
fn a_lost_rank_is_found_behind_a_bad_input() {
    let mut hidden = 0;
    for seed in drawn(14_000..14_200) {
        let case = lost_case(seed);
        let lost = case.lost.map_or(0, |lost| lost.rank as usize);
        let Some((round, rank, slot)) = any_slot(&case, &mut Dice::new(!seed)) else {
            continue;
        };
        if rank == lost {
            continue;
        }
        let run = run_with_id(&case, round, rank, slot, case.experts as i32);
        assert_explained(&run, lost);
        run.compare();
        let gave_up = matches!(run.outcomes[rank], Outcome::Fault(_));
        hidden += u32::from(gave_up && !run.case.synchronize);
        run.close();
    }
    assert!(hidden > 20 || !draws_all(), "{hidden}");
}

#[test]
fn an_expert_listed_twice_is_named_only_in_debug_checks() {
    let mut found = 0;
    for seed in drawn(15_000..15_100) {
        let case = Case {
            routing: Routing::Duplicates,
            debug_checks: true,
            ..any_case(seed)
        };
        let run = Run::of(&case);
        for fault in &run.input_faults {
            assert_eq!(fault.kind, FaultKind::DuplicateExpert, "{fault}\n{case:?}");
            let round = case.round_of(fault.epoch);
            let ids = &run.case.problem(round).inputs[fault.rank.0 as usize].topk_ids;
            let token = fault.index as usize * case.top_k;
            let slot = fault.peer.0 as usize;
            let ids = &ids[token..token + case.top_k];
            assert_eq!(u64::from(ids[slot] as u32), fault.saw, "{fault}\n{case:?}");
            assert!(ids[..slot].contains(&ids[slot]), "{fault}\n{case:?}");
            found += 1;
        }
        run.compare();
        run.close();
        let unchecked = Case {
            debug_checks: false,
            ..case
        };
        Run::of(&unchecked).expect_success();
    }
    assert!(found > 100 || !draws_all(), "{found}");
}

#[test]
fn a_number_of_tokens_above_the_rows_is_told_and_all_rows_are_taken() {
    for seed in drawn(9_000..9_060) {
        let case = Case {
            counted: Some(0),
            ..any_case(seed)
        };
        let run = Run::with(&case, &case.problems(), |tensors, ranks| {
            for (rank, tensors) in ranks.iter().zip(&tensors[0]) {
                let count = tensors.input.tokens_on_device.unwrap().at;
                rank.device().upload(count, &[0xff; 4]).unwrap();
            }
        });
        for outcome in &run.outcomes {
            assert_eq!(*outcome, Outcome::Finished, "{case:?}");
        }
        let told: Vec<_> = run
            .input_faults
            .iter()
            .map(|fault| (fault.kind, fault.rank.0, fault.wanted, fault.saw))
            .collect();
        for rank in 0..case.ranks {
            let wanted = case.tokens[0][rank] as u64;
            let fault = (
                FaultKind::TooManyOnDevice,
                rank as u32,
                wanted,
                u64::from(u32::MAX),
            );
            assert!(told.contains(&fault), "rank {rank}: {told:?}\n{case:?}");
        }
        assert_eq!(told.len(), case.ranks, "{told:?}\n{case:?}");
        run.compare();
        run.close();
    }
}
