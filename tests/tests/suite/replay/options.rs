//! Replays with a shared expert, and of tokens that all ranks have.

use ferry::{CombineMode, ScaleLayout, TokenFormat};
use ferry_reference::workload::Routing;
use ferry_reference::{
    Finish, Problem, Room, align, apply_expert_scale, bf16, combine_with, dispatch,
    dispatch_with_shared, dispatch_with_shared_part, share_of,
};
use ferry_rig::verify::{Compared, Oracle, compare_rows};
use safetensors::{Dtype, SafeTensors};

use super::{
    SCALE, Tensors, bytes, compare_rows_of, file_of, options, problem, problem_of_groups,
    refused_with, replay, same_tensors, tensors, values,
};

/// Three ranks that have the same tokens.
fn problem_of_all(hidden: usize) -> Problem {
    let one = ferry_rig::problem(vec![7], [12, 3, hidden], Routing::Duplicates, 5);
    Problem {
        ranks: 3,
        inputs: vec![one.inputs[0].clone(); 3],
        ..one
    }
}

/// Share of rank `rank` of three in these tokens.
fn share(problem: &Problem, rank: usize) -> Problem {
    let all = Problem {
        ranks: 1,
        inputs: problem.inputs[..1].to_vec(),
        ..*problem
    };
    share_of(&all, 3, rank)
}

#[test]
fn tokens_that_all_ranks_have_come_back_in_parts() {
    for (test, format, mode, weights) in [
        ("skip", TokenFormat::Bf16, "reduced", true),
        ("skip-exact", TokenFormat::Bf16, "exact", true),
        ("skip-apart", TokenFormat::Bf16, "exact", false),
        ("skip-fp8", TokenFormat::BlockwiseFp8, "reduced", true),
        (
            "skip-mxfp4",
            TokenFormat::Mxfp4(ScaleLayout::Tiled),
            "exact",
            true,
        ),
    ] {
        let problem = problem_of_all(256);
        let given = file_of(&tensors(&problem, weights));
        let options = [&["--skip-a2a", "--mode", mode][..], &options(format)].concat();
        let written = replay(test, &given, &options).unwrap();
        let at_once = replay(test, &given, &[&options[..], &["--all-at-once"]].concat()).unwrap();
        same_tensors(&at_once, &written);
        let file = SafeTensors::deserialize(&written).unwrap();
        for rank in 0..3 {
            let share = share(&problem, rank);
            if format == TokenFormat::Bf16 {
                compare_rows_of(&file, rank, &dispatch(&share)[0], 256);
            }
            let oracle = Oracle::new(&share, &SCALE[4 * rank..][..4], format);
            let wanted = &oracle.combined(CombineMode::Exact, weights)[0];
            let sums = values(&file, &format!("combined.{rank}"), bf16::from_le_bytes);
            compare_rows(rank, "combined", wanted, &sums, 256).unwrap();
        }
    }
}

/// Factor of the shared expert.
const SHARED_SCALE: f32 = 1.5;

/// The same file for a shared expert.
fn with_shared(mut tensors: Tensors) -> Tensors {
    let scale = (
        Dtype::F32,
        vec![1],
        bytes(&[SHARED_SCALE], f32::to_le_bytes),
    );
    tensors.insert("shared_scale".into(), scale);
    tensors
}

/// Compares a rank's sums with those of the rank of that number in `problem`.
fn compare_sums(file: &SafeTensors<'_>, rank: usize, wanted: &[bf16], hidden: usize) {
    let sums = values(file, &format!("combined.{rank}"), bf16::from_le_bytes);
    compare_rows(rank, "combined", wanted, &sums, hidden).unwrap();
}

#[test]
fn a_shared_expert_has_the_first_group() {
    for (mode, name) in [
        (CombineMode::Reduced, "reduced"),
        (CombineMode::Exact, "exact"),
    ] {
        has_a_shared_expert(mode, name);
    }
}

fn has_a_shared_expert(mode: CombineMode, name: &str) {
    let problem = problem();
    let compared = Compared {
        shared: Some(SHARED_SCALE),
        ..Compared::ALL
    };
    let given = file_of(&with_shared(tensors(&problem, true)));
    let test = format!("shared-{name}");
    let options = ["--shared-expert", "--mode", name, "--p2p-world-size", "1"];
    let written = replay(&test, &given, &options).unwrap();
    let split = replay(
        &test,
        &given,
        &[&options[..], &["--split", "--all-at-once"]].concat(),
    )
    .unwrap();
    same_tensors(&split, &written);
    let file = SafeTensors::deserialize(&written).unwrap();
    let sums = Oracle::of(&problem, &SCALE, TokenFormat::Bf16, compared).combined(mode, true);
    for (rank, wanted) in dispatch_with_shared(&problem).iter().enumerate() {
        compare_rows_of(&file, rank, wanted, problem.hidden);
        compare_sums(&file, rank, &sums[rank], problem.hidden);
    }

    let all = problem_of_all(24);
    let given = file_of(&with_shared(tensors(&all, true)));
    let options = ["--shared-expert", "--skip-a2a", "--mode", name];
    let written = replay(&test, &given, &options).unwrap();
    let file = SafeTensors::deserialize(&written).unwrap();
    for rank in 0..3 {
        let share = share(&all, rank);
        let wanted = &dispatch_with_shared_part(&share, rank, 3)[0];
        compare_rows_of(&file, rank, wanted, 24);
        let compared = Compared {
            part: Some((rank, 3)),
            ..compared
        };
        let oracle = Oracle::of(&share, &SCALE[4 * rank..][..4], TokenFormat::Bf16, compared);
        compare_sums(&file, rank, &oracle.combined(mode, true)[0], 24);
    }
}

/// The rows that combine adds, by rank: fractions that no sum of the problem's has.
fn residual(problem: &Problem) -> Vec<Vec<bf16>> {
    let rows = problem.inputs.iter().enumerate().map(|(rank, input)| {
        let elements = input.tokens * problem.hidden;
        let element = |index: usize| bf16::from_f32((rank + index) as f32 / 7.0 - 9.0);
        (0..elements).map(element).collect()
    });
    rows.collect()
}

fn with_residual(mut tensors: Tensors, problem: &Problem) -> Tensors {
    for (rank, rows) in residual(problem).iter().enumerate() {
        let dims = vec![problem.inputs[rank].tokens, problem.hidden];
        let tensor = (Dtype::BF16, dims, bytes(rows, bf16::to_le_bytes));
        tensors.insert(format!("residual.{rank}"), tensor);
    }
    tensors
}

#[test]
fn a_residual_is_added_to_the_sums() {
    let problem = problem();
    let given = file_of(&with_residual(tensors(&problem, true), &problem));
    let rows = apply_expert_scale(&problem, &dispatch(&problem), &SCALE);
    let finish = |residual| Finish {
        residual: Some(residual),
        ..Finish::NONE
    };
    let finish: Vec<_> = residual(&problem).into_iter().map(finish).collect();
    for (mode, name) in [
        (ferry_reference::CombineMode::Reduced, "reduced"),
        (ferry_reference::CombineMode::Exact, "exact"),
    ] {
        let test = format!("residual-{name}");
        let options = ["--residual", "--mode", name, "--p2p-world-size", "1"];
        let written = replay(&test, &given, &options).unwrap();
        let others = [&options[..], &["--split", "--all-at-once"]].concat();
        same_tensors(&replay(&test, &given, &others).unwrap(), &written);
        let file = SafeTensors::deserialize(&written).unwrap();
        let wanted = combine_with(&problem, &rows, None, mode, &finish);
        for (rank, wanted) in wanted.iter().enumerate() {
            let sums = file.tensor(&format!("combined.{rank}")).unwrap();
            assert!(sums.data() == wanted, "combined.{rank} in {name} mode");
        }
        // Without the option nothing is added.
        let bare = replay(&test, &given, &options[1..]).unwrap();
        assert!(bare != written);
    }
}

/// Whoever gives the weights, the results are the same bits.
#[test]
fn weights_that_combine_is_given_weigh_as_those_of_dispatch() {
    let (routed, all) = (problem(), problem_of_all(256));
    let cases: [(&Problem, &[&str]); 4] = [
        (&routed, &["--p2p-world-size", "1"]),
        (&routed, &["--split"]),
        (&routed, &["--shared-expert", "--all-at-once"]),
        (&all, &["--skip-a2a", "--shared-expert", "--format", "fp8"]),
    ];
    for (problem, options) in cases {
        let given = file_of(&with_shared(tensors(problem, true)));
        let early = replay("late", &given, options).unwrap();
        let options = [options, &["--late-weights"]].concat();
        let late = replay("late", &given, &options).unwrap();
        same_tensors(&late, &early);
    }
}

#[test]
fn what_an_option_needs_is_named() {
    let given = tensors(&problem_of_all(24), true);
    let refused = |options: &[&str], given: &Tensors, words: &str| {
        refused_with("options", given, options, words);
    };
    refused(
        &["--shared-expert"],
        &given,
        "tensor shared_scale is missing",
    );
    let mut wide = given.clone();
    let two = (Dtype::F32, vec![2], bytes(&[1.0, 2.0], f32::to_le_bytes));
    wide.insert("shared_scale".into(), two);
    refused(
        &["--shared-expert"],
        &wide,
        "tensor shared_scale has shape [2], wanted [1]",
    );
    refused(&["--skip-a2a", "--split"], &given, "cannot be used with");
    refused(&["--residual"], &given, "tensor residual.0 is missing");
    refused(
        &["--late-weights", "--mode", "exact"],
        &given,
        "--late-weights is for --mode reduced",
    );
    let bare = tensors(&problem_of_all(24), false);
    refused(
        &["--late-weights"],
        &bare,
        "tensor topk_weights.0 is missing",
    );
    let added = with_residual(bare, &problem_of_all(24));
    refused(
        &["--residual", "--mode", "exact"],
        &added,
        "rows stay apart",
    );
    let mut short = added.clone();
    short.remove("residual.1");
    refused(&["--residual"], &short, "tensor residual.1 is missing");
    let mut wide = added;
    wide.get_mut("residual.2").unwrap().1 = vec![24, 7];
    refused(
        &["--residual"],
        &wide,
        "tensor residual.2 has shape [24, 7], wanted [7, 24]",
    );
    for name in ["x", "topk_ids", "topk_weights"] {
        let mut other = given.clone();
        let tensor = other.get_mut(&format!("{name}.2")).unwrap();
        tensor.2[0] ^= 1;
        refused(
            &["--skip-a2a"],
            &other,
            &format!("tensor {name}.2 is not {name}.0"),
        );
    }
}

/// Rows of a rank, `[rows, width]`, in which rows without a token have `padding` in every byte.
fn padded(rows: &[Option<&[u8]>], width: usize, padding: u8) -> Vec<u8> {
    let row = |row: &Option<&[u8]>| row.map_or(vec![padding; width], <[u8]>::to_vec);
    rows.iter().flat_map(row).collect()
}

/// Replays with groups that are aligned, or in padded blocks if there is no alignment.
fn comes_back_aligned(alignment: Option<usize>, clears: bool, more: &[&str]) {
    let problem = problem();
    let given = file_of(&tensors(&problem, true));
    let most = problem.inputs.iter().map(|input| input.tokens).max();
    let block = most.unwrap_or(0) * problem.ranks;
    let number = alignment.map(|rows| rows.to_string());
    let mut options = vec!["--row-sources", "--m-indices"];
    match &number {
        Some(number) => options.extend(["--alignment", number]),
        None => options.extend(["--receive", "padded"]),
    }
    options.extend(clears.then_some("--clear-padding"));
    options.extend(more);
    let written = replay(&format!("aligned-{alignment:?}-{clears}"), &given, &options).unwrap();
    let file = SafeTensors::deserialize(&written).unwrap();
    let sums =
        Oracle::new(&problem, &SCALE, TokenFormat::Bf16).combined(CombineMode::Reduced, true);
    for (rank, dispatched) in dispatch(&problem).iter().enumerate() {
        let most = dispatched.tokens.len() + alignment.unwrap_or(block) * problem.local_experts();
        let room = |end: usize| Room {
            alignment: alignment.unwrap_or(1),
            capacity: end,
            end,
            block: alignment.is_none().then_some(block),
            local: None,
        };
        let end = align(&problem, dispatched, room(most)).row_offsets;
        let wanted = align(&problem, dispatched, room(end[end.len() - 1] as usize));
        let words = |name: &str| values(&file, &format!("{name}.{rank}"), u32::from_le_bytes);
        let numbers = |name: &str| values(&file, &format!("{name}.{rank}"), i32::from_le_bytes);
        assert_eq!(words("row_offsets"), wanted.row_offsets);
        assert_eq!(words("row_ends"), wanted.row_ends);
        assert_eq!(numbers("expert_counts"), wanted.counts);
        assert_eq!(numbers("m_indices"), wanted.m_indices);
        assert_eq!(numbers("src_info"), wanted.src_info.as_flattened());
        let weights = wanted.weights.iter().map(|weight| weight.to_bits());
        assert!(words("weights").into_iter().eq(weights), "weights.{rank}");
        if alignment.is_none() {
            let ranges = values(&file, &format!("source_ranges.{rank}"), i64::from_le_bytes);
            assert_eq!(ranges, wanted.ranges);
        }
        let x = bytes(&dispatched.tokens, bf16::to_le_bytes);
        let mut sent = x.chunks(2 * problem.hidden);
        let rows = wanted.m_indices.iter();
        let rows: Vec<_> = rows
            .map(|&group| (group >= 0).then(|| sent.next().unwrap()))
            .collect();
        let padding = if clears { 0 } else { 0xa5 };
        let tokens = values(&file, &format!("tokens.{rank}"), u8::from_le_bytes);
        assert!(
            tokens == padded(&rows, 2 * problem.hidden, padding),
            "tokens.{rank}"
        );
        compare_sums(&file, rank, &sums[rank], problem.hidden);
    }
}

#[test]
fn aligned_rows_come_back() {
    comes_back_aligned(Some(8), true, &[]);
    comes_back_aligned(Some(128), false, &["--split"]);
    comes_back_aligned(
        Some(256),
        true,
        &["--p2p-world-size", "1", "--split", "--counts"],
    );
}

#[test]
fn padded_blocks_come_back() {
    comes_back_aligned(None, true, &[]);
    comes_back_aligned(None, false, &["--split", "--give-up"]);
    comes_back_aligned(
        None,
        true,
        &["--p2p-world-size", "1", "--split", "--counts"],
    );
}

#[test]
fn an_alignment_that_there_is_not_is_refused() {
    let given = tensors(&problem(), true);
    for (options, words) in [
        (&["--alignment", "12"][..], "expert_alignment is 12"),
        (&["--alignment", "512"], "1 to 256"),
        (&["--clear-padding"], "clear_padding is true"),
        (
            &["--m-indices", "--receive", "compact"],
            "m_indices is true",
        ),
    ] {
        refused_with("no-alignment", &given, options, words);
    }
}

/// Scales of fp8, and their shape, are those of the rows that are the same by expert.
#[test]
fn scales_of_padded_blocks_have_the_shape_of_their_data() {
    let problem = problem_of_groups();
    let given = file_of(&tensors(&problem, true));
    let fp8 = ["--format", "fp8"];
    let written = |options: &[&str]| {
        let options = [&fp8[..], options].concat();
        replay("padded-scales", &given, &options).unwrap()
    };
    let by_expert = written(&[]);
    let row_major = written(&["--receive", "padded"]);
    let transposed = written(&["--receive", "padded", "--transposed-scales"]);
    let [by_expert, row_major, transposed] =
        [&by_expert, &row_major, &transposed].map(|file| SafeTensors::deserialize(file).unwrap());
    let (experts, block, groups) = (6, 2 * 140, 2);
    for rank in 0..2 {
        let offsets = values(
            &by_expert,
            &format!("row_offsets.{rank}"),
            u32::from_le_bytes,
        );
        let counts = values(
            &row_major,
            &format!("expert_counts.{rank}"),
            i32::from_le_bytes,
        );
        let name = format!("scales.{rank}");
        let shape = |file: &SafeTensors<'_>| file.tensor(&name).unwrap().shape().to_vec();
        assert_eq!(shape(&row_major), [experts * block, groups]);
        assert_eq!(shape(&transposed), [experts * groups, block]);
        let [wanted, rows, columns] = [&by_expert, &row_major, &transposed]
            .map(|file| values(file, &name, u32::from_le_bytes));
        for expert in 0..experts {
            for row in 0..counts[expert] as usize {
                for group in 0..groups {
                    let row_by_expert = offsets[expert] as usize + row;
                    let scale = wanted[group * offsets[experts] as usize + row_by_expert];
                    assert_eq!(rows[(expert * block + row) * groups + group], scale);
                    assert_eq!(columns[(expert * groups + group) * block + row], scale);
                }
            }
        }
    }
}

/// A plan has at least one token, and so have the rows of views and strided rows.
#[test]
fn no_token_on_any_rank_comes_back() {
    let problem = ferry_rig::problem(vec![0, 0], [12, 2, 24], Routing::Uniform, 4);
    let given = file_of(&tensors(&problem, true));
    let written = replay("no-tokens", &given, &["--receive", "strided"]).unwrap();
    let file = SafeTensors::deserialize(&written).unwrap();
    assert_eq!(file.tensor("tokens.1").unwrap().shape(), [2, 24]);
    assert_eq!(file.tensor("combined.1").unwrap().shape(), [0, 24]);
}
