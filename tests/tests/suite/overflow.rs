//! Outputs that hold fewer rows than come: the first rows are there and bit for bit right, the others are no
//! part of the results, the rank is told how many it lacks, and every round ends.

use std::collections::BTreeSet;
use std::ops::Range;

use ferry::layout::Region;
use ferry::{FaultKind, ReceiveLayout, ScaleLayout, TokenFormat};
use ferry_reference::workload::Routing;
use ferry_rig::*;

/// Runs one case for each seed. How many ranks were told that they lack rows, and blocks of scales.
fn all(seeds: Range<u64>, case: impl Fn(u64) -> Case) -> [usize; 2] {
    let mut told = [0, 0];
    for seed in drawn(seeds) {
        let case = Case {
            short: true,
            ..case(seed)
        };
        let run = Run::of(&case);
        for outcome in &run.outcomes {
            assert_eq!(*outcome, Outcome::Finished, "{case:?}");
        }
        run.compare();
        let lacking: BTreeSet<_> = run
            .tensors
            .iter()
            .enumerate()
            .flat_map(|(round, ranks)| (0..ranks.len()).map(move |rank| (round, rank)))
            .filter(|&(round, rank)| run.expected[round].lacks(rank).is_some())
            .collect();
        let mut found = BTreeSet::new();
        for fault in &run.input_faults {
            assert_eq!(fault.kind, FaultKind::OutputTooSmall, "{fault}\n{case:?}");
            let (round, rank) = (case.round_of(fault.epoch), fault.rank.0 as usize);
            let lacks = run.expected[round].lacks(rank);
            let numbers = (fault.region, fault.saw as usize, fault.wanted as usize);
            assert_eq!(Some(numbers), lacks, "{fault}\n{case:?}");
            assert_eq!(fault.peer, fault.rank, "{fault}\n{case:?}");
            told[usize::from(fault.region == Region::ScaleBlocks)] += 1;
            assert!(found.insert((round, rank)), "told twice: {case:?}");
        }
        // A rank that nobody asks in between tells of its first round alone.
        let expected: BTreeSet<_> = if case.synchronize {
            lacking
        } else {
            (0..case.ranks)
                .filter_map(|rank| lacking.iter().copied().find(|&(_, other)| other == rank))
                .collect()
        };
        assert_eq!(found, expected, "{case:?}");
        run.close();
    }
    told
}

#[test]
fn any_case_1() {
    let told = all(30_000..30_250, any_case);
    assert!((told[0] > 100 && told[1] > 10) || !draws_all(), "{told:?}");
}

#[test]
fn any_case_2() {
    let told = all(30_250..30_500, any_case);
    assert!((told[0] > 100 && told[1] > 10) || !draws_all(), "{told:?}");
}

#[test]
fn rows_with_inline_flags() {
    let told = all(30_500..30_650, inline_case);
    assert!(told[0] > 100 || !draws_all(), "{told:?}");
}

/// Rows of several blocks of scales for each expert, of which some have no room.
#[test]
fn experts_with_several_blocks_of_scales() {
    let told = all(30_700..30_740, |seed| {
        let layout = ScaleLayout::Tiled;
        let mut dice = Dice::new(!seed);
        Case {
            ranks: 2,
            p2p_world_size: 2,
            experts: 6,
            top_k: 3,
            hidden: 128,
            tokens: vec![vec![dice.below(300), 100 + dice.below(200)]; 2],
            routing: Routing::Uniform,
            format: dice.pick(&[TokenFormat::Mxfp8(layout), TokenFormat::Mxfp4(layout)]),
            ..any_case(seed)
        }
    });
    assert!((told[0] > 10 && told[1] > 10) || !draws_all(), "{told:?}");
}

/// More local experts than a warp has lanes.
#[test]
fn many_experts() {
    let told = all(30_800..30_820, |seed| Case {
        ranks: 2,
        p2p_world_size: 2,
        experts: 140,
        top_k: 8,
        tokens: vec![vec![9, 12]; 2],
        ..any_case(seed)
    });
    assert!(told[0] > 10 || !draws_all(), "{told:?}");
}

/// Compact rows, in every format.
#[test]
fn rows_that_stay_as_they_came() {
    let told = all(43_000..43_150, |seed| {
        let format = ROW_FORMATS[seed as usize % ROW_FORMATS.len()];
        Case {
            debug_checks: false,
            synchronize: true,
            ..rows_case(seed, ReceiveLayout::Compact, format)
        }
    });
    assert_eq!(told[1], 0);
    assert!(told[0] > 300 || !draws_all(), "{told:?}");
}
