//! Tests of the launch, with a program that only says how it was started.

use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use super::*;

fn words(text: &str) -> Vec<OsString> {
    text.split(' ').map(OsString::from).collect()
}

fn launch(text: &str, gpus: usize) -> Result<Launch> {
    Launch::new(words(text), gpus)
}

fn text(command: &Command) -> String {
    let words: Vec<_> = command
        .get_args()
        .map(|word| word.to_string_lossy())
        .collect();
    words.join(" ")
}

fn variable(command: &Command, name: &str) -> Option<String> {
    let found = command.get_envs().find(|(found, _)| *found == name)?.1?;
    Some(found.to_string_lossy().into_owned())
}

#[test]
fn every_rank_has_its_number_its_node_and_the_arguments_that_were_given() {
    let launch = launch(
        "gpu --network=relaxed,pieces=8 --quick --ranks 4 --node 2 --filter order",
        1,
    );
    let launch = launch.unwrap();
    let command = launch.command(3, "127.0.0.1:9");
    assert_eq!(
        text(&command),
        "gpu --quick --filter order --group nvshmem --ranks 4 --node 2 --share-gpus --rank 3 \
         --rendezvous 127.0.0.1:9"
    );
    assert_eq!(variable(&command, "FERRY_NETWORK_HOST").unwrap(), "node1");
    let settings = variable(&command, "FERRY_NETWORK").unwrap();
    assert_eq!(settings, "relaxed,pieces=8");
    assert_eq!(
        variable(&command, "NVSHMEM_REMOTE_TRANSPORT").unwrap(),
        "ucx"
    );
    assert_eq!(variable(&command, "NVSHMEM_DISABLE_NCCL"), None);
}

#[test]
fn nccl_is_off_with_one_rank_a_node_and_gpus_are_shared_if_there_are_too_few() {
    let given = "soak --ranks=2 --network fence --group nvshmem --share-gpus";
    let launch = launch(given, 2).unwrap();
    let command = launch.command(0, "a:1");
    assert_eq!(
        text(&command),
        "soak --group nvshmem --ranks 2 --node 1 --rank 0 --rendezvous a:1"
    );
    assert_eq!(variable(&command, "NVSHMEM_DISABLE_NCCL").unwrap(), "1");
    assert_eq!(variable(&command, "FERRY_NETWORK_HOST").unwrap(), "node0");
}

#[test]
fn processes_that_somebody_else_starts_get_the_variables_of_their_node() {
    let network = Network::new("fence", 2, 4).unwrap();
    let mut command = Command::new("true");
    network.add_to(&mut command, 2);
    assert_eq!(variable(&command, "FERRY_NETWORK_HOST").unwrap(), "node1");
    assert_eq!(variable(&command, "FERRY_NETWORK").unwrap(), "fence");
}

#[test]
fn what_cannot_be_is_named() {
    for (given, gpus, part) in [
        ("gpu --network relaxed", 1, "--network needs --ranks"),
        ("gpu --network strict --ranks 2", 1, "--network strict"),
        (
            "gpu --network fence --ranks 3 --node 2",
            1,
            "--node 2: does not divide the 3",
        ),
        ("gpu --network fence --ranks 0", 1, "--ranks 0"),
        (
            "gpu --network fence --ranks 2 --group local",
            1,
            "--group local",
        ),
        ("gpu --network fence --ranks 2", 0, "no GPU was found"),
    ] {
        let error = format!("{:#}", launch(given, gpus).err().unwrap());
        assert!(error.contains(part), "{given}: {error}");
    }
}

/// A program of bash in a folder of its own.
fn program(folder: &Path, name: &str, lines: &str) -> PathBuf {
    let file = folder.join(name);
    fs::write(&file, format!("#!/bin/bash\n{lines}\n")).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    file
}

#[test]
fn a_rank_that_fails_is_named_and_all_are_awaited() {
    let scratch = scratch().unwrap();
    let folder = scratch.path();
    let mut launch = launch("gpu --network fence --ranks 3", 1).unwrap();
    let lines = format!(
        "while [[ $# -gt 0 ]]; do [[ $1 == --rank ]] && rank=$2; shift; done\n\
         sleep 0.$rank; touch {}/ended-$rank; [[ $rank != 1 ]]",
        folder.display()
    );
    launch.program = program(folder, "fails", &lines);
    let error = launch.run().unwrap_err().to_string();
    assert_eq!(error, "rank 1 ended with exit status: 1");
    assert!((0..3).all(|rank| folder.join(format!("ended-{rank}")).exists()));
}

#[test]
fn processes_that_are_dropped_have_ended() {
    let child = Command::new("sleep").arg("600").spawn().unwrap();
    let process = PathBuf::from(format!("/proc/{}", child.id()));
    drop(Processes(vec![(child, None)]));
    assert!(!process.exists());
}

/// Not a test: a launch that another test ends.
#[test]
fn launch_that_is_ended() {
    let Some(folder) = env::var_os("FOLDER").map(PathBuf::from) else {
        return;
    };
    let mut launch = launch("gpu --network fence --ranks 2", 1).unwrap();
    launch.program = folder.join("rank");
    let error = run_all(launch, folder.join("mps").as_os_str(), 1).unwrap_err();
    fs::write(folder.join("error"), error.to_string()).unwrap();
}

#[test]
fn a_launch_that_is_ended_ends_its_processes_and_its_daemon() {
    for signal in ["INT", "TERM"] {
        let scratch = scratch().unwrap();
        let folder = scratch.path();
        let path = folder.display();
        let lines = format!("echo $$ >> {path}/ranks\nexec sleep 600");
        program(folder, "rank", &lines);
        program(
            folder,
            "mps",
            &format!("[[ ${{1:-}} == -d ]] && exit\nread -r word; echo $word > {path}/quit"),
        );
        let own = folder.join("own");
        fs::create_dir(&own).unwrap();
        let name = "network::tests::launch_that_is_ended";
        let mut process = Command::new(env::current_exe().unwrap());
        process
            .args(["--exact", name])
            .env("FOLDER", folder)
            .env("TMPDIR", &own)
            .stdout(Stdio::null());
        let mut child = process.spawn().unwrap();
        let ranks = || fs::read_to_string(folder.join("ranks")).unwrap_or_default();
        let limit = Instant::now() + Duration::from_secs(60);
        while ranks().lines().count() < 2 && Instant::now() < limit {
            thread::sleep(Duration::from_millis(5));
        }
        let number = child.id().to_string();
        let kill = Command::new("kill").args(["-s", signal, &number]).status();
        assert!(kill.unwrap().success());
        assert!(child.wait().unwrap().success());
        let error = fs::read_to_string(folder.join("error")).unwrap();
        assert_eq!(error, "ended by the user");
        assert_eq!(
            fs::read_to_string(folder.join("quit")).unwrap(),
            "quit -t 10\n"
        );
        for rank in ranks().lines() {
            assert!(!Path::new("/proc").join(rank).exists(), "{signal}: {rank}");
        }
        assert_eq!(fs::read_dir(own).unwrap().count(), 0);
    }
}

#[test]
fn a_daemon_of_mps_ends_with_its_launch_also_if_it_does_not_listen() {
    let scratch = scratch().unwrap();
    let folder = scratch.path();
    let log = folder.join("log");
    let lines = format!(
        "if [[ ${{1:-}} == -d ]]; then echo start $CUDA_MPS_PIPE_DIRECTORY >> {log}\n\
         (exec sleep 600) > /dev/null 2>&1 & echo $! > $CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid\n\
         else read -r word; echo $word >> {log}; [[ -z $DEAF ]]; fi",
        log = log.display()
    );
    let listens = program(folder, "listens", &format!("DEAF=\n{lines}"));
    let is_deaf = program(folder, "deaf", &format!("DEAF=yes\n{lines}"));
    for (name, program) in [("listens", &listens), ("deaf", &is_deaf)] {
        let own = folder.join(format!("of-{name}"));
        fs::create_dir(&own).unwrap();
        let mps = Mps::start(program.as_os_str(), &own, 2, None).unwrap();
        let pipes = own.join("pipes");
        assert_eq!(mps.variables()[0].1, pipes);
        let daemon = fs::read_to_string(pipes.join("nvidia-cuda-mps-control.pid")).unwrap();
        drop(mps);
        let text = fs::read_to_string(&log).unwrap();
        assert!(
            text.ends_with(&format!("start {}\nquit -t 10\n", pipes.display())),
            "{text}"
        );
        let process = PathBuf::from(format!("/proc/{}/cmdline", daemon.trim()));
        if name == "deaf" {
            // A signal takes effect later, and init may not take note of it for a while.
            let has_ended = || fs::read(&process).map_or(true, |text| text.is_empty());
            let limit = Instant::now() + Duration::from_secs(30);
            while !has_ended() && Instant::now() < limit {
                thread::sleep(Duration::from_millis(10));
            }
            assert!(has_ended());
        } else {
            let _ = Command::new("kill").arg(daemon.trim()).status();
        }
    }
    let missing = Mps::start(
        OsStr::new("no-such-program"),
        &folder.join("of-deaf/logs"),
        1,
        None,
    );
    let error = format!("{:#}", missing.err().unwrap());
    assert!(
        error.contains("which NVSHMEM needs if ranks share a GPU"),
        "{error}"
    );
}
