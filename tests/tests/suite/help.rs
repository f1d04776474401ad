//! Texts of `--help`.

use std::process::Command;

/// Output of a program with `--help` after these arguments.
fn help(program: &str, arguments: &[&str]) -> String {
    let mut program = Command::new(program);
    let output = program.args(arguments).arg("--help").output().unwrap();
    assert!(output.status.success(), "{arguments:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Names of the subcommands that `ferry-tests --help` lists.
fn subcommands(help: &str) -> Vec<&str> {
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let lines = lines.take_while(|line| !line.is_empty());
    let names = lines.filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").collect()
}

/// The line of the list stands before a subcommand's usage, and more in paragraphs after it.
#[test]
fn every_subcommand_has_its_longer_text() {
    let tests = env!("CARGO_BIN_EXE_ferry-tests");
    let list = help(tests, &[]);
    let names = subcommands(&list);
    assert_eq!(names.len(), 12, "{names:?}");
    for name in names {
        let text = help(tests, &[name]);
        let (about, _) = text.split_once("\nUsage:").unwrap();
        let (first, more) = about.split_once("\n\n").unwrap_or((about, ""));
        assert!(list.contains(first.trim()), "{name}: {first}");
        assert!(more.trim().len() > 80, "{name} has one paragraph: {about}");
    }
    let demo = help(env!("CARGO_BIN_EXE_ferry-demo"), &[]);
    assert!(demo.contains("sequential oracle"), "{demo}");
}

#[test]
fn replay_names_the_tensors_of_its_files() {
    let text = help(env!("CARGO_BIN_EXE_ferry-tests"), &["replay"]);
    let (_, files) = text
        .split_once("Files (safetensors)")
        .expect("a part about files");
    let (input, output) = files.split_once("OUT gets").expect("a part about OUT");
    for name in [
        "x.r",
        "topk_ids.r",
        "topk_weights.r",
        "expert_scale",
        "input_scale",
        "shared_scale",
        "residual.r",
        "initial.r",
        "second_initial.r",
        "codes.r",
        "x_scales.r",
    ] {
        assert!(input.contains(name), "IN: {name}");
    }
    for name in [
        "tokens.r",
        "scales.r",
        "scales_offsets.r",
        "row_scales.r",
        "src_info.r",
        "combined.r",
        "row_offsets.r",
        "expert_ids.r",
        "weights.r",
        "expert_counts.r",
        "row_ends.r",
        "m_indices.r",
        "source_ranges.r",
        "ids.r",
        "source_counts.r",
        "combined_weights.r",
    ] {
        assert!(output.contains(name), "OUT: {name}");
    }
    assert!(output.contains("at least 1"));
}
