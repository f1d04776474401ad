//! Replays of given tensors: what comes back, and what is said of files that do not fit.

mod encoded;
mod options;
mod read;
mod rows;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use ferry::{ReceiveLayout, TokenFormat};
use ferry_reference::workload::Routing;
use ferry_reference::{Problem, bf16, share_of};
use ferry_rig::formats::INPUT_SCALE;
use ferry_rig::formats::given::Strides;
use ferry_rig::verify::{
    Compared, Contents, Groups, Oracle, RankOutputs, RowLayout, SHARED_FACTOR,
};
use ferry_rig::*;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// Tensors by name: type, shape, bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Experts of most problems.
const EXPERTS: usize = 12;

/// Three ranks: a rank in the middle can be missing.
fn problem() -> Problem {
    let routing = Routing::Holes { probability: 0.2 };
    ferry_rig::problem(vec![5, 2, 4], [EXPERTS, 3, 24], routing, 3)
}

/// Two ranks, one of which has experts without rows and one with more than a block of 128.
fn groups_case(seed: u64) -> Case {
    Case {
        experts: EXPERTS,
        hidden: 256,
        tokens: vec![vec![140, 9]],
        routing: Routing::Zipf { exponent: 2.0 },
        split: [0, u64::MAX][seed as usize / 2 % 2],
        ..Case::small(seed)
    }
}

fn bytes<T: Copy, const B: usize>(values: &[T], of: fn(T) -> [u8; B]) -> Vec<u8> {
    values.iter().flat_map(|&value| of(value)).collect()
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
    let scale = numbers(&factors(problem.experts, 0));
    all.insert("expert_scale".into(), scale);
    all
}

/// A tensor of f32.
fn numbers(values: &[f32]) -> (Dtype, Vec<usize>, Vec<u8>) {
    let data = bytes(values, f32::to_le_bytes);
    (Dtype::F32, vec![values.len()], data)
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

/// The options of a replay that makes the first round of a case.
fn options(case: &Case) -> Vec<String> {
    let (config, words) = (case.config(), |text: String| {
        text.split(' ').map(String::from).collect::<Vec<_>>()
    });
    let mut all = words(format!(
        "--mode {} --format {} --receive {} --seed {}",
        config.combine,
        case.format.name(),
        case.receive,
        case.seed
    ));
    if let Some(layout) = case.format.scale_layout() {
        all.extend(words(format!("--scales {layout}")));
    }
    if let Some(size) = config.p2p_world_size {
        all.extend(words(format!("--p2p-world-size {size}")));
    }
    let groups = Groups::of(&config);
    if groups.alignment > 1 {
        all.extend(words(format!("--alignment {}", groups.alignment)));
    }
    let is_encoded = case.gives_encoded();
    let is_transposed = is_encoded && places(case) == Places::Transposed;
    for (is_set, option) in [
        (case.is_split(0), "--split"),
        (case.shared_expert, "--shared-expert"),
        (case.skip_a2a, "--skip-a2a"),
        (case.has_wide_ids(0), "--ids i64"),
        (case.transposed_scales, "--transposed-scales"),
        (case.clear_absent, "--clear-absent"),
        (case.combine_weights, "--combine-weights"),
        (groups.clears_padding, "--clear-padding"),
        (groups.row_sources, "--row-sources"),
        (groups.m_indices, "--m-indices"),
        (is_encoded && !is_transposed, "--pass-through"),
        (is_transposed, "--pass-through transposed"),
    ] {
        if is_set {
            all.extend(words(option.into()));
        }
    }
    all
}

/// Places of the scales that a case's dispatch is given.
fn places(case: &Case) -> Places {
    match (case.format, case.strides) {
        (TokenFormat::BlockwiseFp8, Strides::Transposed) => Places::Transposed,
        _ => Places::RowMajor,
    }
}

/// Makes a case one that a file can have: a first round, with weights on all ranks or on none, and calls and
/// ids that are alike on all.
fn as_a_file(case: Case) -> Case {
    let alike = |bits: u64| if bits & 1 == 0 { 0 } else { u64::MAX };
    let is_padded = case.receive == ReceiveLayout::Padded;
    // In exact mode rows stay apart without.
    let needs_weights = case.skip_a2a || is_padded || case.how == Return::Exact;
    let has_weights = case.how != Return::Apart && (needs_weights || case.seed % 8 != 7);
    Case {
        tokens: vec![case.tokens[0].clone()],
        most_tokens: 0,
        split: if case.skip_a2a { 0 } else { alike(case.split) },
        wide_ids: alike(case.wide_ids),
        unweighted: if has_weights { 0 } else { u64::MAX },
        counted: None,
        finish: None,
        short: false,
        specials: false,
        initial: [false; 2],
        options: case.receive == ReceiveLayout::Padded || alike(case.wide_ids) > 0,
        ..case
    }
}

/// Replays the first round of a case, half of them also in calls of all ranks after a dispatch that is given
/// up, and compares every tensor with the oracle.
fn comes_back(test: &str, case: Case) {
    let case = as_a_file(case);
    let (problem, weights) = (case.problem(0), !case.is_unweighted(0));
    let mut given = match case.gives_encoded() {
        true => encoded::with_codes(&problem, &case),
        false => tensors(&problem, weights),
    };
    given.insert("shared_scale".into(), numbers(&[SHARED_FACTOR]));
    if !case.gives_encoded() {
        given.insert("input_scale".into(), numbers(&[INPUT_SCALE]));
    }
    let (given, options) = (file_of(&given), options(&case));
    let mut options: Vec<_> = options.iter().map(String::as_str).collect();
    let run = |options: &[&str]| {
        replay(test, &given, options).unwrap_or_else(|error| panic!("{error}: {case:?}"))
    };
    let written = run(&options);
    if case.seed % 4 < 2 {
        options.extend(["--all-at-once", "--give-up"]);
        options.extend(case.is_split(0).then_some("--counts"));
        same_tensors(&run(&options), &written);
    }
    let file = SafeTensors::deserialize(&written).unwrap();
    judge(&case, &problem, read::outputs(&file, &case));
}

/// Compares the outputs of a case's round with the oracle's.
fn judge(case: &Case, problem: &Problem, mut outputs: Vec<RankOutputs>) {
    let (scale, compared) = (factors(case.experts, 0), case.compared());
    let is_summed = case.how != Return::Apart;
    let rows_of = |output: &RankOutputs| match &output.received {
        Contents::Rows(rows) => rows.layout.rows,
        Contents::ByExpert(_) => 0,
    };
    let most = outputs.iter().map(rows_of).max().unwrap_or(0);
    let verify = |oracle: Oracle, outputs: &mut [RankOutputs]| {
        for output in &mut *outputs {
            let weights = std::mem::take(&mut output.combined_weights);
            // A file has as many compact rows as came to its rank; weights come back from all ranks.
            let layout = RowLayout::of(&case.config(), most);
            let verified = oracle.verify_returned(output.rank, &layout, &weights);
            verified.unwrap_or_else(|error| panic!("{error}: {case:?}"));
        }
        let verified = oracle.verify(case.how.mode(), is_summed, outputs);
        verified.unwrap_or_else(|error| panic!("{error}: {case:?}"));
    };
    if !case.skip_a2a {
        verify(
            Oracle::of(problem, &scale, case.format, compared),
            &mut outputs,
        );
        return;
    }
    let all = Problem {
        ranks: 1,
        inputs: problem.inputs[..1].to_vec(),
        ..*problem
    };
    let here = case.experts / case.ranks;
    for (rank, output) in outputs.iter_mut().enumerate() {
        let compared = Compared {
            part: Some((rank, case.ranks)),
            ..compared
        };
        let (share, scale) = (
            share_of(&all, case.ranks, rank),
            &scale[rank * here..][..here],
        );
        // The only one there.
        output.rank = 0;
        verify(
            Oracle::of(&share, scale, case.format, compared),
            std::slice::from_mut(output),
        );
    }
}

#[test]
fn every_format_comes_back_by_expert_and_in_blocks() {
    let kinds = TokenFormat::ALL.map(|format| [(format, false), (format, true)]);
    for (seed, &(format, is_padded)) in (0..).zip(kinds.as_flattened()) {
        let tables = seed % 4 > 1;
        comes_back(
            "formats",
            Case {
                format,
                receive: match is_padded {
                    true => ReceiveLayout::Padded,
                    false => ReceiveLayout::ByExpert,
                },
                transposed_scales: is_padded && format == TokenFormat::BlockwiseFp8,
                p2p_world_size: 1 + seed as usize / 2 % 2,
                groups: Groups {
                    alignment: if tables { 8 << (seed % 6) } else { 1 },
                    clears_padding: tables,
                    row_sources: tables,
                    m_indices: tables,
                    padded: 0,
                },
                ..groups_case(seed)
            },
        );
    }
}

#[test]
fn rows_come_back_in_every_layout_and_format() {
    let layouts = ROW_LAYOUTS.map(|receive| ROW_FORMATS.map(|format| (receive, format)));
    for (seed, &(receive, format)) in (0..).zip(layouts.as_flattened()) {
        let of = |is_transposed: bool| Case {
            receive,
            format,
            transposed_scales: is_transposed,
            clear_absent: receive == ReceiveLayout::Strided && seed % 2 == 0,
            wide_ids: [0, u64::MAX][seed as usize % 2],
            combine_weights: true,
            ..groups_case(seed)
        };
        comes_back("rows", of(false));
        if format == TokenFormat::BlockwiseFp8 {
            comes_back("rows", of(true));
        }
    }
}

/// Sizes, ways back, shared experts, groups and nodes as they are drawn, in every layout.
#[test]
fn any_case_comes_back() {
    for seed in drawn(80_000..80_080) {
        comes_back(
            "any",
            match seed % 5 {
                0 | 1 => any_case(seed),
                2 => padded_case(seed),
                3 => local_case(seed),
                _ => any_rows_case(seed),
            },
        );
    }
}

#[test]
fn without_an_input_scale_it_is_1() {
    let mut given = tensors(&groups_case(4).problem(0), true);
    let mut written = |scale: Option<f32>| {
        if let Some(scale) = scale {
            given.insert("input_scale".into(), numbers(&[scale]));
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
