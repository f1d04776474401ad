//! Replays of given tensors: what comes back, and what is said of files that do not fit.

mod encoded;
mod options;
mod rows;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use ferry::{CombineMode, ScaleLayout, TokenFormat};
use ferry_reference::workload::Routing;
use ferry_reference::{Dispatched, Problem, bf16, dispatch, fp8, scale_layout};
use ferry_rig::formats::{self, Encoded};
use ferry_rig::verify::{Oracle, compare_rows};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

const SCALE: [f32; 12] = [
    0.5, 1.5, 2.0, 0.25, 3.0, 1.0, 1.25, 0.75, 4.0, 0.125, 1.75, 2.5,
];

/// Tensors by name: type, shape, bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Three ranks: a rank in the middle can be missing.
fn problem() -> Problem {
    let routing = Routing::Holes { probability: 0.2 };
    ferry_rig::problem(vec![5, 2, 4], [12, 3, 24], routing, 3)
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

/// Error of a file with these options.
fn refused_with(test: &str, tensors: &Tensors, options: &[&str], words: &str) {
    match replay(test, &file_of(tensors), options) {
        Ok(_) => panic!("accepted, wanted: {words}"),
        Err(text) => assert!(text.contains(words), "{text}wanted: {words}"),
    }
}

/// Asserts that a file is refused with these words.
fn refused(test: &str, tensors: &Tensors, words: &str) {
    refused_with(test, tensors, &[], words);
}

/// Asserts that two files hold the same tensors: their order may differ.
fn same_tensors(given: &[u8], wanted: &[u8]) {
    let [given, wanted] = [given, wanted].map(|file| SafeTensors::deserialize(file).unwrap());
    assert_eq!(given.len(), wanted.len());
    for (name, wanted) in wanted.iter() {
        let given = given.tensor(name).unwrap();
        assert_eq!(given.shape(), wanted.shape(), "{name}");
        assert!(given.data() == wanted.data(), "{name} differs");
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
    options.push("--all-at-once");
    let at_once = replay(test, &given, &options).unwrap();
    same_tensors(&at_once, &written);
    options.push("--give-up");
    options.extend(weights.then_some("--counts"));
    same_tensors(&replay(test, &given, &options).unwrap(), &written);
    if !weights {
        // What no weights stand for.
        let inputs = problem.inputs.iter_mut();
        inputs.for_each(|input| input.topk_weights.fill(1.0));
    }
    let oracle = Oracle::new(&problem, &SCALE, TokenFormat::Bf16);
    let combined = oracle.combined(mode, weights);
    let file = SafeTensors::deserialize(&written).unwrap();
    for (rank, wanted) in dispatch(&problem).iter().enumerate() {
        let sums = values(&file, &format!("combined.{rank}"), bf16::from_le_bytes);
        compare_rows(rank, "combined", &combined[rank], &sums, problem.hidden).unwrap();
        compare_rows_of(&file, rank, wanted, problem.hidden);
    }
}

/// Compares what dispatch gave a rank in BF16.
fn compare_rows_of(file: &SafeTensors<'_>, rank: usize, wanted: &Dispatched, hidden: usize) {
    let tokens = values(file, &format!("tokens.{rank}"), bf16::from_le_bytes);
    compare_rows(rank, "tokens", &wanted.tokens, &tokens, hidden).unwrap();
    let offsets = values(file, &format!("row_offsets.{rank}"), u32::from_le_bytes);
    assert_eq!(offsets, wanted.row_offsets, "row_offsets.{rank}");
    let ids = values(file, &format!("expert_ids.{rank}"), i32::from_le_bytes);
    assert_eq!(ids, wanted.expert_ids, "expert_ids.{rank}");
    let info = values(file, &format!("src_info.{rank}"), i32::from_le_bytes);
    let info = info.as_chunks::<2>().0;
    for (row, (given, wanted)) in info.iter().zip(&wanted.src_info).enumerate() {
        // Nobody writes those of the shared expert.
        let unwritten = [i32::from_le_bytes([0xa5; 4]); 2];
        let wanted = if wanted[1] < 0 { &unwritten } else { wanted };
        assert_eq!(given, wanted, "src_info.{rank}, row {row}");
    }
    assert_eq!(info.len(), wanted.src_info.len(), "src_info.{rank}");
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

/// NVFP4's global scale in the file.
const INPUT_SCALE: f32 = 0.375;

/// The options that name a format.
fn options(format: TokenFormat) -> Vec<&'static str> {
    let mut all = vec!["--format", format.name()];
    match format.scale_layout() {
        Some(ScaleLayout::RowMajor) => all.extend(["--scales", "row-major"]),
        Some(ScaleLayout::Tiled) => all.extend(["--scales", "tiled"]),
        None => (),
    }
    all
}

/// A rank's rows as the oracle encodes them, by expert.
fn encoded(problem: &Problem, rank: usize, format: TokenFormat) -> Vec<Vec<Encoded>> {
    let dispatched = &dispatch(problem)[rank];
    let row = |row: u32| {
        let token = &dispatched.tokens[row as usize * problem.hidden..][..problem.hidden];
        formats::encode_with(format, token, INPUT_SCALE)
    };
    let experts = dispatched.row_offsets.windows(2);
    experts
        .map(|pair| (pair[0]..pair[1]).map(row).collect())
        .collect()
}

/// Rows of each expert, and as many again as pad it.
fn padded(experts: &[Vec<Encoded>], format: TokenFormat) -> Vec<Option<&Encoded>> {
    let alignment = format.sizes().row_alignment as usize;
    let padded = experts.iter().flat_map(|rows| {
        let padding = rows.len().next_multiple_of(alignment) - rows.len();
        rows.iter()
            .map(Some)
            .chain(std::iter::repeat_n(None, padding))
    });
    padded.collect()
}

/// Type, shape and bytes of a rank's scales.
fn scales(
    experts: &[Vec<Encoded>],
    format: TokenFormat,
    groups: usize,
) -> (Dtype, Vec<usize>, Vec<u8>) {
    let rows = padded(experts, format);
    let bytes_of = |row: Option<&Encoded>, group: usize, bytes: usize| match row {
        Some(row) => row.scales[bytes * group..][..bytes].to_vec(),
        None => vec![0xa5; bytes],
    };
    match format.scale_layout() {
        None => {
            let columns = (0..groups).flat_map(|group| rows.iter().map(move |row| (*row, group)));
            let bytes = columns.flat_map(|(row, group)| bytes_of(row, group, 4));
            (Dtype::F32, vec![groups, rows.len()], bytes.collect())
        }
        Some(ScaleLayout::RowMajor) => {
            let bytes = rows.iter().flat_map(|row| bytes_of(*row, 0, groups));
            (Dtype::U8, vec![rows.len(), groups], bytes.collect())
        }
        Some(ScaleLayout::Tiled) => {
            let (bytes, _) = scale_layout::place(&scales_of(experts), groups);
            let blocks = bytes.len() / (128 * groups);
            (Dtype::U8, vec![blocks, groups / 4, 32, 4, 4], bytes)
        }
    }
}

/// `[expert][row][group]`.
fn scales_of(experts: &[Vec<Encoded>]) -> Vec<Vec<Vec<u8>>> {
    let rows = |rows: &Vec<Encoded>| rows.iter().map(|row| row.scales.clone()).collect();
    experts.iter().map(rows).collect()
}

/// Compares what dispatch gave a rank with the oracle's rows.
fn compare_codes(file: &SafeTensors<'_>, problem: &Problem, rank: usize, format: TokenFormat) {
    let experts = encoded(problem, rank, format);
    let rows = padded(&experts, format);
    let row_bytes = formats::row_bytes(format, problem.hidden);
    let codes = rows.iter().flat_map(|row| match row {
        Some(row) => row.payload.clone(),
        None => vec![0xa5; row_bytes],
    });
    let wanted = match format {
        TokenFormat::Bf16 => (Dtype::BF16, vec![rows.len(), problem.hidden]),
        _ => (Dtype::U8, vec![rows.len(), row_bytes]),
    };
    let same = |name: &str, (dtype, shape, bytes): (Dtype, Vec<usize>, Vec<u8>)| {
        let view = file.tensor(&format!("{name}.{rank}")).unwrap();
        let place = format!("{name}.{rank} of {format:?}");
        assert_eq!((view.dtype(), view.shape()), (dtype, &shape[..]), "{place}");
        assert!(view.data() == bytes, "{place}");
    };
    let has = |name: &str| file.tensor(&format!("{name}.{rank}")).is_ok();
    same("tokens", (wanted.0, wanted.1, codes.collect()));
    let groups = formats::groups(format, problem.hidden);
    match groups {
        0 => assert!(!has("scales")),
        _ => same("scales", scales(&experts, format, groups)),
    }
    match format.scale_layout() {
        Some(ScaleLayout::Tiled) => {
            let (_, offsets) = scale_layout::place(&scales_of(&experts), groups);
            let bytes = bytes(&offsets, u32::to_le_bytes);
            same("scales_offsets", (Dtype::U32, vec![offsets.len()], bytes));
        }
        _ => assert!(!has("scales_offsets")),
    }
    let inverses: Option<Vec<u16>> = rows
        .iter()
        .map(|row| row.and_then(|row| row.row_scale))
        .collect();
    match inverses.filter(|_| format.sizes().has_row_scale) {
        Some(inverses) => {
            let bytes = bytes(&inverses, u16::to_le_bytes);
            same("row_scales", (Dtype::BF16, vec![rows.len()], bytes));
        }
        None => assert!(!has("row_scales")),
    }
}

/// Two ranks, one of which has experts without rows and one with more than a block of 128.
fn problem_of_groups() -> Problem {
    let routing = Routing::Zipf { exponent: 2.0 };
    ferry_rig::problem(vec![140, 9], [12, 2, 256], routing, 4)
}

#[test]
fn every_format_comes_back_with_its_scales() {
    let problem = problem_of_groups();
    let mut given = tensors(&problem, true);
    let scale = INPUT_SCALE.to_le_bytes().to_vec();
    given.insert("input_scale".into(), (Dtype::F32, vec![1], scale));
    let given = file_of(&given);
    for format in TokenFormat::ALL {
        let written = replay("formats", &given, &options(format)).unwrap();
        let file = SafeTensors::deserialize(&written).unwrap();
        let oracle = Oracle::new(&problem, &SCALE, format);
        let combined = oracle.combined(CombineMode::Reduced, true);
        for (rank, wanted) in dispatch(&problem).iter().enumerate() {
            compare_codes(&file, &problem, rank, format);
            let offsets = values(&file, &format!("row_offsets.{rank}"), u32::from_le_bytes);
            let alignment = format.sizes().row_alignment;
            assert_eq!(offsets, fp8::padded_offsets(&wanted.row_offsets, alignment));
            let sums = values(&file, &format!("combined.{rank}"), bf16::from_le_bytes);
            compare_rows(rank, "combined", &combined[rank], &sums, problem.hidden).unwrap();
        }
    }
}

#[test]
fn without_an_input_scale_it_is_1() {
    let problem = problem_of_groups();
    let mut given = tensors(&problem, true);
    let mut written = |scale: Option<f32>| {
        if let Some(scale) = scale {
            let bytes = scale.to_le_bytes().to_vec();
            given.insert("input_scale".into(), (Dtype::F32, vec![1], bytes));
        }
        replay("scale", &file_of(&given), &["--format", "nvfp4"])
    };
    let bare = written(None).unwrap();
    assert!(bare == written(Some(1.0)).unwrap());
    assert!(bare != written(Some(0.5)).unwrap());
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-40, 1.5e38] {
        let text = written(Some(scale)).unwrap_err();
        assert!(text.contains("tensor input_scale is"), "{text}");
    }
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
