//! The program that tests GPUs, as far as a machine without them can run it.

use std::fs::{self, Permissions};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ferry_rig::drawn;

fn program(arguments: &str) -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_ferry-tests"));
    program.args(arguments.split(' '));
    program
}

fn printed(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

/// Beginnings of the names of tests that need GPUs. Most of them are only in a build for GPUs.
const NEED_GPUS: [&str; 12] = [
    "a communicator that a graph holds",
    "a graph of a ",
    "a graph replayed 100 times with fresh data",
    "a launch that fails on one of all ranks",
    "conversion: ",
    "graph replays back to back, every output, BF16, 64 tokens",
    "graph replays back to back, every output, NVFP4, 64 tokens",
    "graphs of ",
    "host time of a call of all ranks at once",
    "kernels of a device that was dropped",
    "order on one GPU: ",
    "ranks on one GPU: ",
];

/// Runs the suite's tests of this choice on a simulated group. All that are listed pass, but those that need
/// GPUs.
fn conforms(choice: &[&str]) {
    let run = |more: &[&str]| {
        let mut suite = program("gpu --group simulated --ranks 2 --quick");
        let output = suite.args(choice).args(more).output().unwrap();
        assert!(output.status.success(), "{}", printed(&output));
        printed(&output)
    };
    let (listed, told) = (run(&["--list"]), run(&[]));
    let mut passed = told.lines().filter_map(|line| line.strip_prefix("ok   "));
    let runs = |name: &&str| !NEED_GPUS.iter().any(|begin| name.starts_with(begin));
    for name in listed.lines().filter(runs) {
        let line = passed.next().unwrap_or_else(|| panic!("{name}: {told}"));
        assert!(line.starts_with(name), "{name}: {line}");
    }
}

/// Runs these of `all` parts of a choice of the suite's tests; the quick tests draw four of them.
fn parts_conform(choice: &[&str], parts: Range<u64>, all: u64) {
    for part in drawn(parts) {
        let part = format!("{}/{all}", part + 1);
        conforms(&[choice, &["--part", &part]].concat());
    }
}

/// Every test but those of 4,096 tokens, in three processes at a time.
#[test]
fn a_simulated_group_conforms_1() {
    parts_conform(&["--skip", "4096"], 0..16, 48);
}

#[test]
fn a_simulated_group_conforms_2() {
    parts_conform(&["--skip", "4096"], 16..32, 48);
}

#[test]
fn a_simulated_group_conforms_3() {
    parts_conform(&["--skip", "4096"], 32..48, 48);
}

/// Tests of 4,096 tokens, but for plain rows by expert, which take longest.
#[test]
fn a_simulated_group_conforms_with_many_tokens() {
    let filters = ["--filter", "4096 tokens, ", "--filter", "4096 tokens and"];
    let choice = [&filters[..], &["--skip", "4096 tokens, hidden"]].concat();
    parts_conform(&choice, 0..12, 12);
}

#[test]
fn tests_are_listed_without_being_run() {
    let mut list = program("gpu --group simulated --ranks 2 --list --filter");
    let output = list.arg("rounds back to back").output().unwrap();
    let text = "1000 rounds back to back, 2 a node\n1000 rounds back to back, 1 a node\n";
    assert_eq!(printed(&output), text);
}

#[test]
fn tests_are_left_out_by_a_part_of_their_names() {
    let mut list = program("gpu --group simulated --ranks 2 --share-gpus --list --filter");
    let output = list
        .args(["rounds back to back", "--skip", ", 1 a node"])
        .output()
        .unwrap();
    assert_eq!(printed(&output), "1000 rounds back to back, 2 a node\n");
}

#[test]
fn simulated_ranks_of_every_program_take_the_flag_of_ranks_that_share_gpus() {
    for arguments in [
        "gpu --group simulated --ranks 2 --share-gpus --quick --filter two\u{a0}communicators",
        "soak --group simulated --ranks 2 --share-gpus --count 1",
        "demo --group simulated --ranks 2 --share-gpus --tokens 4",
        "killed --group simulated --ranks 2 --share-gpus --times 1 --deadline-ms 20000",
    ] {
        let mut program = Command::new(env!("CARGO_BIN_EXE_ferry-tests"));
        let words = arguments.split(' ').map(|word| word.replace('\u{a0}', " "));
        let output = program.args(words).output().unwrap();
        let text = printed(&output);
        assert!(output.status.success(), "{arguments}: {text}");
    }
}

#[test]
fn the_simulator_refuses_kernels_of_files_by_their_flag() {
    for flag in ["--kernels", "--probe-kernels"] {
        let mut suite = program("gpu --group simulated --ranks 2 --list");
        let output = suite.args([flag, "a.ptx"]).output().unwrap();
        let wanted =
            format!("error: {flag}: the simulator has none; give --group local, node or nvshmem\n");
        assert_eq!(printed(&output), wanted);
        assert!(!output.status.success());
    }
}

#[test]
fn when_the_time_is_over_no_test_begins() {
    let output = program("gpu --group simulated --ranks 2 --quick --seconds 0")
        .output()
        .unwrap();
    let text = printed(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("0 passed, 0 failed, 0 skipped\n"), "{text}");
    assert!(text.contains(" not run: the time was over"), "{text}");
}

/// The deadline is for a loaded machine: survivors that are not told of the loss would wait for a minute.
#[test]
fn survivors_of_a_killed_process_are_told_and_meet_again() {
    let output = program("killed --group simulated --ranks 3 --times 4 --deadline-ms 20000")
        .output()
        .unwrap();
    let text = printed(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("4 passed, 0 failed"), "{text}");
}

#[test]
fn processes_are_not_killed_over_a_network_where_they_share_a_gpu() {
    let output = program("killed --network relaxed --ranks 1000")
        .output()
        .unwrap();
    let text = printed(&output);
    assert!(!output.status.success(), "{text}");
    assert!(
        text.contains("--network needs a GPU for each of the 1000 ranks"),
        "{text}"
    );
}

#[test]
fn processes_with_a_key_in_a_file_meet() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("key");
    fs::write(&path, [7; 32]).unwrap();
    let output = program("killed --group simulated --ranks 3 --times 1 --deadline-ms 20000")
        .arg("--rendezvous-key")
        .arg(&path)
        .output()
        .unwrap();
    let text = printed(&output);
    assert!(output.status.success(), "{text}");
    let output =
        program("killed --group simulated --ranks 2 --times 1 --rendezvous-key no/such/file")
            .output()
            .unwrap();
    let text = printed(&output);
    assert!(
        !output.status.success() && text.contains("no/such/file"),
        "{text}"
    );
    // A key needs a rendezvous.
    let output = program("gpu --group simulated --rendezvous-key key")
        .output()
        .unwrap();
    let text = printed(&output);
    assert!(
        !output.status.success() && text.contains("--rendezvous <HOST:PORT>"),
        "{text}"
    );
}

/// Makes a folder with this script as `compute-sanitizer`.
fn folder_with(name: &str, script: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("compute-sanitizer");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    folder
}

/// Runs tests with this script as `compute-sanitizer`.
fn sanitize(name: &str, script: &str, arguments: &str) -> Output {
    let folder = folder_with(name, script);
    let path = std::env::var("PATH").unwrap_or_default();
    program("sanitize --group simulated --filter no_such --filter exist")
        .args(arguments.split(' '))
        .env("PATH", format!("{}:{path}", folder.display()))
        .output()
        .unwrap()
}

/// Script that drops the options before the program, each with a value.
const DROP_OPTIONS: &str = r#"while [ "${1#--}" != "$1" ]; do shift 2; done"#;

#[test]
fn a_sanitizer_that_finds_nothing_is_fine() {
    let script = format!("{DROP_OPTIONS}\nexec \"$@\"");
    let output = sanitize("finds-nothing", &script, "--seconds 100");
    let text = printed(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("ok   initcheck: 2 tests ran in"), "{text}");
    assert!(text.contains("4 passed, 0 failed"), "{text}");
}

#[test]
fn a_sanitizer_that_finds_something_fails() {
    let script = format!("{DROP_OPTIONS}\n\"$@\"\necho '========= Invalid read'\nexit 99");
    let output = sanitize("finds-something", &script, "--tool synccheck");
    let text = printed(&output);
    assert!(!output.status.success(), "{text}");
    assert!(text.contains("FAIL synccheck: 2 tests ran in"), "{text}");
    assert!(text.contains("exit status: 99"), "{text}");
}

#[test]
fn a_sanitizer_that_takes_too_long_is_stopped_and_says_what_was_cut_short() {
    let script = "echo 'ok   an expert that does not exist (1 ms)'\nsleep 600";
    let output = sanitize("too-long", script, "--tool racecheck --seconds 2");
    let text = printed(&output);
    assert!(output.status.success(), "{text}");
    let wanted = "; cut short, 1 not run: a rank with 4096 tokens and no expert that exists";
    assert!(text.contains(wanted), "{text}");
}

#[test]
fn a_sanitizer_that_is_missing_is_named() {
    if Path::new("/usr/local/cuda/bin/compute-sanitizer").exists() {
        return;
    }
    let output = program("sanitize").env("PATH", "").output().unwrap();
    let text = printed(&output);
    assert!(!output.status.success(), "{text}");
    assert!(
        text.contains("compute-sanitizer is neither in PATH nor in"),
        "{text}"
    );
}
