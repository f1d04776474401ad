//! Replays with options of combine, and what an option needs.

use ferry_reference::workload::Routing;
use ferry_reference::{
    CombineMode, Finish, Problem, apply_expert_scale, bf16, combine_with, dispatch,
};
use ferry_rig::verify::SHARED_FACTOR;
use ferry_rig::{Case, factors};
use safetensors::{Dtype, SafeTensors};

use super::{
    EXPERTS, Tensors, bytes, file_of, numbers, problem, refused_with, replay, same_tensors, tensors,
};

/// Three ranks that have the same tokens.
fn problem_of_all(hidden: usize) -> Problem {
    let case = Case {
        ranks: 3,
        experts: EXPERTS,
        top_k: 3,
        hidden,
        tokens: vec![vec![7; 3]],
        routing: Routing::Duplicates,
        skip_a2a: true,
        ..Case::small(5)
    };
    case.problem(0)
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
    let rows = apply_expert_scale(&problem, &dispatch(&problem), &factors(EXPERTS, 0));
    let finish = |residual| Finish {
        residual: Some(residual),
        ..Finish::NONE
    };
    let finish: Vec<_> = residual(&problem).into_iter().map(finish).collect();
    for (mode, name) in [
        (CombineMode::Reduced, "reduced"),
        (CombineMode::Exact, "exact"),
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
        let mut given = tensors(problem, true);
        given.insert("shared_scale".into(), numbers(&[SHARED_FACTOR]));
        let given = file_of(&given);
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
    wide.insert("shared_scale".into(), numbers(&[1.0, 2.0]));
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
