//! The demo's command line, and the figures it prints.

use std::process::Command;

use ferry_reference::text::{TextSpec, problem};

/// Runs the demo, and returns its output, or the text of its error.
fn demo(options: &[&str]) -> Result<String, String> {
    let mut program = Command::new(env!("CARGO_BIN_EXE_ferry-tests"));
    let output = program.arg("demo").args(options).output().unwrap();
    if output.status.success() {
        Ok(String::from_utf8(output.stdout).unwrap())
    } else {
        Err(String::from_utf8(output.stderr).unwrap())
    }
}

/// Asserts that the demo fails with an error that has all of these words.
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

#[test]
fn every_receive_layout_is_carried() {
    for receive in ["by-expert", "view", "strided", "compact", "padded"] {
        let options = ["--gpus", "none", "--tokens", "8", "--receive", receive];
        let text = demo(&options).unwrap();
        let wanted = format!("received  {receive}: ");
        assert!(text.contains(&wanted), "{text}");
        assert!(text.contains("every bit agrees; largest error 0"), "{text}");
    }
    refused(
        &["--receive", "rows"],
        &["by-expert, view, strided, compact and padded"],
    );
}

#[test]
fn the_wire_carries_headers_too() {
    let text = "The quick brown fox jumps over the lazy dog.";
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("demo-wire");
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("text");
    std::fs::write(&path, text).unwrap();
    let path = path.to_str().unwrap();
    let sizes = "--ranks 2 --tokens 8 --hidden 16 --experts 4 --top-k 3 --seed 5";
    let mut options = vec!["--gpus", "none", "--text", path];
    options.extend(sizes.split(' '));
    let printed = demo(&options).unwrap();
    std::fs::remove_dir_all(folder).unwrap();
    let spec = TextSpec {
        ranks: 2,
        experts: 4,
        top_k: 3,
        hidden: 16,
        tokens_per_rank: 8,
        seed: 5,
    };
    let problem = problem(text, spec).unwrap();
    let far = |rank: usize, token: usize| {
        let entries = &problem.inputs[rank].topk_ids[3 * token..][..3];
        entries
            .iter()
            .filter(|&id| *id as usize / 2 != rank)
            .count() as u64
    };
    let entries: Vec<u64> = (0..16).map(|i| far(i / 8, i % 8)).collect();
    // With two ranks there is one other: a token goes there once, however many experts it has there.
    let once = entries.iter().filter(|&&entries| entries > 0).count() as u64;
    let each: u64 = entries.iter().sum();
    assert!(
        0 < once && once < each,
        "{entries:?}: nothing to tell apart"
    );
    // 16 BF16 elements; then two words for each of 3 experts, padded to a multiple of 16 bytes.
    let (payload, header) = (32, 32);
    for wanted in [
        format!("dispatch {} bytes", once * (payload + header)),
        format!("combine {} bytes", once * payload),
        format!("{} and {}", each * (payload + header), each * payload),
    ] {
        assert!(printed.contains(&wanted), "{printed}wanted: {wanted}");
    }
}
