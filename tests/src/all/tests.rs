//! Tests of the suites, with programs that only say how they were called.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use clap::Parser;

use super::*;

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    all: AllArgs,
}

fn chosen(text: &str) -> Result<Vec<Suite>> {
    let words = text.split_whitespace();
    let args = Arguments::parse_from(["all"].into_iter().chain(words)).all;
    args.suites(args.gpus.unwrap_or(0))
}

/// A line for each suite: its name, processes and words.
fn lines(text: &str) -> Vec<String> {
    let suites = chosen(text).unwrap().into_iter();
    let line = |suite: Suite| {
        let processes = suite
            .processes
            .map_or(String::new(), |number| format!("{number} "));
        let mps = if suite.needs_mps { "mps " } else { "" };
        format!(
            "{}: {processes}{mps}{}",
            suite.name,
            suite.arguments.join(" ")
        )
    };
    suites.map(line).collect()
}

#[test]
fn ranks_with_a_gpu_each_run_in_every_group_and_require_the_gpus() {
    assert_eq!(
        lines("2"),
        [
            "local: gpu --require-gpus 2",
            "node: 2 gpu --group node --require-gpus 2",
            "nvshmem: 2 gpu --group nvshmem --require-gpus 2",
            "killed-node: killed --group node --require-gpus 2",
            "killed-nvshmem: killed --require-gpus 2",
        ]
    );
    assert_eq!(lines("1").len(), 3, "nobody is left of one");
}

#[test]
fn ranks_that_share_a_gpu_run_in_nodes_of_every_size() {
    let shared = "--share-gpus --ranks 4 --require-gpus 1";
    assert_eq!(
        lines("1 --ranks 4"),
        [
            format!("local: gpu {shared}"),
            format!(
                "nvshmem-4: 4 mps gpu --group nvshmem {shared} --skip , 2 a node --skip , 1 a node"
            ),
            format!("nvshmem-2: 4 mps gpu --group nvshmem {shared} --quick --filter , 2 a node"),
            format!("nvshmem-1: 4 mps gpu --group nvshmem {shared} --quick --filter , 1 a node"),
            format!("node: 4 gpu --group node {shared} --quick"),
            "demo: demo --share-gpus --ranks 4".into(),
            format!("killed-node: killed --group node --deadline-ms 2000 {shared}"),
            format!("killed-node-mps: mps killed --group node --deadline-ms 2000 {shared}"),
            format!("killed-nvshmem: mps killed --deadline-ms 2000 {shared}"),
        ]
    );
}

#[test]
fn the_sanitizer_runs_on_one_gpu() {
    assert_eq!(lines("1 --sanitize"), ["sanitize: sanitize"]);
    let shared = "--share-gpus --ranks 2";
    assert_eq!(
        lines("1 --sanitize --ranks 2"),
        [
            format!("memcheck: sanitize --tool memcheck --seconds 500 {shared}"),
            format!("racecheck: sanitize --tool racecheck --seconds 120 {shared}"),
        ]
    );
}

#[test]
fn only_suites_that_there_are_can_be_chosen() {
    assert_eq!(lines("1 --ranks 2 --only demo").len(), 1);
    for (given, part) in [
        ("2 --sanitize", "give 1"),
        ("1 --ranks 0", "--ranks 0"),
        ("0", "no GPU was found"),
        (
            "1 --ranks 2 --only nvshmem-4",
            "--only nvshmem-4: no such suite; there are local, nvshmem-2, nvshmem-1",
        ),
    ] {
        let error = chosen(given).err().unwrap().to_string();
        assert!(error.contains(part), "{given}: {error}");
    }
}

#[test]
fn the_first_of_the_visible_gpus_are_shared() {
    let of = |gpus, visible: Option<&str>| first(gpus, visible.map(OsString::from));
    assert_eq!(of(2, None), "0,1");
    assert_eq!(of(2, Some("5,3,6")), "5,3");
    assert_eq!(of(1, Some("GPU-7,GPU-8")), "GPU-7");
    assert_eq!(of(2, Some("")), "");
}

/// A program of bash in a folder.
fn program(folder: &Path, name: &str, lines: &str) -> OsString {
    let file = folder.join(name);
    fs::write(
        &file,
        format!("#!/bin/bash\ncd {}\n{lines}\n", folder.display()),
    )
    .unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    file.into()
}

#[test]
fn each_suite_sees_its_gpus_and_no_daemon_but_its_own_which_ends_with_it() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path();
    let says = "mps=; [[ -d $CUDA_MPS_PIPE_DIRECTORY ]] && mps=' without MPS'
        [[ -e $CUDA_MPS_PIPE_DIRECTORY/control ]] && mps=' under MPS'
        echo \"$1 sees $CUDA_VISIBLE_DEVICES$mps $NVSHMEM_DISABLE_NVLS$NCCL_NVLS_ENABLE\" >> log
        [[ $* != *nvshmem* ]]";
    let daemon = "if [[ ${1:-} == -d ]]; then touch $CUDA_MPS_PIPE_DIRECTORY/control
        echo daemon sees $CUDA_VISIBLE_DEVICES >> log; else read -r word; echo $word >> log; fi";
    let mut machine = Machine {
        program: program(folder, "says", says),
        mpirun: program(
            folder,
            "mpirun",
            "echo $2 $3 $4 >> log; shift 4; exec \"$@\"",
        ),
        mps: program(folder, "mps", daemon),
        commit: "0123abc\n".into(),
        gpus: 2,
        visible: Some("5,3".into()),
    };
    let suites = chosen("2 --ranks 2 --only demo --only nvshmem-1 --only killed-node").unwrap();
    let failed = machine.run_all(&suites).unwrap_err().to_string();
    assert_eq!(failed, "1 suites failed");
    let log = fs::read_to_string(folder.join("log")).unwrap();
    let wanted = "daemon sees 5,3\n--oversubscribe -n 2\ngpu sees 0,1 under MPS 10\nquit -t 10\n\
        demo sees 5,3 without MPS 10\nkilled sees 5,3 without MPS 10\n";
    assert_eq!(log, wanted);
    // Without a daemon's program, its suites are left out.
    machine.mps = "no-such-program".into();
    machine.run_all(&suites).unwrap();
}
