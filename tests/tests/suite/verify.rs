//! The verifier sees every tensor.

use std::collections::BTreeSet;
use std::time::Duration;

use bytemuck::cast_slice_mut;
use ferry::{
    ByExpert, CombineMode, Config, Group, Padded, Receive, ReceiveFields, ScaleLayout, StridedRows,
    TokenFormat,
};
use ferry_reference::Problem;
use ferry_reference::workload::Routing;

use ferry_rig::verify::{
    Compared, Contents, Mismatch, Oracle, RankOutputs, Received, Rows, Tables,
};
use ferry_rig::{ROW_FORMATS, ROW_LAYOUTS, Session, Settings};

const SCALE: [f32; 4] = [0.5, 1.5, 2.0, 3.0];
const MODE: CombineMode = CombineMode::Reduced;

fn problem() -> Problem {
    ferry_rig::problem(vec![3, 2], [4, 2, 128], Routing::Uniform, 5)
}

/// Rows by expert.
fn by_expert(format: TokenFormat) -> Config {
    Config {
        format,
        deadline: Duration::from_secs(5),
        debug_checks: true,
        ..Config::new(4, 2, 128, 4)
    }
}

/// Rows that stay as they came, in every layout and format.
fn as_they_came() -> Vec<Config> {
    let mut all = Vec::new();
    for receive in ROW_LAYOUTS {
        for format in ROW_FORMATS {
            let is_fp8 = format == TokenFormat::BlockwiseFp8;
            for transposed_scales in [false, true].into_iter().take(1 + usize::from(is_fp8)) {
                let fields = ReceiveFields {
                    combine_weights: true,
                    transposed_scales,
                    ..ReceiveFields::new(receive)
                };
                all.push(Config {
                    receive: fields.try_into().unwrap(),
                    ..by_expert(format)
                });
            }
        }
    }
    all.push(Config {
        receive: Receive::Strided(StridedRows {
            clear_absent: true,
            ..StridedRows::default()
        }),
        ..by_expert(TokenFormat::Bf16)
    });
    all
}

/// A good round.
fn round(config: Config) -> Vec<RankOutputs> {
    let problem = problem();
    let settings = Settings::of(config, std::slice::from_ref(&problem)).with_spare(2, 0);
    let mut session = Session::new(&Group::simulated(2, 7).unwrap(), &settings).unwrap();
    let outputs = session.round(&problem, &SCALE).unwrap();
    session.close().unwrap();
    outputs
}

/// Text of a mismatch, empty if there is none.
fn text(result: Result<(), Mismatch>) -> String {
    result.err().map(|e| e.to_string()).unwrap_or_default()
}

/// Text of what is wrong with rank 0's outputs of a good round after a change.
fn told(format: TokenFormat, change: impl FnOnce(&mut RankOutputs)) -> String {
    let mut outputs = round(by_expert(format));
    change(&mut outputs[0]);
    text(Oracle::new(&problem(), &SCALE, format).verify(MODE, true, &outputs))
}

/// A rank's rows by expert.
fn received(rank: &mut RankOutputs) -> &mut Received {
    match &mut rank.received {
        Contents::ByExpert(received) => received,
        Contents::Rows(_) => panic!("rows by expert"),
    }
}

/// The bytes of every output of dispatch and combine. Destructured without `..`, so that a new field does not
/// compile until its tensor is here.
fn every_output(outputs: &mut RankOutputs) -> Vec<(&'static str, &mut [u8])> {
    let RankOutputs {
        rank: _,
        received,
        combined,
        combined_weights,
        beyond,
    } = outputs;
    let mut all = match received {
        Contents::ByExpert(received) => every_output_by_expert(received),
        Contents::Rows(rows) => every_output_of_rows(rows),
    };
    all.extend([
        ("combined", cast_slice_mut(combined)),
        ("combined_weights", cast_slice_mut(combined_weights)),
        ("combined", &mut beyond[..]),
    ]);
    all
}

fn every_output_by_expert(received: &mut Received) -> Vec<(&'static str, &mut [u8])> {
    let Received {
        layout: _,
        tokens,
        scales,
        scales_offsets,
        row_scales,
        row_offsets,
        expert_ids,
        src_info,
        tables,
    } = received;
    let Tables {
        expert_counts,
        row_ends,
        sources,
        weights,
        m_indices,
        ranges,
    } = tables;
    vec![
        ("tokens", tokens),
        ("scales", scales),
        ("scales_offsets", cast_slice_mut(scales_offsets)),
        ("row_scales", cast_slice_mut(row_scales)),
        ("row_offsets", cast_slice_mut(row_offsets)),
        ("expert_ids", cast_slice_mut(expert_ids)),
        ("src_info", cast_slice_mut(src_info)),
        ("expert_counts", cast_slice_mut(expert_counts)),
        ("row_ends", cast_slice_mut(row_ends)),
        ("src_info", cast_slice_mut(sources)),
        ("weights", cast_slice_mut(weights)),
        ("m_indices", cast_slice_mut(m_indices)),
        ("source_ranges", cast_slice_mut(ranges)),
    ]
}

fn every_output_of_rows(rows: &mut Rows) -> Vec<(&'static str, &mut [u8])> {
    let Rows {
        layout: _,
        is_read,
        tokens,
        scales,
        row_scales,
        ids,
        weights,
        src_info,
        source_counts,
        expert_counts,
    } = rows;
    assert!(*is_read, "a session reads its views");
    vec![
        ("tokens", tokens),
        ("scales", scales),
        ("row_scales", row_scales),
        ("ids", cast_slice_mut(ids)),
        ("weights", cast_slice_mut(weights)),
        ("src_info", cast_slice_mut(src_info)),
        ("source_counts", cast_slice_mut(source_counts)),
        ("expert_counts", cast_slice_mut(expert_counts)),
    ]
}

/// Changes a bit of each output of a good round, at many places; the outputs that there were.
fn every_bit_counts(config: Config) -> BTreeSet<&'static str> {
    let mut seen = BTreeSet::new();
    let oracle = Oracle::of(&problem(), &SCALE, config.format, Compared::of(&config));
    let mut outputs = round(config);
    let verdict = |outputs: &[RankOutputs]| text(oracle.verify(MODE, true, outputs));
    assert_eq!(verdict(&outputs), "", "{config:?}");
    for index in 0..every_output(&mut outputs[0]).len() {
        let bytes = every_output(&mut outputs[0])[index].1.len();
        // Padding, spare rows and unused scales among them; all bytes would take long.
        let some = (0..bytes).step_by(bytes.div_ceil(50) | 1);
        for byte in some.chain(bytes.checked_sub(1)) {
            let (tensor, all) = &mut every_output(&mut outputs[0])[index];
            all[byte] ^= 1;
            let (tensor, told) = (*tensor, verdict(&outputs));
            every_output(&mut outputs[0])[index].1[byte] ^= 1;
            let is_named = told.starts_with("rank 0: ") && told.contains(tensor);
            assert!(is_named, "{config:?}, byte {byte} of {tensor}: {told}");
            seen.insert(tensor);
        }
    }
    assert_eq!(verdict(&outputs), "", "{config:?}");
    seen
}

#[test]
fn a_good_round_passes_and_one_bit_of_any_output_is_found() {
    let all = TokenFormat::ALL.map(|format| every_bit_counts(by_expert(format)));
    let seen: BTreeSet<_> = all.into_iter().flatten().collect();
    assert_eq!(seen.len(), 8, "{seen:?}");
}

#[test]
fn the_same_of_aligned_rows_with_tables() {
    for clear_padding in [false, true] {
        let all = TokenFormat::ALL.map(|format| {
            every_bit_counts(Config {
                receive: Receive::ByExpert(ByExpert {
                    alignment: 8,
                    clear_padding,
                    row_sources: true,
                    m_indices: true,
                }),
                ..by_expert(format)
            })
        });
        let seen: BTreeSet<_> = all.into_iter().flatten().collect();
        assert_eq!(seen.len(), 12, "{seen:?}");
    }
}

#[test]
fn the_same_of_padded_blocks() {
    for format in TokenFormat::ALL {
        for transposed_scales in [false, format == TokenFormat::BlockwiseFp8] {
            let seen = every_bit_counts(Config {
                receive: Receive::Padded(Padded {
                    transposed_scales,
                    clear_padding: transposed_scales,
                    row_sources: true,
                    m_indices: true,
                }),
                options: true,
                ..by_expert(format)
            });
            assert!(seen.contains("source_ranges"), "{seen:?}");
        }
    }
}

#[test]
fn the_same_of_rows_that_stay_as_they_came() {
    let all = as_they_came().into_iter().map(every_bit_counts);
    let seen: BTreeSet<_> = all.flatten().collect();
    assert_eq!(seen.len(), 10, "{seen:?}");
}

#[test]
fn the_place_of_a_difference_is_named() {
    let told = |change: fn(&mut RankOutputs)| told(TokenFormat::Bf16, change);
    let text = told(|rank| received(rank).tokens[256 + 2 * 9] ^= 1);
    assert!(
        text.starts_with("rank 0: tokens, row 1, column 18: expected"),
        "{text}"
    );
    let text = told(|rank| received(rank).src_info[0][1] ^= 1);
    assert!(
        text.starts_with("rank 0: src_info, row 0, column 1: expected"),
        "{text}"
    );
    let text = told(|rank| {
        let x = &mut rank.combined[128 + 5];
        *x = ferry_reference::bf16::from_bits(x.to_bits() ^ 1);
    });
    assert!(
        text.contains("rank 0: combined: One value differs, at row 1, column 5"),
        "{text}"
    );
    let text = told(|rank| rank.beyond[3] = 0);
    assert!(text.contains(" of combined holds nothing"), "{text}");
}

#[test]
fn a_tensor_of_another_length_is_refused() {
    let tiled = TokenFormat::Nvfp4RowScaled(ScaleLayout::Tiled);
    let shortened = |change: fn(&mut RankOutputs)| told(tiled, change);
    for text in [
        shortened(|rank| received(rank).row_offsets.truncate(2)),
        shortened(|rank| received(rank).scales_offsets.clear()),
        shortened(|rank| received(rank).row_scales.clear()),
        shortened(|rank| rank.combined.truncate(128)),
    ] {
        assert!(text.contains(" elements, the oracle's "), "{text}");
    }
}

/// Sample: values of the tokens between are not compared, and all else is.
#[test]
fn a_sample_sees_its_tokens_and_every_place() {
    let (format, problem) = (TokenFormat::Mxfp8(ScaleLayout::Tiled), problem());
    let compared = Compared {
        step: 2,
        ..Compared::ALL
    };
    let oracle = Oracle::of(&problem, &SCALE, format, compared);
    let mut outputs = round(by_expert(format));
    let mut told = |change: &dyn Fn(&mut RankOutputs)| {
        change(&mut outputs[0]);
        let text = text(oracle.verify(MODE, true, &outputs));
        change(&mut outputs[0]);
        text
    };
    assert_eq!(told(&|_| ()), "");
    let rows = &oracle.placement(0).rows;
    for row in rows {
        let (at, is_compared) = (row.position(), row.token().is_multiple_of(2));
        let text = told(&|rank| received(rank).tokens[at * 128 + 9] ^= 1);
        assert_eq!(text.contains("rank 0: tokens"), is_compared, "{text}");
        let text = told(&|rank| received(rank).src_info[at][0] ^= 1);
        assert!(text.contains("rank 0: src_info"), "{text}");
    }
    assert!(rows.iter().any(|row| row.token() == 1));
    let text = told(&|rank| *received(rank).tokens.last_mut().unwrap() ^= 1);
    assert!(text.contains("rank 0: tokens"), "{text}");
    for token in 0..3 {
        let text = told(&|rank| {
            let x = &mut rank.combined[token * 128];
            *x = ferry_reference::bf16::from_bits(x.to_bits() ^ 1);
        });
        assert_eq!(text.contains("combined"), token != 1, "{token}: {text}");
    }
}
