//! Replays of processes of which one fails.

use anyhow::bail;
use ferry::Group;
use ferry::bootstrap::{Bootstrap, TcpBootstrap};
use ferry::simulator::{Lost, Options};
use ferry_reference::workload::Routing;

use super::*;

fn given() -> Given {
    let problem = ferry_rig::problem(vec![3, 2], [4, 2, 16], Routing::Uniform, 3);
    Given {
        problem,
        scale: vec![1.0; 4],
        weights: true,
        input_scale: None,
        shared_scale: None,
        residual: None,
        initial: [None, None],
        encoded: None,
    }
}

fn args(output: PathBuf) -> ReplayArgs {
    ReplayArgs {
        input: "in".into(),
        output,
        group: GroupKind::Simulated,
        mode: CombineMode::Reduced,
        format: TokenFormat::Bf16,
        scales: None,
        p2p_world_size: None,
        split: false,
        shared_expert: false,
        skip_a2a: false,
        residual: false,
        late_weights: false,
        receive: ReceiveLayout::ByExpert,
        ids: Ids::I32,
        combine: None,
        combine_weights: false,
        initial: false,
        transposed_scales: false,
        clear_absent: false,
        pass_through: None,
        groups: GroupFlags::default(),
        all_at_once: false,
        counts: false,
        give_up: false,
        seed: 1,
        ranks: None,
        group_args: GroupArgs::default(),
    }
}

/// Replay of a process.
struct Process {
    options: Options,
    args: ReplayArgs,
    given: Result<Given>,
}

/// Two processes, each with a simulated group of its own, talk to each other beside it. The
/// first fails as `spoil` says; what both say.
fn told(spoil: fn(&mut Process)) -> [String; 2] {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let process = move |rank: u32| {
        let wait = Duration::from_secs(5);
        let mut tcp = TcpBootstrap::connect(rank, 2, address, wait).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let mut process = Process {
            options: Options::new(2, 1),
            args: args(folder.path().join("out")),
            given: Ok(given()),
        };
        if rank == 0 {
            spoil(&mut process);
        }
        let group = Group::simulated_with(process.options).unwrap();
        let gather = Box::new(move |bytes: &[u8]| {
            let mut all = tcp.all_gather(bytes)?;
            // Each simulated group has all ranks, so one process's tensors are all.
            if safetensors::SafeTensors::deserialize(bytes).is_ok() {
                all.truncate(1);
            }
            Ok(all)
        });
        let open = OpenGroup::new(group, gather);
        let result = replay(open, &process.args, process.given);
        format!("{:#}", result.unwrap_err())
    };
    let threads = [0, 1].map(|rank| std::thread::spawn(move || process(rank)));
    threads.map(|thread| thread.join().unwrap())
}

#[test]
fn where_one_process_fails_all_say_why() {
    let both = |words: &str, spoil| {
        for text in told(spoil) {
            assert!(text.contains(words), "{text}; wanted: {words}");
        }
    };
    both("no file", |process| {
        process.given = (|| bail!("no file"))();
    });
    both("tensors of 3 ranks", |process| {
        process.given.as_mut().unwrap().problem.ranks = 3;
    });
    both("p2p_world_size is 3", |process| {
        process.args.p2p_world_size = Some(3);
    });
    // In the round, which only this process's group has trouble with.
    both("in time", |process| {
        process.options.lost = Some(Lost {
            rank: 1,
            after_steps: 0,
        });
    });
    both("no such folder", |process| {
        process.args.output = "no such folder/out".into();
    });
}
