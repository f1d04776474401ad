//! Tokens that are encoded already, on simulated ranks: any codes and scales arrive bit for bit, in every
//! layout of received rows and from scales in every place, and a word that cannot travel is named.

use ferry::layout::Region;
use ferry::*;
use ferry_reference::passed;
use ferry_rig::formats::given::{Given, Strides};
use ferry_rig::formats::{Encoded, INPUT_SCALE};
use ferry_rig::*;

const FORMATS: [TokenFormat; 7] = [
    TokenFormat::BlockwiseFp8,
    TokenFormat::Mxfp8(ScaleLayout::Tiled),
    TokenFormat::Mxfp8(ScaleLayout::RowMajor),
    TokenFormat::Mxfp4(ScaleLayout::Tiled),
    TokenFormat::Mxfp4(ScaleLayout::RowMajor),
    TokenFormat::Nvfp4(ScaleLayout::Tiled),
    TokenFormat::Nvfp4(ScaleLayout::RowMajor),
];
const GIVEN: [Given; 3] = [Given::AnyBits, Given::Packed, Given::Encoded];
const STRIDES: [Strides; 3] = [Strides::RowMajor, Strides::Gaps, Strides::Transposed];

/// The same case with tokens that are encoded, in a format that has codes.
fn encoded(case: Case) -> Case {
    let mut dice = Dice::new(case.seed ^ 0x656e_636f);
    let formats: Vec<_> = match case.receive {
        ReceiveLayout::ByExpert => FORMATS.into(),
        _ => ROW_FORMATS[1..5].into(),
    };
    let format = dice.pick(&formats);
    let given = dice.pick(&GIVEN);
    let hidden = match given {
        Given::Packed => case.hidden.next_multiple_of(512),
        _ => case.hidden.next_multiple_of(128),
    };
    Case {
        format,
        hidden,
        given,
        strides: dice.pick(&STRIDES),
        transposed_scales: case.receive != ReceiveLayout::ByExpert
            && format == TokenFormat::BlockwiseFp8
            && dice.below(2) == 0,
        ..case
    }
}

#[test]
fn tokens_by_expert() {
    run_all(50_000..50_120, |seed| encoded(any_case(seed)));
}

/// Few tokens in parts with inline flags, whose words must not look as if they had not arrived.
#[test]
fn tokens_with_inline_flags() {
    run_all(50_300..50_380, |seed| encoded(inline_case(seed)));
}

#[test]
fn tokens_that_stay_as_they_came() {
    run_all(50_500..50_620, |seed| encoded(any_rows_case(seed)));
}

#[test]
fn tokens_that_all_ranks_have() {
    run_all(50_800..50_880, |seed| encoded(local_case(seed)));
}

/// Rows of sixteen parts, of which each has more words of scales than a warp has lanes.
#[test]
fn rows_of_large_parts() {
    for (seed, given) in (51_000..).zip([Given::AnyBits, Given::Packed]) {
        let case = Case {
            format: TokenFormat::BlockwiseFp8,
            given,
            hidden: 128 * 552,
            tokens: vec![vec![1, 1], vec![0, 2]],
            warps: 40,
            ..Case::small(seed)
        };
        Run::of(&case).expect_success();
    }
}

/// Rows are the same whoever encodes them, so each rank may choose.
#[test]
fn some_ranks_are_given_bf16() {
    for seed in drawn(51_100..51_130) {
        let case = Case {
            given: Given::Encoded,
            ..encoded(any_case(seed))
        };
        let (others, problems) = (Dice::new(!seed).bits(), case.problems());
        let run = Run::with(&case, &problems, |tensors, ranks| {
            for (round, problem) in problems.iter().enumerate() {
                for (rank, own) in ranks
                    .iter()
                    .enumerate()
                    .filter(|(r, _)| others >> r & 1 != 0)
                {
                    let (device, given) = (own.device(), &mut tensors[round][rank].input);
                    let mut x = problem.inputs[rank].x.clone();
                    x.resize(given.x.elements(), ferry_reference::bf16::NAN);
                    (given.x, given.x_scales) =
                        (device.upload_tensor(given.x.dims, &x).unwrap(), None);
                    if matches!(case.format, TokenFormat::Nvfp4(_)) {
                        given.input_scale =
                            Some(device.upload_tensor([1], &[INPUT_SCALE]).unwrap());
                    }
                }
            }
        });
        run.expect_success();
    }
}

/// The token's scales with one word that does not travel, and the word's index.
fn with_lost_word(token: &Encoded, dice: &mut Dice) -> (Encoded, usize) {
    let mut token = token.clone();
    let word = dice.below(token.scales.len() / 4);
    token.scales[4 * word..][..4].copy_from_slice(&0xffff_fffe_u32.to_le_bytes());
    (token, word)
}

/// A word of scales that means something else on the way is reported, and arrives as all ones.
#[test]
fn scales_that_cannot_travel_are_named() {
    let mut found = 0;
    for seed in drawn(51_200..51_280) {
        let mut dice = Dice::new(!seed);
        let case = if dice.below(2) == 0 {
            any_case(seed)
        } else {
            any_rows_case(seed)
        };
        let case = Case {
            given: Given::AnyBits,
            short: false,
            debug_checks: false,
            ..encoded(case)
        };
        let (round, rank) = (dice.below(case.tokens.len()), dice.below(case.ranks));
        let problem = case.problem(round);
        let input = &problem.inputs[rank];
        // A token that goes somewhere.
        let routed = (0..input.tokens).find(|&token| {
            let slots = &input.topk_ids[token * case.top_k..][..case.top_k];
            slots.iter().any(|&id| id >= 0)
        });
        let Some(token) = routed else { continue };
        let row = |token: usize| &input.x[token * case.hidden..][..case.hidden];
        let own = case.given.given(case.format, row(token), INPUT_SCALE);
        let (given, word) = with_lost_word(&own, &mut dice);
        assert_eq!(passed::scales(&given.scales).1, [word]);
        let mut run = Run::with(&case, &case.problems(), |tensors, ranks| {
            let encode = |token| case.given.given(case.format, row(token), INPUT_SCALE);
            let mut tokens: Vec<_> = (0..input.tokens).map(encode).collect();
            tokens[token] = given.clone();
            let device = &**ranks[rank].device();
            tensors[round][rank].put_encoded(device, &tokens).unwrap();
        });
        let [fault] = run.input_faults[..] else {
            panic!("{:?}\n{case:?}", run.input_faults)
        };
        assert!(fault.kind.is_input());
        assert_eq!(
            (fault.kind, fault.region, case.round_of(fault.epoch)),
            (FaultKind::LostScales, Region::InputScales, round)
        );
        let place = (
            fault.rank.0 as usize,
            fault.index as usize,
            fault.wanted as usize,
        );
        assert_eq!(place, (rank, token, word), "{fault}");
        assert_eq!(fault.saw, 0xffff_fffe);
        run.input_faults.clear();
        let arrived = given.passed(case.format, false);
        run.expected[round].expect_arrival(rank, token, &arrived);
        run.expect_success();
        found += 1;
    }
    assert!(found > 40 || !draws_all(), "{found}");
}
