//! Replays whose rows stay as they came, and expert ids of 64 bits.

use ferry::{CombineMode, ReceiveLayout, TokenFormat};
use ferry_reference::{
    Finish, Problem, ReceivedRows, RowNumbers, bf16, combine_rows, combine_weights, receive_rows,
    round_to_bf16,
};
use ferry_rig::formats::{self, Encoded};
use ferry_rig::verify::{Oracle, compare_rows};
use ferry_rig::{ROW_FORMATS, ROW_LAYOUTS};
use safetensors::{Dtype, SafeTensors};

use super::{
    SCALE, Tensors, bytes, file_of, options, problem_of_groups, refused_with, replay, same_tensors,
    tensors, values,
};

/// Rows that a rank receives.
fn received(problem: &Problem, rank: usize, receive: ReceiveLayout) -> ReceivedRows {
    let compact = |capacity| receive_rows(problem, rank, RowNumbers::Compact { capacity });
    match receive {
        ReceiveLayout::Compact => compact(compact(0).sent),
        _ => receive_rows(problem, rank, RowNumbers::Strided { max_tokens: 140 }),
    }
}

/// A tensor: its name, its shape and its bytes.
type Wanted = (&'static str, Vec<usize>, Vec<u8>);

/// Tensors that describe received rows.
fn described(problem: &Problem, rows: &ReceivedRows, layout: Layout) -> Vec<Wanted> {
    let slots = vec![rows.tokens.len(), problem.top_k];
    let ids = match layout.wide {
        true => bytes(&rows.ids, i64::to_le_bytes),
        false => bytes(&rows.ids, |id| (id as i32).to_le_bytes()),
    };
    let words = |words: &[i32]| bytes(words, i32::to_le_bytes);
    let weights = bytes(&rows.weights, f32::to_le_bytes);
    let info = words(rows.src_info.as_flattened());
    let (ranks, experts) = (vec![problem.ranks], vec![problem.local_experts()]);
    vec![
        ("ids", slots.clone(), ids),
        ("weights", slots, weights),
        ("src_info", vec![rows.tokens.len(), 2], info),
        ("source_counts", ranks, words(&rows.source_counts)),
        ("expert_counts", experts, words(&rows.expert_counts)),
    ]
}

/// Tensors of received rows: payload and scales.
fn payload(
    problem: &Problem,
    rows: &ReceivedRows,
    format: TokenFormat,
    layout: Layout,
) -> Vec<Wanted> {
    let (count, hidden, clear) = (rows.tokens.len(), problem.hidden, layout.clear);
    let encode = |(source, token): (usize, usize)| {
        let row = &problem.inputs[source].x[token * hidden..][..hidden];
        formats::encode_with(format, row, 1.0)
    };
    let encoded: Vec<_> = rows.tokens.iter().map(|token| token.map(encode)).collect();
    let part = |part: fn(&Encoded) -> Vec<u8>| {
        let encoded = &encoded;
        move |row: usize| encoded[row].as_ref().map_or_else(Vec::new, part)
    };
    let image = |width: usize| vec![0xa5; width * count];
    let width = formats::row_bytes(format, hidden);
    let mut tokens = image(width);
    rows.write(&mut tokens, width, clear, part(|row| row.payload.clone()));
    let columns = if format == TokenFormat::Bf16 {
        hidden
    } else {
        width
    };
    let mut all = vec![("tokens", vec![count, columns], tokens)];
    let groups = formats::groups(format, hidden);
    let width = groups * format.sizes().scale_bytes as usize;
    let (mut scales, scales_of) = (image(width), part(|row| row.scales.clone()));
    if layout.transposed {
        rows.write_transposed(&mut scales, groups, clear, scales_of);
        all.push(("scales", vec![groups, count], scales));
    } else if groups > 0 {
        rows.write(&mut scales, width, clear, scales_of);
        all.push(("scales", vec![count, groups], scales));
    }
    if format.sizes().has_row_scale {
        let bytes_of = |row: &Encoded| row.row_scale.unwrap_or(0).to_le_bytes().to_vec();
        let mut own = image(2);
        rows.write(&mut own, 2, clear, part(bytes_of));
        all.push(("row_scales", vec![count], own));
    }
    all
}

/// Choices of a replay.
#[derive(Clone, Copy)]
struct Layout {
    receive: ReceiveLayout,
    transposed: bool,
    clear: bool,
    wide: bool,
}

impl Layout {
    fn options(&self, format: TokenFormat) -> Vec<&'static str> {
        let mut all = options(format);
        all.extend(["--receive", self.receive.name(), "--combine", "rows"]);
        all.push("--combine-weights");
        if self.wide {
            all.extend(["--ids", "i64"]);
        }
        all.extend(self.transposed.then_some("--transposed-scales"));
        all.extend(self.clear.then_some("--clear-absent"));
        all
    }
}

/// Every layout and format.
fn layouts() -> Vec<(Layout, TokenFormat)> {
    let mut all = Vec::new();
    for receive in ROW_LAYOUTS {
        for (index, format) in ROW_FORMATS.into_iter().enumerate() {
            let layout = Layout {
                receive,
                transposed: format == TokenFormat::BlockwiseFp8,
                clear: receive == ReceiveLayout::Strided && index % 2 == 0,
                wide: index % 2 == 1,
            };
            all.push((layout, format));
        }
        let layout = Layout {
            receive,
            transposed: false,
            clear: false,
            wide: false,
        };
        all.push((layout, TokenFormat::BlockwiseFp8));
    }
    all
}

#[test]
fn rows_come_back_in_every_layout_and_format() {
    let problem = problem_of_groups();
    let given = file_of(&tensors(&problem, true));
    for (layout, format) in layouts() {
        let options = layout.options(format);
        let written = replay("rows", &given, &options).unwrap();
        let file = SafeTensors::deserialize(&written).unwrap();
        let rows: Vec<_> = (0..2)
            .map(|rank| received(&problem, rank, layout.receive))
            .collect();
        let combined = Oracle::new(&problem, &SCALE, format).combined(CombineMode::Reduced, true);
        let weights: Vec<_> = rows.iter().map(|rows| rows.weights.clone()).collect();
        let weights = combine_weights(&problem, &rows, &weights);
        let mut count = 0;
        for rank in 0..2 {
            let all = [
                described(&problem, &rows[rank], layout),
                payload(&problem, &rows[rank], format, layout),
            ];
            for (name, dims, bytes) in all.concat() {
                let tensor = file.tensor(&format!("{name}.{rank}")).unwrap();
                assert_eq!(tensor.shape(), dims, "{name}.{rank}, {options:?}");
                assert!(tensor.data() == bytes, "{name}.{rank}, {options:?}");
                count += 1;
            }
            let sums = values(&file, &format!("combined.{rank}"), bf16::from_le_bytes);
            compare_rows(rank, "combined", &combined[rank], &sums, problem.hidden).unwrap();
            let back = values(
                &file,
                &format!("combined_weights.{rank}"),
                f32::from_le_bytes,
            );
            assert_eq!(back, weights[rank], "{options:?}");
        }
        assert_eq!(file.len(), count + 4, "{:?}", file.names());
    }
}

/// Answers of the stand-in for the experts, for the rows of a rank.
fn answers(problem: &Problem, rows: &ReceivedRows, rank: usize) -> Vec<bf16> {
    let (hidden, top_k, here) = (problem.hidden, problem.top_k, problem.local_experts());
    let mut answers = vec![bf16::NAN; rows.tokens.len() * hidden];
    for (row, token) in rows.tokens.iter().enumerate() {
        let Some((source, token)) = *token else {
            continue;
        };
        for column in 0..hidden {
            let x = problem.inputs[source].x[token * hidden + column].to_f32();
            let mut sum = 0.0;
            for slot in row * top_k..(row + 1) * top_k {
                if let Ok(expert) = usize::try_from(rows.ids[slot]) {
                    let answer = round_to_bf16(x * SCALE[rank * here + expert]);
                    sum += rows.weights[slot] * answer.to_f32();
                }
            }
            answers[row * hidden + column] = round_to_bf16(sum);
        }
    }
    answers
}

#[test]
fn sums_of_rows_begin_with_what_the_file_has() {
    let problem = problem_of_groups();
    let mut given = tensors(&problem, true);
    let (other, rows) = (problem_of_groups().inputs, 0..2);
    let mut initial = vec![[None, None]; 2];
    for rank in rows.clone() {
        let dims = vec![other[rank].tokens, problem.hidden];
        for (index, name) in ["initial", "second_initial"].into_iter().enumerate() {
            let values: Vec<bf16> = (other[rank].x.iter().rev())
                .map(|x| bf16::from_f32(x.to_f32() * (index as f32 - 0.75)))
                .collect();
            let tensor = (Dtype::BF16, dims.clone(), bytes(&values, bf16::to_le_bytes));
            given.insert(format!("{name}.{rank}"), tensor);
            initial[rank][index] = Some(values);
        }
    }
    let rows: Vec<_> = rows
        .map(|rank| received(&problem, rank, ReceiveLayout::Compact))
        .collect();
    let answers: Vec<_> = (rows.iter().enumerate())
        .map(|(rank, rows)| answers(&problem, rows, rank))
        .collect();
    let finish = [Finish::NONE, Finish::NONE];
    let wanted = combine_rows(&problem, &rows, &answers, &initial, &finish);
    let options = ["--receive", "compact", "--initial", "--split"];
    let written = replay("initial", &file_of(&given), &options).unwrap();
    let file = SafeTensors::deserialize(&written).unwrap();
    for (rank, wanted) in wanted.iter().enumerate() {
        assert!(file.tensor(&format!("combined.{rank}")).unwrap().data() == wanted);
    }
    given.remove("second_initial.1");
    refused_with(
        "initial",
        &given,
        &options,
        "tensor second_initial.1 is missing",
    );
}

/// Ids of the file, and those that dispatch is given, are of either type.
#[test]
fn ids_of_either_type_are_the_same() {
    let problem = problem_of_groups();
    let narrow = tensors(&problem, true);
    let mut wide: Tensors = narrow.clone();
    for (rank, input) in problem.inputs.iter().enumerate() {
        let ids = bytes(&input.topk_ids, |id| i64::from(id).to_le_bytes());
        let dims = vec![input.tokens, problem.top_k];
        wide.insert(format!("topk_ids.{rank}"), (Dtype::I64, dims, ids));
    }
    let by_expert = replay("ids", &file_of(&narrow), &[]).unwrap();
    for given in [&narrow, &wide] {
        let written = replay("ids", &file_of(given), &["--ids", "i64"]).unwrap();
        same_tensors(&written, &by_expert);
    }
    let far = wide.get_mut("topk_ids.1").unwrap();
    far.2[4] = 1;
    let id = (1 << 32) + i64::from(problem.inputs[1].topk_ids[0]);
    let words = format!("tensor topk_ids.1: there is no expert {id}");
    refused_with("ids", &wide, &[], &words);
}

#[test]
fn what_does_not_go_with_a_layout_is_refused() {
    let given = tensors(&problem_of_groups(), true);
    let refused = |options: &str, words: &[&str]| {
        let options: Vec<_> = options.split(' ').collect();
        for words in words {
            refused_with("layout", &given, &options, words);
        }
    };
    refused("--combine rows", &["--combine rows", "--receive by-expert"]);
    refused(
        "--receive view --combine assignments",
        &["--combine assignments", "view"],
    );
    refused("--initial", &["--initial", "by-expert"]);
    refused(
        "--receive compact --initial",
        &["tensor initial.0 is missing"],
    );
    refused(
        "--receive compact --late-weights",
        &["--late-weights", "compact"],
    );
    refused("--receive view --mode exact", &["receive", "combine"]);
    refused("--receive view --shared-expert", &["shared_scale"]);
    refused("--receive view --format mxfp8", &["receive", "format"]);
    refused("--transposed-scales", &["transposed_scales", "receive"]);
    refused(
        "--receive view --clear-absent",
        &["clear_absent", "receive"],
    );
    refused("--combine-weights", &["combine_weights", "receive"]);
    refused(
        "--receive rows",
        &["by-expert, view, strided, compact and padded"],
    );
}
