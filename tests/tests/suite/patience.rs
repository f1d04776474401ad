//! Simulated deadlines: none passes while a rank may still come, and the cause of one that does is named.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ferry::layout::Region;
use ferry::simulator::{Lost, Options};
use ferry::*;

const STREAM: Stream = Stream::DEFAULT;

/// Two experts a rank, of three ranks.
fn config(deadline: Duration) -> Config {
    Config {
        deadline,
        ..Config::new(6, 1, 8, 1)
    }
}

fn ranks(group: &Group, deadline: Duration) -> Vec<Communicator> {
    let plan = Plan::new(group, config(deadline)).unwrap();
    Communicator::new(group, &plan).unwrap()
}

/// Tensors of a rank that sends and receives no tokens.
fn tensors(rank: &Communicator) -> (DispatchInput, DispatchOutput) {
    let input = DispatchInput::new(
        Tensor::contiguous(DevicePtr::NULL, DataType::Bf16, [0, 8]),
        Tensor::contiguous(DevicePtr::NULL, DataType::I32, [0, 1]),
    );
    let buffers = DispatchBuffers::new(rank.device(), rank.plan()).unwrap();
    (input, *buffers.output())
}

/// Runs a round whose experts take so long on the host.
fn round(mut rank: Communicator, experts: Duration) -> Result<(), Error> {
    let (input, output) = tensors(&rank);
    rank.dispatch(STREAM, &input, &output)?;
    std::thread::sleep(experts);
    combine(&mut rank, &output)?;
    assert_eq!(rank.synchronize(STREAM)?.fault(), None);
    Ok(rank.close()?)
}

fn combine(rank: &mut Communicator, output: &DispatchOutput) -> Result<(), Error> {
    let rows = CombineInput::new(output.tokens.unwrap());
    let combined = Tensor::contiguous(output.tokens.unwrap().at, DataType::Bf16, [0, 8]);
    let combined = CombineOutput::Summed(combined);
    rank.combine(STREAM, &rows, &combined)
}

#[test]
fn a_rank_that_works_on_its_host_is_waited_for() {
    let group = Group::simulated(3, 1).unwrap();
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = ranks(&group, Duration::from_secs(60))
            .into_iter()
            .map(|rank| {
                let experts = Duration::from_millis(200 * u64::from(rank.rank() == Rank(1)));
                scope.spawn(move || round(rank, experts))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for outcome in outcomes {
        outcome.unwrap();
    }
}

/// Fault of rank 0 if the others never come.
fn alone(patience: Option<Duration>, deadline: Duration) -> Fault {
    let group = Group::simulated_with(Options {
        patience,
        ..Options::new(3, 2)
    })
    .unwrap();
    let mut ranks = ranks(&group, deadline);
    let (input, output) = tensors(&ranks[0]);
    ranks[0].dispatch(STREAM, &input, &output).unwrap();
    let Err(Error::Fault(fault)) = ranks[0].synchronize(STREAM) else {
        panic!("nobody was missed");
    };
    ranks.into_iter().for_each(|rank| rank.close().unwrap());
    fault
}

#[test]
fn a_fault_names_the_patience_that_caused_it() {
    let fault = alone(Some(Duration::from_millis(20)), Duration::from_secs(3600));
    assert_eq!(
        (fault.kind, fault.patience_ms),
        (FaultKind::PeerTimeout, Some(20))
    );
    let text = fault.to_string();
    assert!(
        text.contains("no launch came for 20 ms of wall time"),
        "{text}"
    );
}

#[test]
fn without_a_patience_the_deadline_passes_in_wall_time() {
    let (start, deadline) = (Instant::now(), Duration::from_millis(300));
    let fault = alone(None, deadline);
    assert!(start.elapsed() >= deadline, "{:?}", start.elapsed());
    assert_eq!(fault.patience_ms, Some(300));
}

/// Rank 0 of six never comes: each of the others is told about one deadline after its own launch, and does
/// not wait for the patience of those before it.
#[test]
fn every_rank_is_told_within_its_own_deadline() {
    let (deadline, between) = (Duration::from_secs(1), Duration::from_millis(300));
    let group = Group::simulated(6, 3).unwrap();
    let config = Config {
        experts: 12,
        ..config(deadline)
    };
    let plan = Plan::new(&group, config).unwrap();
    let mut ranks = Communicator::new(&group, &plan).unwrap();
    let others = ranks.split_off(1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = others
            .into_iter()
            .map(|mut rank| {
                scope.spawn(move || {
                    std::thread::sleep(between * (rank.rank().0 - 1));
                    let (input, output) = tensors(&rank);
                    let launched = Instant::now();
                    rank.dispatch(STREAM, &input, &output).unwrap();
                    let outcome = rank.synchronize(STREAM);
                    (rank, outcome, launched.elapsed())
                })
            })
            .collect();
        for thread in threads {
            let (rank, outcome, waited) = thread.join().unwrap();
            let Err(Error::Fault(fault)) = outcome else {
                panic!("{:?} missed nobody: {outcome:?}", rank.rank());
            };
            assert_eq!(fault.kind, FaultKind::PeerTimeout, "{fault}");
            assert!(waited < 2 * deadline, "told after {waited:?}: {fault}");
            ranks.push(rank);
        }
    });
    ranks.into_iter().for_each(|rank| rank.close().unwrap());
}

/// A dispatch waits for the credits of the round before, and no longer than that round's combine could have,
/// whatever its own deadline: rank 2 has dispatched and never combines, and rank 0 makes its next dispatch
/// late.
#[test]
fn a_credit_is_waited_for_until_the_deadline_of_the_combine_before() {
    let (deadline, late) = (Duration::from_secs(4), Duration::from_secs(3));
    let group = Group::simulated(3, 4).unwrap();
    let ranks = ranks(&group, deadline);
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|mut rank| {
                scope.spawn(move || {
                    let (input, output) = tensors(&rank);
                    rank.dispatch(STREAM, &input, &output).unwrap();
                    if rank.rank() == Rank(2) {
                        assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
                        return (rank, None);
                    }
                    combine(&mut rank, &output).unwrap();
                    assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
                    if rank.rank() == Rank(0) {
                        // Rank 1 waits meanwhile, so that time passes.
                        std::thread::sleep(late);
                    }
                    let launched = Instant::now();
                    rank.set_deadline(Some(LONG)).unwrap();
                    rank.dispatch(STREAM, &input, &output).unwrap();
                    let outcome = rank.synchronize(STREAM);
                    let Err(Error::Fault(fault)) = outcome else {
                        panic!("nobody was missed: {outcome:?}");
                    };
                    (rank, Some((fault, launched.elapsed())))
                })
            })
            .collect();
        let ended: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        for (rank, told) in ended {
            if let Some((fault, waited)) = told {
                let missed = (fault.region, fault.peer, fault.epoch, fault.wanted);
                assert_eq!(missed, (Region::Credit, Rank(2), 2, 1), "{fault}");
                if rank.rank() == Rank(0) {
                    assert!(waited < late, "told after {waited:?}: {fault}");
                }
            }
            rank.close().unwrap();
        }
    });
}

/// A lost rank never launches anything, so nobody waits for it.
#[test]
fn a_lost_rank_is_not_waited_for() {
    let lost = |rank| {
        Some(Lost {
            rank,
            after_steps: 0,
        })
    };
    let group = Group::simulated_with(Options {
        lost: lost(1),
        ..Options::new(2, 2)
    })
    .unwrap();
    let config = Config {
        experts: 4,
        ..config(Duration::from_secs(3600))
    };
    let plan = Plan::new(&group, config).unwrap();
    let mut ranks = Communicator::new(&group, &plan).unwrap();
    let (input, output) = tensors(&ranks[0]);
    ranks[0].dispatch(STREAM, &input, &output).unwrap();
    let outcome = ranks[0].synchronize(STREAM);
    let Err(Error::Fault(fault)) = outcome else {
        panic!("nobody was missed: {outcome:?}");
    };
    assert_eq!((fault.peer, fault.patience_ms), (Rank(1), None));
    ranks.into_iter().for_each(|rank| rank.close().unwrap());
}

/// Calls that look at memory now and then do not keep deadlines from passing.
#[test]
fn other_calls_do_not_renew_the_patience() {
    let group = Group::simulated_with(Options {
        patience: Some(Duration::from_millis(400)),
        ..Options::new(3, 2)
    })
    .unwrap();
    let mut ranks = ranks(&group, Duration::from_secs(3600));
    let others = ranks.split_off(1);
    let (input, output) = tensors(&ranks[0]);
    ranks[0].dispatch(STREAM, &input, &output).unwrap();
    let (done, is_done) = channel();
    let other = &others[0];
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // Far more often than the patience is long.
            while is_done.recv_timeout(Duration::from_millis(20)).is_err() {
                assert_eq!(other.check().unwrap().fault(), None);
                // Asks the simulating thread. In the end it says that a peer gave up.
                let _ = other.synchronize(STREAM);
            }
        });
        let outcome = ranks[0].synchronize(STREAM);
        done.send(()).unwrap();
        assert!(matches!(outcome, Err(Error::Fault(_))), "{outcome:?}");
    });
    let all = ranks.into_iter().chain(others);
    all.for_each(|rank| rank.close().unwrap());
}

/// Work may take longer than the deadline, which ends only waits: one warp has more tokens than it can move
/// in that time.
#[test]
fn work_that_takes_longer_than_the_deadline_is_done() {
    const TOKENS: usize = 40_000;
    let group = Group::simulated_with(Options {
        warps: 1,
        ..Options::new(1, 5)
    })
    .unwrap();
    let config = Config {
        deadline: Duration::from_millis(1),
        ..Config::new(1, 1, 8, TOKENS)
    };
    let plan = Plan::new(&group, config).unwrap();
    let mut rank = Communicator::new(&group, &plan).unwrap().remove(0);
    let device = rank.device().clone();
    let x: Vec<u16> = (0..8 * TOKENS).map(|index| (index % 100) as u16).collect();
    let x = device.upload_tensor([TOKENS, 8], &x).unwrap();
    let ids = device.upload_tensor([TOKENS, 1], &[0i32; TOKENS]).unwrap();
    let buffers = DispatchBuffers::new(&device, &plan).unwrap();
    let input = DispatchInput::new(x, ids);
    rank.dispatch(STREAM, &input, buffers.output()).unwrap();
    assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    let rows: Vec<u16> = device
        .download_tensor(&buffers.output().tokens.unwrap())
        .unwrap();
    let sent: Vec<u16> = device.download_tensor(&x).unwrap();
    assert!(rows == sent);
    let sums = CombineBuffers::new(&device, &plan).unwrap();
    let experts = CombineInput::new(buffers.output().tokens.unwrap());
    rank.combine(STREAM, &experts, &sums.output(TOKENS).unwrap())
        .unwrap();
    assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    rank.close().unwrap();
}

/// A call of ranks 0 and 2, the calls before it, and how many of them rank 1 makes before it is late or gone.
struct Awaiting {
    call: &'static str,
    before: &'static [&'static str],
    made: usize,
    /// Call with which rank 1 is late.
    awaited: &'static str,
    /// Ranks of a node: between nodes the end of a round waits for all ranks.
    node: Option<usize>,
}

const fn awaiting(
    call: &'static str,
    before: &'static [&'static str],
    made: usize,
    awaited: &'static str,
    node: Option<usize>,
) -> Awaiting {
    Awaiting {
        call,
        before,
        made,
        awaited,
        node,
    }
}

/// Every call that waits for peers.
const AWAITING: [Awaiting; 7] = [
    awaiting("dispatch", &[], 0, "dispatch", None),
    awaiting("dispatch_counts", &["dispatch_async"], 0, "dispatch", None),
    awaiting("dispatch_wait", &["dispatch_async"], 0, "dispatch", None),
    awaiting("combine", &["dispatch"], 1, "combine", Some(1)),
    awaiting(
        "combine_wait",
        &["dispatch", "combine_async"],
        1,
        "combine",
        Some(1),
    ),
    awaiting("give_up", &["dispatch"], 1, "give_up", Some(1)),
    awaiting(
        "dispatch_async",
        &["dispatch", "combine"],
        1,
        "combine",
        None,
    ),
];

/// Deadlines far below and far above what a rank is late by.
const SHORT: Duration = Duration::from_millis(300);
const LATE: Duration = Duration::from_secs(2);
const LONG: Duration = Duration::from_secs(60);

fn make(
    rank: &mut Communicator,
    call: &str,
    (input, output): &(DispatchInput, DispatchOutput),
) -> Result<(), Error> {
    let rows = CombineInput::new(output.tokens.unwrap());
    let combined = Tensor::contiguous(output.tokens.unwrap().at, DataType::Bf16, [0, 8]);
    let combined = CombineOutput::Summed(combined);
    match call {
        "dispatch" => rank.dispatch(STREAM, input, output),
        "dispatch_async" => rank.dispatch_async(STREAM, input),
        "dispatch_counts" => rank.dispatch_counts(STREAM),
        "dispatch_wait" => rank.dispatch_wait(STREAM, output),
        "combine" => rank.combine(STREAM, &rows, &combined),
        "combine_async" => rank.combine_async(STREAM, &rows, &combined),
        "combine_wait" => rank.combine_wait(STREAM),
        _ => rank.give_up(STREAM),
    }
}

/// Outcomes of ranks 0 and 2 of a call with this deadline, under a plan's, and how long they wait for it.
/// Calls before it have a long one. Rank 1 is late by [`LATE`], or never comes.
fn outcomes(
    of: &Awaiting,
    planned: Duration,
    own: Option<Duration>,
    comes: bool,
) -> [(Result<InputReport, Error>, Duration); 2] {
    let group = Group::simulated(3, 6).unwrap();
    let config = Config {
        p2p_world_size: of.node,
        ..config(planned)
    };
    let plan = Plan::new(&group, config).unwrap();
    let mut ranks = Communicator::new(&group, &plan).unwrap();
    let given: Vec<_> = ranks.iter().map(tensors).collect();
    for (rank, given) in ranks.iter_mut().zip(&given) {
        let made = if rank.rank() == Rank(1) {
            &of.before[..of.made]
        } else {
            of.before
        };
        rank.set_deadline(Some(LONG)).unwrap();
        for call in made {
            make(rank, call, given).unwrap();
        }
    }
    let start = Instant::now();
    for r in [0, 2] {
        ranks[r].set_deadline(own).unwrap();
        make(&mut ranks[r], of.call, &given[r]).unwrap();
    }
    let (others, [first, late, last]) = (given, &mut ranks[..]) else {
        panic!("three ranks");
    };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if comes {
                std::thread::sleep(LATE);
                make(late, of.awaited, &others[1]).unwrap();
            }
        });
        [first, last].map(|rank| (rank.synchronize(STREAM), start.elapsed()))
    })
}

#[test]
fn a_call_may_wait_longer_than_the_plan_says() {
    for of in &AWAITING {
        for (outcome, waited) in outcomes(of, SHORT, Some(LONG), true) {
            let about = format!("{} after {waited:?}", of.call);
            let told = outcome.unwrap_or_else(|error| panic!("{about}: {error}"));
            assert_eq!(told.fault(), None, "{about}");
            assert!(waited >= LATE, "{about}");
        }
    }
}

/// The same, where calls have the plan's deadline.
#[test]
fn a_call_waits_as_long_as_the_plan_says() {
    for of in &AWAITING {
        assert_named(of, outcomes(of, SHORT, None, true));
    }
}

#[test]
fn a_call_may_wait_shorter_than_the_plan_says() {
    for of in &AWAITING {
        assert_named(of, outcomes(of, LONG, Some(SHORT), false));
    }
}

/// Both have named rank 1, about a short deadline after their calls.
fn assert_named(of: &Awaiting, outcomes: [(Result<InputReport, Error>, Duration); 2]) {
    for (outcome, waited) in outcomes {
        let about = format!("{} after {waited:?}", of.call);
        let Err(Error::Fault(fault)) = outcome else {
            panic!("{about}: nobody was missed: {outcome:?}");
        };
        assert_eq!(
            (fault.kind, fault.culprit, fault.patience_ms),
            (FaultKind::PeerTimeout, Rank(1), Some(300)),
            "{about}: {fault}"
        );
        assert!(waited >= SHORT && waited < LONG / 2, "{about}: {fault}");
    }
}

/// A dispatch that the deadline of the combine before ends, far below its own, says how long it waited.
#[test]
fn a_wait_for_credits_says_how_long_it_was() {
    let group = Group::simulated(3, 8).unwrap();
    let mut ranks = ranks(&group, LONG);
    let given: Vec<_> = ranks.iter().map(tensors).collect();
    for (rank, given) in ranks.iter_mut().zip(&given) {
        make(rank, "dispatch", given).unwrap();
    }
    let (rank, given) = (&mut ranks[0], &given[0]);
    rank.set_deadline(Some(SHORT)).unwrap();
    make(rank, "combine", given).unwrap();
    rank.set_deadline(None).unwrap();
    make(rank, "dispatch", given).unwrap();
    let Err(Error::Fault(fault)) = rank.synchronize(STREAM) else {
        panic!("nobody was missed");
    };
    assert_eq!(fault.region, Region::Credit, "{fault}");
    let patience = fault.patience_ms.map(u64::from).map(Duration::from_millis);
    assert!(
        patience.is_some_and(|patience| patience <= SHORT),
        "{fault}"
    );
}
