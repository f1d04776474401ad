//! Reactions of simulated ranks to inputs that do not fit: a fault that says so, and results that are right
//! all the same.

use std::ops::Range;

use ferry::*;
use ferry_reference::narrow_ids;
use ferry_reference::workload::Routing;
use ferry_rig::*;

/// A slot of a token that exists, if there is one: round, rank, index into the ids.
pub fn any_slot(case: &Case, dice: &mut Dice) -> Option<[usize; 3]> {
    let round = dice.below(case.tokens.len());
    let rank = dice.below(case.ranks);
    let slots = case.tokens[round][rank] * case.top_k;
    (slots > 0).then(|| [round, rank, dice.below(slots)])
}

/// The problems of a case, run with `id` in one slot where the oracle has -1.
pub fn run_with_id(case: &Case, [round, rank, slot]: [usize; 3], id: i64) -> Run {
    let mut problems = case.problems();
    let ids = &mut problems[round].inputs[rank].topk_ids;
    let mut given: Vec<i64> = ids.iter().copied().map(i64::from).collect();
    given[slot] = id;
    let (narrow, invalid) = narrow_ids(&given, case.experts);
    assert_eq!(invalid, [(slot, id)]);
    *ids = narrow;
    given.resize(given.len() + case.counted.unwrap_or(0) * case.top_k, 0);
    Run::with(case, &problems, |tensors, ranks| {
        let at = tensors[round][rank].input.topk_ids.at;
        let bytes: Vec<u8> = match case.has_wide_ids(rank) {
            true => given.iter().flat_map(|id| id.to_ne_bytes()).collect(),
            false => (given.iter())
                .flat_map(|&id| (id as i32).to_ne_bytes())
                .collect(),
        };
        ranks[rank].device().upload(at, &bytes).unwrap();
    })
}

/// Runs cases of which each has an id of no expert in one slot, which its rank names. How many there were.
fn name_ids(seeds: Range<u64>, case: fn(u64) -> Case, ids: impl Fn(i64, i64) -> Vec<i64>) -> u32 {
    let mut found = 0;
    for seed in drawn(seeds) {
        let (case, mut dice) = (case(seed), Dice::new(!seed));
        let Some(place) = any_slot(&case, &mut dice) else {
            continue;
        };
        let ([round, rank, slot], experts) = (place, case.experts as i64);
        let valid = dice.below(case.experts) as i64;
        let id = dice.pick(&ids(experts, valid));
        let run = run_with_id(&case, place, id);
        let [fault] = run.input_faults[..] else {
            panic!("{:?}\n{case:?}", run.input_faults)
        };
        let told = [
            fault.rank.0 as usize,
            fault.index as usize,
            fault.peer.0 as usize,
        ];
        let (token, slot) = (slot / case.top_k, slot % case.top_k);
        assert_eq!(told, [rank, token, slot], "{fault}\n{case:?}");
        // All bits of an id count: 2^32 + 3 is not expert 3.
        let saw = match case.has_wide_ids(rank) {
            true => fault.saw as i64,
            false => i64::from(fault.saw as u32 as i32),
        };
        let what = (fault.kind, saw, case.round_of(fault.epoch));
        assert_eq!(
            what,
            (FaultKind::InvalidExpert, id, round),
            "{fault}\n{case:?}"
        );
        let text = format!(
            "rank {rank}, token {token}, slot {slot}: expert id {id} is not in -1 to {}; ",
            experts - 1
        );
        assert!(fault.to_string().starts_with(&text), "{fault}");
        assert!(run.outcomes.iter().all(|end| *end == Outcome::Finished));
        run.compare();
        run.close();
        found += 1;
    }
    found
}

#[test]
fn an_expert_that_does_not_exist_is_named_and_left_out() {
    let ids = |experts, _| vec![experts, experts + 1, i32::MAX.into(), i32::MIN.into(), -2];
    let found = name_ids(13_000..13_100, any_case, ids);
    assert!(found > 50 || !draws_all(), "{found}");
}

#[test]
fn an_id_of_64_bits_is_named_and_left_out() {
    let wide = |seed: u64| Case {
        wide_ids: u64::MAX,
        debug_checks: false,
        short: false,
        ..match seed % 3 {
            0 => Case {
                options: true,
                ..any_case(seed)
            },
            _ => any_rows_case(seed),
        }
    };
    let beyond = 1 << 32;
    let ids = |experts, valid| {
        let near = [beyond + valid, valid - beyond, beyond - 1, -2, experts];
        [&near[..], &[i64::MIN, i64::MAX]].concat()
    };
    let found = name_ids(42_000..42_120, wide, ids);
    assert!(found > 60 || !draws_all(), "{found}");
}

/// Experts that are listed twice count twice, and are named only in debug checks. How often they were.
fn list_twice(seeds: Range<u64>, case: fn(u64) -> Case) -> u32 {
    let mut found = 0;
    for seed in drawn(seeds) {
        let case = Case {
            routing: Routing::Duplicates,
            debug_checks: true,
            short: false,
            ..case(seed)
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
        run.expect_success();
        let unchecked = Run::of(&Case {
            debug_checks: false,
            ..case
        });
        assert_eq!(unchecked.input_faults, [], "{:?}", unchecked.case);
        unchecked.expect_success();
    }
    found
}

#[test]
fn an_expert_listed_twice_is_named_only_in_debug_checks() {
    let found = list_twice(15_000..15_100, any_case);
    assert!(found > 100 || !draws_all(), "{found}");
    let found = list_twice(44_000..44_080, any_rows_case);
    assert!(found > 100 || !draws_all(), "{found}");
}

/// Runs cases whose devices count more tokens in the first round than there are rows.
fn count_too_many(seeds: Range<u64>, case: fn(u64) -> Case) {
    for seed in drawn(seeds) {
        let case = Case {
            counted: Some(0),
            debug_checks: false,
            short: false,
            ..case(seed)
        };
        let run = Run::with(&case, &case.problems(), |tensors, ranks| {
            for (rank, tensors) in ranks.iter().zip(&tensors[0]) {
                let count = tensors.input.tokens_on_device.unwrap().at;
                rank.device().upload(count, &[0xff; 4]).unwrap();
            }
        });
        assert!(
            run.outcomes.iter().all(|end| *end == Outcome::Finished),
            "{case:?}"
        );
        let faults = run.input_faults.iter();
        let told = faults.map(|fault| (fault.rank.0, fault.kind, fault.wanted, fault.saw));
        let mut told: Vec<_> = told.collect();
        told.sort_by_key(|&(rank, ..)| rank);
        let wanted = (0..).zip(&case.tokens[0]).map(|(rank, &tokens)| {
            let saw = u64::from(u32::MAX);
            (rank, FaultKind::TooManyOnDevice, tokens as u64, saw)
        });
        assert_eq!(told, wanted.collect::<Vec<_>>(), "{case:?}");
        run.compare();
        run.close();
    }
}

#[test]
fn a_number_of_tokens_above_the_rows_is_told_and_all_rows_are_taken() {
    count_too_many(9_000..9_060, any_case);
    count_too_many(45_000..45_060, any_rows_case);
}
