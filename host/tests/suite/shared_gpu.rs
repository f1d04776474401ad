//! Ranks of a process that share a GPU.

use std::process::Command;
use std::sync::Arc;

use crate::noted::*;
use ferry::device::GpuRanks;
use ferry::error::{LocalRanksError, SharedGpuError};
use ferry::*;

/// Set for the program that the tests start.
const MAKES_A_GROUP: &str = "FERRY_TEST_SHARED_GPU";

/// Two ranks on one GPU of 132 multiprocessors, which has a name of its own in each test.
fn notes_on(gpu: &str) -> Arc<Notes> {
    Arc::new(Notes {
        all_local: true,
        gpu: Some(GpuRanks::new(gpu, [(Rank(0), 132), (Rank(1), 132)])),
        ..Notes::default()
    })
}

fn join_all(group: &Group, config: Config) -> Result<Vec<Communicator>, Error> {
    Communicator::new(group, &Plan::new(group, config)?)
}

/// Any number of multiprocessors.
fn unlimited() -> Config {
    Config {
        max_sms: None,
        ..config()
    }
}

/// The limits of all launches so far.
fn limits(notes: &Notes) -> Vec<Option<u32>> {
    let launches = std::mem::take(&mut *notes.launches.lock().unwrap());
    launches.iter().map(|launch| launch.max_sms).collect()
}

fn stream(handle: u64) -> Stream {
    // SAFETY: `Stream::new` is about a device's streams, and the noted fabric has none.
    unsafe { Stream::new(handle) }
}

#[test]
fn each_rank_launches_into_its_part_of_the_gpu() {
    let notes = notes_on("part");
    let group = group_of(&notes);
    for (max_sms, wanted) in [(None, 66), (Some(100), 66), (Some(5), 5)] {
        let config = Config {
            max_sms,
            ..config()
        };
        let plan = Plan::new(&group, config).unwrap();
        assert_eq!(
            (plan.max_sms(), plan.config().max_sms),
            (Some(wanted), max_sms)
        );
        let mut ranks = Communicator::new(&group, &plan).unwrap();
        for (index, handle) in [(0, 8), (1, 9)] {
            assert_eq!(ranks[index].max_sms(), Some(wanted));
            round(&mut ranks[index], stream(handle)).unwrap();
        }
        assert_eq!(limits(&notes), [Some(wanted); 4]);
        ranks.into_iter().for_each(|rank| rank.close().unwrap());
    }
}

#[test]
fn a_rank_that_has_its_gpu_alone_launches_as_the_config_says() {
    for gpu in [None, Some(GpuRanks::new("alone", [(Rank(0), 132)]))] {
        let notes = Arc::new(Notes {
            gpu,
            ..Notes::default()
        });
        let group = group_of(&notes);
        // More than one fits beside itself: as far as its rank knows, they may be ordered.
        let mut ranks = [join(&group, unlimited()), join(&group, unlimited())];
        assert_eq!(ranks[0].plan().max_sms(), None);
        ranks
            .iter_mut()
            .for_each(|rank| round(rank, Stream::DEFAULT).unwrap());
        assert_eq!(limits(&notes), [None; 4]);
        ranks.into_iter().for_each(|rank| rank.close().unwrap());
    }
}

#[test]
fn communicators_that_find_no_room_on_a_gpu_are_refused_and_listed() {
    let notes = notes_on("room");
    let (group, other) = (group_of(&notes), group_of(&notes));
    let first = join_all(&group, unlimited()).unwrap();
    // Another one of the same ranks may be ordered after it.
    let again = join_all(&group, unlimited()).unwrap();
    notes.take();
    let refused = join_all(&other, config()).unwrap_err();
    let Error::SharedGpu(SharedGpuError::NoRoom { ranks, .. }) = &refused else {
        panic!("{refused}")
    };
    let wanted = [(0, 66), (1, 66), (0, 5), (1, 5)];
    assert_eq!(
        *ranks,
        wanted.map(|(rank, blocks)| ("noted", Rank(rank), blocks))
    );
    // Nothing was allocated for it.
    assert_eq!(notes.take(), ["all_gather"; 2]);
    first
        .into_iter()
        .chain(again)
        .for_each(|rank| rank.close().unwrap());
    join_all(&other, config())
        .unwrap()
        .into_iter()
        .for_each(|rank| rank.close().unwrap());
}

#[test]
fn where_nothing_travels_nobody_waits_and_nothing_is_refused() {
    let local = Config {
        skip_a2a: true,
        ..unlimited()
    };
    let notes = notes_on("local");
    let groups = [(); 3].map(|()| group_of(&notes));
    let mut all = groups.map(|group| join_all(&group, local).unwrap());
    for rank in all.iter_mut().flatten() {
        round(rank, Stream::DEFAULT).unwrap();
    }
    all.into_iter()
        .flatten()
        .for_each(|rank| rank.close().unwrap());
}

/// The two ranks and kernels of a refused call.
fn behind(refused: &Error) -> [(u32, &'static str); 2] {
    match refused {
        Error::SharedGpu(SharedGpuError::OneStream {
            rank,
            kernel,
            waiting,
            waiting_kernel,
        }) => [(rank.0, kernel.name()), (waiting.0, waiting_kernel.name())],
        other => panic!("{other}"),
    }
}

#[test]
fn a_kernel_behind_one_that_waits_for_it_is_refused_before_it_is_enqueued() {
    let notes = notes_on("behind");
    let mut ranks = join_all(&group_of(&notes), config()).unwrap();
    let one = stream(8);
    round(&mut ranks[0], one).unwrap();
    notes.take();
    let refused = round(&mut ranks[1], one).unwrap_err();
    assert_eq!(behind(&refused), [(1, "dispatch"), (0, "combine")]);
    let text = refused.to_string();
    assert!(
        text.contains("a stream each") && text.contains("dispatch_async"),
        "{text}"
    );
    assert_eq!(notes.take(), [""; 0]);
    // In another stream it comes in time.
    round(&mut ranks[1], stream(9)).unwrap();
    round(&mut ranks[1], one).unwrap();
    ranks.into_iter().for_each(|rank| rank.close().unwrap());
}

#[test]
fn a_call_made_while_another_is_launched_is_refused_behind_it() {
    let notes = notes_on("meanwhile");
    let mut ranks = join_all(&group_of(&notes), config()).unwrap().into_iter();
    let [mut first, mut second] = [(); 2].map(|()| ranks.next().unwrap());
    let (tell, told) = std::sync::mpsc::channel();
    *notes.during_launch.lock().unwrap() = Some(Box::new(move || {
        let outcome = round(&mut second, stream(8));
        tell.send((outcome, second)).unwrap();
    }));
    round(&mut first, stream(8)).unwrap();
    let (outcome, mut second) = told.recv().unwrap();
    let refused = outcome.unwrap_err();
    assert_eq!(behind(&refused), [(1, "dispatch"), (0, "dispatch")]);
    round(&mut second, stream(9)).unwrap();
    // Nobody waits for a launch that failed.
    *notes.refused_launch.lock().unwrap() = Some(0);
    round(&mut first, stream(8)).unwrap_err();
    *notes.refused_launch.lock().unwrap() = None;
    round(&mut second, stream(8)).unwrap();
    first.close().unwrap();
    second.close().unwrap();
}

#[test]
fn ranks_on_gpus_of_their_own_may_use_the_same_handle() {
    let notes = Arc::new(Notes {
        all_local: true,
        ..Notes::default()
    });
    let mut ranks = join_all(&group_of(&notes), config()).unwrap();
    for rank in &mut ranks {
        round(rank, Stream::DEFAULT).unwrap();
    }
    assert!(notes.captures_asked.lock().unwrap().is_empty());
    ranks.into_iter().for_each(|rank| rank.close().unwrap());
}

#[test]
fn a_call_of_all_ranks_in_one_stream_is_refused_whole_unless_it_is_split() {
    let notes = notes_on("all");
    let mut ranks = join_all(&group_of(&notes), config()).unwrap();
    let (input, output) = empty_tensors(&ranks[0]);
    let (apart, one) = ([stream(8), stream(9)], [stream(8); 2]);
    let mut both =
        |streams: &[Stream], call: Call| Communicator::together(&mut ranks, streams, &[call; 2]);
    notes.take();
    let refused = both(&one, Call::Dispatch(input, output)).unwrap_err();
    let Error::LocalRanks(LocalRanksError::Refused { rank, source }) = refused else {
        panic!("{refused}")
    };
    assert_eq!(
        (rank.0, behind(&source)),
        (1, [(1, "dispatch"), (0, "dispatch")])
    );
    assert_eq!(notes.take(), [""; 0]);
    both(&one, Call::DispatchAsync(input)).unwrap();
    both(&one, Call::DispatchWait(output)).unwrap();
    let combined =
        CombineOutput::Apart(Tensor::contiguous(memory(8192), DataType::Bf16, [2, 1, 8]));
    let rows = CombineInput::new(output.tokens.unwrap());
    both(&one, Call::CombineAsync(rows, combined)).unwrap();
    both(&one, Call::CombineWait).unwrap();
    // Fused calls take a stream each.
    both(&apart, Call::Dispatch(input, output)).unwrap();
    both(&apart, Call::Combine(rows, combined)).unwrap();
    ranks.into_iter().for_each(|rank| rank.close().unwrap());
}

#[test]
fn in_a_capture_of_one_stream_the_same_holds() {
    let notes = notes_on("captured");
    let mut ranks = join_all(&group_of(&notes), config()).unwrap();
    let [captured, free] = [8, 9].map(stream);
    *notes.captured.lock().unwrap() = Some((captured, 1 << 40));
    *notes.graph.lock().unwrap() = Some(Vec::new());
    round(&mut ranks[0], captured).unwrap();
    let refused = round(&mut ranks[1], captured).unwrap_err();
    assert_eq!(behind(&refused), [(1, "dispatch"), (0, "combine")]);
    // Captured calls did not run, so nothing waits outside.
    *notes.captured.lock().unwrap() = None;
    *notes.graph.lock().unwrap() = None;
    round(&mut ranks[1], captured).unwrap();
    round(&mut ranks[0], free).unwrap();
    ranks.into_iter().for_each(|rank| rank.close().unwrap());
}

#[test]
fn a_deadline_on_a_shared_gpu_names_what_helps() {
    let notes = notes_on("deadline");
    let ranks = join_all(&group_of(&notes), config()).unwrap();
    *notes.page.lock().unwrap() = ferry::device::FaultPage::of(&timeout(), 1);
    let text = ranks[0].check().unwrap_err().to_string();
    for part in [
        "2 ranks of its process share its GPU",
        "CUDA_DEVICE_MAX_CONNECTIONS=32",
    ] {
        assert!(text.contains(part), "{text}");
    }
    ranks.into_iter().for_each(|rank| rank.close().unwrap());
}

#[test]
fn a_deadline_of_a_process_with_one_rank_on_the_gpu_says_nothing_of_streams() {
    let notes = Arc::new(Notes {
        gpu: Some(GpuRanks::new("apart", [(Rank(0), 132), (Rank(1), 132)])),
        ..Notes::default()
    });
    let rank = join(&group_of(&notes), config());
    *notes.page.lock().unwrap() = ferry::device::FaultPage::of(&timeout(), 1);
    let text = rank.check().unwrap_err().to_string();
    assert!(!text.contains("CONNECTIONS"), "{text}");
    rank.close().unwrap();
}

/// Not a test of its own: a program that makes two groups whose ranks share a GPU. Without its variable it
/// does nothing.
#[test]
fn making_groups() {
    if std::env::var_os(MAKES_A_GROUP).is_some() {
        for _ in 0..2 {
            group_of(&notes_on("queues"));
        }
    }
}

/// Lines of such a program on stderr about Ferry, with this value of the driver's variable.
fn stderr_with(queues: Option<&str>) -> Vec<String> {
    let mut program = Command::new(std::env::current_exe().unwrap());
    program
        .args(["--exact", "shared_gpu::making_groups", "--nocapture"])
        .env(MAKES_A_GROUP, "1");
    program.env_remove("CUDA_DEVICE_MAX_CONNECTIONS");
    program.envs(queues.map(|queues| ("CUDA_DEVICE_MAX_CONNECTIONS", queues)));
    let output = program.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("1 passed"),
        "{output:?}"
    );
    let text = String::from_utf8(output.stderr).unwrap();
    let lines = text.lines().filter(|line| line.contains("ferry:"));
    lines.map(str::to_owned).collect()
}

#[test]
fn few_hardware_queues_are_told_once_where_ranks_of_a_process_share_a_gpu() {
    for (queues, number) in [
        (None, "has 8"),
        (Some("1"), "has 1"),
        (Some("31"), "has 31"),
    ] {
        let lines = stderr_with(queues);
        assert_eq!(lines.len(), 1, "{lines:?}");
        for part in [
            "2 ranks of this process",
            number,
            "CUDA_DEVICE_MAX_CONNECTIONS=32",
        ] {
            assert!(lines[0].contains(part), "{lines:?}");
        }
    }
    assert_eq!(stderr_with(Some("32")), [""; 0]);
}
