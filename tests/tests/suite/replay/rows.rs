//! Replays whose sums begin with rows of the file, and expert ids of 64 bits.

use ferry_reference::{Finish, bf16, combine_rows, receive_rows};
use ferry_rig::verify::Contents;
use ferry_rig::{Case, factors};
use safetensors::{Dtype, SafeTensors};

use super::{
    Tensors, bytes, file_of, groups_case, read, refused_with, replay, same_tensors, tensors,
};

#[test]
fn sums_of_rows_begin_with_what_the_file_has() {
    let case = Case {
        receive: ferry::ReceiveLayout::Compact,
        ..groups_case(4)
    };
    let (problem, scale) = (case.problem(0), factors(case.experts, 0));
    let mut given = tensors(&problem, true);
    let mut initial = vec![[None, None]; 2];
    for (rank, input) in problem.inputs.iter().enumerate() {
        let dims = vec![input.tokens, problem.hidden];
        for (index, name) in ["initial", "second_initial"].into_iter().enumerate() {
            let values: Vec<bf16> = (input.x.iter().rev())
                .map(|x| bf16::from_f32(x.to_f32() * (index as f32 - 0.75)))
                .collect();
            let tensor = (Dtype::BF16, dims.clone(), bytes(&values, bf16::to_le_bytes));
            given.insert(format!("{name}.{rank}"), tensor);
            initial[rank][index] = Some(values);
        }
    }
    let options = ["--receive", "compact", "--initial", "--split"];
    let written = replay("initial", &file_of(&given), &options).unwrap();
    let file = SafeTensors::deserialize(&written).unwrap();
    let (mut rows, mut answers) = (Vec::new(), Vec::new());
    for output in read::outputs(&file, &case) {
        let Contents::Rows(received) = output.received else {
            panic!("rows by expert")
        };
        rows.push(receive_rows(
            &problem,
            output.rank,
            received.layout.numbers(),
        ));
        answers.push(received.answers(&scale, output.rank, |_, source, token| {
            &problem.inputs[source].x[token * case.hidden..][..case.hidden]
        }));
    }
    let finish = [Finish::NONE, Finish::NONE];
    let wanted = combine_rows(&problem, &rows, &answers, &initial, &finish);
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
    let problem = groups_case(4).problem(0);
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
    let given = tensors(&groups_case(4).problem(0), true);
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
