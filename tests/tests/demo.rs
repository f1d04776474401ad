//! The demo's command line, and the figures it prints.

use std::process::Command;

/// Runs the demo: what it printed, or what it said of an error.
fn demo(options: &[&str]) -> Result<String, String> {
    let mut program = Command::new(env!("CARGO_BIN_EXE_ferry-tests"));
    let output = program.arg("demo").args(options).output().unwrap();
    if output.status.success() {
        Ok(String::from_utf8(output.stdout).unwrap())
    } else {
        Err(String::from_utf8(output.stderr).unwrap())
    }
}

/// Asserts that the demo is refused with all of these words.
fn refused(options: &[&str], words: &[&str]) {
    match demo(options) {
        Ok(_) => panic!("accepted {options:?}, wanted: {words:?}"),
        Err(text) => {
            let all = words.iter().all(|words| text.contains(words));
            assert!(all, "{text}wanted: {words:?}");
        }
    }
}

#[test]
fn more_ranks_than_can_be_counted_are_refused() {
    // One more than fits: without a check, one rank.
    let options = ["--gpus", "none", "--ranks", "4294967297"];
    refused(&options, &["--ranks 4294967297"]);
}

#[test]
fn no_ranks_are_refused_by_name() {
    refused(&["--gpus", "none", "--ranks", "0"], &["ranks is 0"]);
}

#[test]
fn as_many_gpus_as_ranks() {
    let options = ["--gpus", "2", "--ranks", "4"];
    refused(&options, &["--gpus 2", "--ranks 4"]);
}

#[test]
fn ranks_without_gpus_are_simulated() {
    let text = demo(&["--gpus", "none", "--ranks", "2", "--tokens", "8"]).unwrap();
    assert!(text.contains("2 ranks in the simulator"), "{text}");
    assert!(text.contains("every bit agrees; largest error 0"), "{text}");
}
