//! Replays with a shared expert, and of tokens that all ranks have.

use ferry::{CombineMode, ScaleLayout, TokenFormat};
use ferry_reference::workload::{Routing, WorkloadSpec, generate};
use ferry_reference::{
    Problem, bf16, dispatch, dispatch_with_shared, dispatch_with_shared_part, share_of,
};
use ferry_tests::verify::{Oracle, compare_rows};
use safetensors::{Dtype, SafeTensors};

use super::{
    SCALE, Tensors, bytes, compare_rows_of, file_of, options, problem, refused_with, replay,
    same_tensors, tensors, values,
};

/// Three ranks that have the same tokens.
fn problem_of_all(hidden: usize) -> Problem {
    let one = generate(WorkloadSpec {
        ranks: 1,
        experts: 12,
        top_k: 3,
        hidden,
        tokens: vec![7],
        routing: Routing::Duplicates,
        seed: 5,
    });
    Problem {
        ranks: 3,
        inputs: vec![one.inputs[0].clone(); 3],
        ..one
    }
}

/// What rank `rank` of three has to do of these tokens.
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

/// What the shared expert multiplies by.
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

#[test]
fn a_shared_expert_has_the_first_group() {
    let problem = problem();
    let given = file_of(&with_shared(tensors(&problem, true)));
    let written = replay("shared", &given, &["--shared-expert"]).unwrap();
    let split = replay(
        "shared",
        &given,
        &["--shared-expert", "--split", "--all-at-once"],
    )
    .unwrap();
    same_tensors(&split, &written);
    let file = SafeTensors::deserialize(&written).unwrap();
    for (rank, wanted) in dispatch_with_shared(&problem).iter().enumerate() {
        compare_rows_of(&file, rank, wanted, problem.hidden);
    }

    let all = problem_of_all(24);
    let given = file_of(&with_shared(tensors(&all, true)));
    let written = replay("shared-skip", &given, &["--shared-expert", "--skip-a2a"]).unwrap();
    let file = SafeTensors::deserialize(&written).unwrap();
    for rank in 0..3 {
        let wanted = &dispatch_with_shared_part(&share(&all, rank), rank, 3)[0];
        compare_rows_of(&file, rank, wanted, 24);
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
