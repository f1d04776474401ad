//! Replays of given tensors: what comes back, and what is said of files that do not fit.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use ferry::{CombineMode, TokenFormat};
use ferry_reference::workload::{Routing, WorkloadSpec, generate};
use ferry_reference::{Problem, bf16, dispatch};
use ferry_tests::verify::{Oracle, compare_rows};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

const SCALE: [f32; 12] = [
    0.5, 1.5, 2.0, 0.25, 3.0, 1.0, 1.25, 0.75, 4.0, 0.125, 1.75, 2.5,
];

/// Tensors by name: type, shape, bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Three ranks: a rank in the middle can be missing.
fn problem() -> Problem {
    generate(WorkloadSpec {
        ranks: 3,
        experts: 12,
        top_k: 3,
        hidden: 24,
        tokens: vec![5, 2, 4],
        routing: Routing::Holes { probability: 0.2 },
        seed: 3,
    })
}

fn bytes<T: Copy, const B: usize>(values: &[T], of: fn(T) -> [u8; B]) -> Vec<u8> {
    values.iter().flat_map(|&value| of(value)).collect()
}

fn values<T, const B: usize>(file: &SafeTensors<'_>, name: &str, of: fn([u8; B]) -> T) -> Vec<T> {
    let view = file.tensor(name).unwrap();
    view.data().as_chunks().0.iter().map(|&b| of(b)).collect()
}

fn tensors(problem: &Problem, weights: bool) -> Tensors {
    let mut all = Tensors::new();
    for (rank, input) in problem.inputs.iter().enumerate() {
        let (x, ids) = (
            vec![input.tokens, problem.hidden],
            vec![input.tokens, problem.top_k],
        );
        let data = bytes(&input.x, bf16::to_le_bytes);
        all.insert(format!("x.{rank}"), (Dtype::BF16, x, data));
        let data = bytes(&input.topk_ids, i32::to_le_bytes);
        all.insert(format!("topk_ids.{rank}"), (Dtype::I32, ids.clone(), data));
        if weights {
            let data = bytes(&input.topk_weights, f32::to_le_bytes);
            all.insert(format!("topk_weights.{rank}"), (Dtype::F32, ids, data));
        }
    }
    let scale = bytes(&SCALE, f32::to_le_bytes);
    all.insert(
        "expert_scale".into(),
        (Dtype::F32, vec![SCALE.len()], scale),
    );
    all
}

/// Runs the program on a file; the file that it wrote, or what it said.
fn replay(test: &str, input: &[u8], options: &[&str]) -> Result<Vec<u8>, String> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("replay-{test}"));
    std::fs::create_dir_all(&folder).unwrap();
    let (from, to) = (
        folder.join("in.safetensors"),
        folder.join("out.safetensors"),
    );
    std::fs::write(&from, input).unwrap();
    let mut program = Command::new(env!("CARGO_BIN_EXE_ferry-tests"));
    let program = program.arg("replay").args([&from, &to]).args(options);
    let output = program.output().unwrap();
    let written = std::fs::read(&to);
    std::fs::remove_dir_all(folder).unwrap();
    if output.status.success() {
        Ok(written.unwrap())
    } else {
        Err(String::from_utf8(output.stderr).unwrap())
    }
}

fn file_of(tensors: &Tensors) -> Vec<u8> {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        let view = TensorView::new(*dtype, shape.clone(), bytes);
        (name, view.unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// Asserts that a file is refused with these words.
fn refused(test: &str, tensors: &Tensors, words: &str) {
    match replay(test, &file_of(tensors), &[]) {
        Ok(_) => panic!("accepted, wanted: {words}"),
        Err(text) => assert!(text.contains(words), "{text}wanted: {words}"),
    }
}

fn comes_back(test: &str, mode: CombineMode, weights: bool) {
    let mut problem = problem();
    let given = file_of(&tensors(&problem, weights));
    let mut options = vec!["--p2p-world-size", "1", "--seed", "9"];
    options.extend(match mode {
        CombineMode::Reduced => ["--mode", "reduced"],
        CombineMode::Exact => ["--mode", "exact"],
    });
    options.extend(weights.then_some("--split"));
    let written = replay(test, &given, &options).unwrap();
    if !weights {
        // What no weights stand for.
        let inputs = problem.inputs.iter_mut();
        inputs.for_each(|input| input.topk_weights.fill(1.0));
    }
    let oracle = Oracle::new(&problem, &SCALE, TokenFormat::Bf16);
    let combined = oracle.combined(&problem, mode, weights);
    let file = SafeTensors::deserialize(&written).unwrap();
    for (rank, wanted) in dispatch(&problem).iter().enumerate() {
        let sums = values(&file, &format!("combined.{rank}"), bf16::from_le_bytes);
        compare_rows(rank, "combined", &combined[rank], &sums, problem.hidden).unwrap();
        let tokens = values(&file, &format!("tokens.{rank}"), bf16::from_le_bytes);
        compare_rows(rank, "tokens", &wanted.tokens, &tokens, problem.hidden).unwrap();
        let offsets = values(&file, &format!("row_offsets.{rank}"), u32::from_le_bytes);
        assert_eq!(offsets, wanted.row_offsets, "row_offsets.{rank}");
        let ids = values(&file, &format!("expert_ids.{rank}"), i32::from_le_bytes);
        assert_eq!(ids, wanted.expert_ids, "expert_ids.{rank}");
        let info = values(&file, &format!("src_info.{rank}"), i32::from_le_bytes);
        assert_eq!(info, wanted.src_info.as_flattened(), "src_info.{rank}");
    }
}

#[test]
fn a_file_comes_back_reduced() {
    comes_back("reduced", CombineMode::Reduced, true);
}

#[test]
fn a_file_without_weights_comes_back_reduced() {
    comes_back("reduced-bare", CombineMode::Reduced, false);
}

#[test]
fn a_file_comes_back_exact() {
    comes_back("exact", CombineMode::Exact, true);
}

#[test]
fn a_file_comes_back_apart() {
    comes_back("apart", CombineMode::Exact, false);
}

#[test]
fn a_missing_tensor_is_named() {
    let all = tensors(&problem(), true);
    for name in all.keys() {
        let mut some = all.clone();
        some.remove(name);
        refused("missing", &some, &format!("tensor {name} is missing"));
    }
    let mut bare = tensors(&problem(), false);
    bare.remove("x.2");
    refused("missing", &bare, "tensor x.2 is missing");
    bare.retain(|name, _| name == "expert_scale");
    refused("missing", &bare, "tensor x.0 is missing");
}

#[test]
fn a_rank_beyond_a_gap_is_not_dropped() {
    let mut all = tensors(&problem(), true);
    for name in ["x.1", "topk_ids.1", "topk_weights.1"] {
        all.remove(name);
    }
    refused("gap", &all, "tensor x.1 is missing");
    let mut far = tensors(&problem(), true);
    let weights = far.remove("topk_weights.2").unwrap();
    far.insert("topk_weights.4294967296".into(), weights);
    refused("gap", &far, "tensor topk_weights.4294967296");
}

#[test]
fn a_tensor_of_the_wrong_type_is_named() {
    let all = tensors(&problem(), true);
    for name in all.keys() {
        let mut some = all.clone();
        let dtype = &mut some.get_mut(name).unwrap().0;
        let wanted = *dtype;
        // Of the same size, so that the file is sound.
        *dtype = match wanted {
            Dtype::BF16 => Dtype::F16,
            Dtype::F32 => Dtype::I32,
            _ => Dtype::F32,
        };
        let words = format!("tensor {name} is {dtype:?}, wanted {wanted:?}");
        refused("type", &some, &words);
    }
}

#[test]
fn a_tensor_of_the_wrong_shape_is_named() {
    let changed = |name: &str, shape: &[usize]| {
        let mut all = tensors(&problem(), true);
        all.get_mut(name).unwrap().1 = shape.to_vec();
        all
    };
    for (name, shape, wanted) in [
        ("x.1", vec![48], "[tokens, hidden]"),
        ("topk_ids.0", vec![5, 3, 1], "[tokens, top_k]"),
        ("topk_weights.2", vec![12], "[tokens, top_k]"),
        ("expert_scale", vec![3, 4], "[experts]"),
        ("x.2", vec![2, 48], "[2, 24]"),
        ("topk_ids.1", vec![3, 2], "[2, 3]"),
        ("topk_weights.1", vec![1, 6], "[2, 3]"),
    ] {
        let words = format!("tensor {name} has shape {shape:?}, wanted {wanted}");
        refused("shape", &changed(name, &shape), &words);
    }
}

#[test]
fn what_is_no_problem_is_refused() {
    let mut wrong = problem();
    wrong.inputs[1].topk_ids[0] = 12;
    refused("id", &tensors(&wrong, true), "12");
    let text = replay("nonsense", b"nonsense", &[]).unwrap_err();
    assert!(text.contains("header"), "{text}");
}
