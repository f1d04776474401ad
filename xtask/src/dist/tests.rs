//! Tests of the script, with programs that only print how they were called.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::*;

fn run_script(arguments: &[&str]) -> Output {
    let mut command = Command::new("bash");
    command.arg("-c").arg(SCRIPT).arg(SCRIPT_NAME);
    command.args(arguments).output().unwrap()
}

/// A folder with the script and programs, removed on drop.
struct Folder(PathBuf);

/// Prints how it was called; fails a suite whose arguments contain `$FAILS`.
const TESTS: &str = r#"mps=; [[ -e "${CUDA_MPS_PIPE_DIRECTORY:-/tmp/nvidia-mps}/control" ]] && mps="under MPS"
echo "ferry-tests $* $mps"
if [[ -n "${SAYS_GPUS:-}" ]]; then echo "sees ${CUDA_VISIBLE_DEVICES-all}"; fi
[[ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" || -d "$CUDA_MPS_PIPE_DIRECTORY" ]] || exit 1
if [[ -n "${SLEEPS:-}" ]]; then touch begun; sleep "$SLEEPS"; fi
[[ -z "${FAILS:-}" || "$*" != *"$FAILS"* ]]"#;
const MPIRUN: &str = r#"echo "mpirun $1 $2 $3 $4"; shift 4; exec "$@""#;
/// Records its requests.
const MPS: &str = r#"if [[ "${1:-}" == -d ]]; then echo "start $CUDA_MPS_PIPE_DIRECTORY" >> mps
touch "$CUDA_MPS_PIPE_DIRECTORY/control"; echo "daemon sees ${CUDA_VISIBLE_DEVICES-all}"
else read -r word; echo "$word" >> mps; fi"#;

/// Name of the variable that limits which GPUs a process sees.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("ferry-dist-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let folder = Self(folder);
        folder.program(SCRIPT_NAME, SCRIPT);
        folder.program("ferry-tests", &format!("#!/bin/bash\n{TESTS}\n"));
        folder.program("mpirun", &format!("#!/bin/bash\n{MPIRUN}\n"));
        folder.program("nvidia-cuda-mps-control", &format!("#!/bin/bash\n{MPS}\n"));
        fs::write(folder.0.join("libnvshmem_host.so.3"), "").unwrap();
        fs::write(folder.0.join(COMMIT_NAME), "0123abc").unwrap();
        folder
    }

    fn program(&self, name: &str, text: &str) {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    }

    fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(self.0.join(SCRIPT_NAME));
        command.args(arguments.split(' '));
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.0.display()));
        command.env("LD_LIBRARY_PATH", &self.0);
        command
    }

    /// Runs the script; returns its output, and whether it succeeded.
    fn run(&self, arguments: &str, fails: &str) -> (String, bool) {
        let output = self
            .command(arguments)
            .env("FAILS", fails)
            .output()
            .unwrap();
        let text = [&output.stdout[..], &output.stderr].concat();
        (
            String::from_utf8_lossy(&text).into_owned(),
            output.status.success(),
        )
    }

    /// Number of daemons started. Each must have ended, and its folder be gone.
    fn daemons(&self) -> usize {
        let text = fs::read_to_string(self.0.join("mps")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        for pair in lines.chunks(2) {
            let folder = pair[0].strip_prefix("start ").unwrap();
            assert_eq!(pair[1..], ["quit -t 10"], "{text}");
            assert!(!Path::new(folder).exists(), "{folder} is left");
        }
        lines.len() / 2
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn the_script_turns_multicast_off_and_requires_the_gpus() {
    assert!(SCRIPT.contains("export NVSHMEM_DISABLE_NVLS=1 NCCL_NVLS_ENABLE=0\n"));
    let folder = Folder::new("plain");
    let (text, well) = folder.run("2", "");
    assert!(well, "{text}");
    // Three groups, and killed processes of two.
    assert_eq!(text.matches("\nferry-tests ").count(), 5, "{text}");
    assert_eq!(text.matches("--require-gpus 2 \n").count(), 5, "{text}");
    assert_eq!(
        text.matches("mpirun --allow-run-as-root --oversubscribe -n 2\n")
            .count(),
        2,
        "{text}"
    );
    assert_eq!(text.matches("== killed-node, commit 0123abc\n").count(), 1);
    assert!(
        text.ends_with("ferry: 5 passed, 0 failed, 0 skipped\n"),
        "{text}"
    );
    assert_eq!(folder.daemons(), 0);
}

#[test]
fn ranks_that_share_a_gpu_run_every_suite() {
    let folder = Folder::new("shared");
    let suites =
        "local nvshmem-4 nvshmem-2 nvshmem-1 node demo killed-node killed-node-mps killed-nvshmem";
    let (names, _) = folder.run("1 --ranks 4 --list", "");
    assert_eq!(names, suites.replace(' ', "\n") + "\n");
    let (text, well) = folder.run("1 --ranks 4", "");
    assert!(
        well && text.ends_with("ferry: 9 passed, 0 failed, 0 skipped\n"),
        "{text}"
    );
    let shared = "--share-gpus --ranks 4 --require-gpus 1";
    for (suite, line) in [
        ("local", format!("gpu {shared} \n")),
        (
            "nvshmem-4",
            format!("gpu --group nvshmem {shared} --skip , 2 a node --skip , 1 a node under MPS\n"),
        ),
        (
            "nvshmem-1",
            format!("gpu --group nvshmem {shared} --quick --filter , 1 a node under MPS\n"),
        ),
        ("node", format!("gpu --group node {shared} --quick \n")),
        ("demo", "demo --share-gpus --ranks 4 \n".into()),
        (
            "killed-node",
            format!("killed --group node --deadline-ms 2000 {shared} \n"),
        ),
        (
            "killed-node-mps",
            format!("killed --group node --deadline-ms 2000 {shared} under MPS\n"),
        ),
        (
            "killed-nvshmem",
            format!("killed --deadline-ms 2000 {shared} under MPS\n"),
        ),
    ] {
        let (_, behind) = text
            .split_once(&format!("== {suite}, commit 0123abc\n"))
            .unwrap();
        let of_suite = behind.split("\n== ").next().unwrap();
        assert!(
            format!("{of_suite}\n").contains(&line),
            "{suite}: {line}in {of_suite}"
        );
    }
    assert_eq!(folder.daemons(), 5);
}

#[test]
fn ranks_share_the_first_of_the_gpus_that_are_visible() {
    let folder = Folder::new("visible");
    let seen = |arguments: &str, visible: Option<&str>| {
        let mut command = folder.command(arguments);
        command.env("SAYS_GPUS", "yes").env_remove(VISIBLE);
        let output = command.envs(visible.map(|gpus| (VISIBLE, gpus))).output();
        let text = String::from_utf8(output.unwrap().stdout).unwrap();
        let lines = text.lines().filter(|line| line.contains("sees "));
        lines.map(String::from).collect::<Vec<_>>().join(", ")
    };
    for suite in ["local", "demo"] {
        let only = |gpus| format!("{gpus} --ranks 4 --only {suite}");
        assert_eq!(seen(&only(1), None), "sees 0");
        assert_eq!(seen(&only(2), None), "sees 0,1");
        assert_eq!(seen(&only(2), Some("5,3,6")), "sees 5,3");
        assert_eq!(seen(&only(2), Some("")), "sees ");
    }
    let sanitize = "1 --ranks 2 --sanitize --only racecheck";
    assert_eq!(seen(sanitize, Some("GPU-7,GPU-8")), "sees GPU-7");
    // A daemon numbers its visible GPUs from 0.
    let mps = "2 --ranks 2 --only killed-nvshmem --only local";
    let lines = "sees 5,3, daemon sees 5,3, sees 0,1";
    assert_eq!(seen(mps, Some("5,3,6")), lines);
    // Ranks with a GPU each see all GPUs.
    assert_eq!(seen("1 --only local", Some("5,3,6")), "sees 5,3,6");
}

#[test]
fn ranks_that_take_turns_have_no_daemon_of_the_users() {
    let folder = Folder::new("turns");
    let users = folder.0.join("users");
    fs::create_dir(&users).unwrap();
    fs::write(users.join("control"), "").unwrap();
    let run = |arguments: &str| {
        let mut command = folder.command(arguments);
        let output = command.env("CUDA_MPS_PIPE_DIRECTORY", &users).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    // The second suite comes after one with a daemon of its own.
    let text = run("1 --ranks 2 --only killed-node --only nvshmem-1 --only node");
    let with_mps = |line: &&str| line.contains("under MPS");
    let of_programs = text.lines().filter(|line| line.starts_with("ferry-tests"));
    let under: Vec<&str> = of_programs.filter(with_mps).collect();
    assert_eq!(under.len(), 1, "{text}");
    assert!(under[0].contains("--group nvshmem"), "{text}");
    assert!(text.contains("3 passed"), "{text}");
    assert!(run("1 --only node").contains("under MPS"));
}

#[test]
fn only_the_suites_that_are_named_run() {
    let folder = Folder::new("only");
    let (text, well) = folder.run("1 --ranks 2 --only demo --only killed-node-mps", "");
    assert!(
        well && text.ends_with("ferry: 2 passed, 0 failed, 0 skipped\n"),
        "{text}"
    );
    assert_eq!(folder.daemons(), 1);
    let (text, well) = folder.run("1 --ranks 2 --only nvshmem-4", "");
    assert!(
        !well && text.contains("there is no suite nvshmem-4; there are: local nvshmem-2 nvshmem-1"),
        "{text}"
    );
}

#[test]
fn a_daemon_of_mps_ends_where_its_suite_fails_and_is_missed_where_there_is_none() {
    let folder = Folder::new("mps");
    let (text, well) = folder.run("1 --ranks 2 --only nvshmem-2 --only local", "nvshmem");
    assert!(
        !well && text.ends_with("ferry: 1 passed, 1 failed, 0 skipped\n"),
        "{text}"
    );
    assert_eq!(folder.daemons(), 1);
    fs::remove_file(folder.0.join("nvidia-cuda-mps-control")).unwrap();
    let (text, well) = folder.run("1 --ranks 2 --only nvshmem-2", "");
    assert!(
        well && text.contains("skip nvshmem-2: nvidia-cuda-mps-control is missing"),
        "{text}"
    );
    assert!(
        text.ends_with("ferry: 0 passed, 0 failed, 1 skipped\n"),
        "{text}"
    );
}

#[test]
fn a_daemon_of_mps_ends_where_the_script_is_ended() {
    let folder = Folder::new("ended");
    let mut command = folder.command("1 --ranks 2 --only nvshmem-2");
    let mut script = command.env("SLEEPS", "1").spawn().unwrap();
    while !folder.0.join("begun").exists() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let kill = Command::new("kill").arg(script.id().to_string()).status();
    assert!(kill.unwrap().success());
    assert_eq!(script.wait().unwrap().code(), Some(143));
    assert_eq!(folder.daemons(), 1);
}

#[test]
fn the_script_refuses_a_count_that_is_none() {
    for arguments in [
        &["none"][..],
        &["1", "--sanitise"],
        &["1", "2"],
        &["1", "--ranks"],
        &["1", "--ranks", "0"],
        &["1", "--only"],
    ] {
        let output = run_script(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("usage"));
    }
}

#[test]
fn the_script_sanitizes_on_one_gpu() {
    let output = run_script(&["2", "--sanitize"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("give 1"));
    let folder = Folder::new("sanitize");
    let (text, _) = folder.run("1 --sanitize", "");
    let run = "== sanitize, commit 0123abc\n+ ./ferry-tests sanitize\nferry-tests sanitize \n";
    assert_eq!(text, format!("{run}ferry: 1 passed, 0 failed, 0 skipped\n"));
    let (text, well) = folder.run("1 --ranks 2 --sanitize", "racecheck");
    assert!(!well, "{text}");
    for line in [
        "ferry-tests sanitize --tool memcheck --seconds 500 --share-gpus --ranks 2 \n",
        "ferry-tests sanitize --tool racecheck --seconds 120 --share-gpus --ranks 2 \n",
        "ferry: 1 passed, 1 failed, 0 skipped\n",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}
