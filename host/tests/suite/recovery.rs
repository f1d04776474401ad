//! Recovery after a rank was lost, with all ranks in one process, in the steps of the guide (`recovery.md`).
//! `node/tests/recovery.rs` takes them in several processes.

use std::time::Duration;

use ferry::simulator::Options as SimulatorOptions;
use ferry::*;

const STREAM: Stream = Stream::DEFAULT;
const HIDDEN: usize = 8;

/// Experts for four ranks and for three.
fn config() -> Config {
    Config {
        deadline: Duration::from_secs(60),
        ..Config::new(12, 1, HIDDEN, 1)
    }
}

/// A group in which a missing rank is noticed soon.
fn group(ranks: u32) -> Group {
    let options = SimulatorOptions {
        patience: Some(Duration::from_millis(100)),
        ..SimulatorOptions::new(ranks, 5)
    };
    Group::simulated_with(options).unwrap()
}

fn begin(group: &Group) -> Vec<Communicator> {
    let plan = Plan::new(group, config()).unwrap();
    Communicator::new(group, &plan).unwrap()
}

/// Each of these ranks sends its token to the next rank's first expert; returns the result of each.
fn round(ranks: &mut [Communicator]) -> Vec<Result<Vec<u16>, Error>> {
    let mut sums = Vec::new();
    for rank in &mut *ranks {
        let (device, plan) = (rank.device().clone(), *rank.plan());
        let next = (rank.rank().0 + 1) % plan.ranks() * plan.local_experts() as u32;
        let x = device
            .upload_tensor([1, HIDDEN], &token(rank.rank()))
            .unwrap();
        let topk_ids = device.upload_tensor([1, 1], &[next as i32]).unwrap();
        let rows = DispatchBuffers::new(&device, &plan).unwrap();
        let sum = CombineBuffers::new(&device, &plan).unwrap();
        let (input, output) = (DispatchInput::new(x, topk_ids), *rows.output());
        rank.dispatch(STREAM, &input, &output).unwrap();
        let (experts, sum) = (
            CombineInput::new(output.tokens.unwrap()),
            sum.output(1).unwrap(),
        );
        rank.combine(STREAM, &experts, &sum).unwrap();
        sums.push(sum.rows());
    }
    let each = ranks.iter().zip(sums);
    each.map(|(rank, sum)| {
        assert_eq!(rank.synchronize(STREAM)?.fault(), None);
        rank.device().download_tensor(&sum)
    })
    .collect()
}

fn token(rank: Rank) -> [u16; HIDDEN] {
    [0x3f80 + 16 * rank.0 as u16; HIDDEN]
}

/// Checks that a round of all ranks brings every token back.
fn require_round(ranks: &mut [Communicator]) {
    let sums = round(ranks);
    for (rank, sum) in ranks.iter().zip(sums) {
        assert_eq!(sum.unwrap(), token(rank.rank()));
    }
}

#[test]
fn a_process_recovers_as_the_documentation_of_a_group_says() {
    let group_of_four = group(4);
    let mut ranks = begin(&group_of_four);
    require_round(&mut ranks);
    // Rank 3 does not call.
    // 1. Learn of it.
    for outcome in round(&mut ranks[..3]) {
        let Err(Error::Fault(fault)) = outcome else {
            panic!("rank 3 was not missed");
        };
        assert_eq!(
            (fault.kind, fault.culprit),
            (FaultKind::PeerTimeout, Rank(3))
        );
        let why = "rank 3 was not called: enqueue on all ranks before you wait for one";
        assert!(fault.to_string().contains(why), "{fault}");
    }
    // 2. Close the communicators.
    Communicator::close_all(ranks).unwrap();
    // 3. to 6., if the lost rank is only a thread that did not call: the same group.
    let mut ranks = begin(&group_of_four);
    require_round(&mut ranks);
    Communicator::close_all(ranks).unwrap();
    // 4. to 6., if it is lost: three are left.
    let group_of_three = group(3);
    let mut ranks = begin(&group_of_three);
    assert_eq!(ranks[0].plan().local_experts(), 4);
    // 7. Repeat.
    require_round(&mut ranks);
    Communicator::close_all(ranks).unwrap();
}

/// Ranks whose rank 3 dispatches after the others have given up on it. Their rows are there, so its dispatch
/// lacks nothing. Returns its arguments, too.
fn late_dispatch(group: &Group) -> (Vec<Communicator>, DispatchInput, DispatchBuffers) {
    let mut ranks = begin(group);
    require_round(&mut ranks);
    for outcome in round(&mut ranks[..3]) {
        assert!(matches!(outcome, Err(Error::Fault(_))), "{outcome:?}");
    }
    let late = &mut ranks[3];
    // Reads reports of this rank's kernels: none ran.
    assert!(late.check().unwrap().fault().is_none());
    let mut rows = DispatchBuffers::new(late.device(), late.plan()).unwrap();
    let input = rows.upload(&token(Rank(3)), &[0], None).unwrap();
    late.dispatch(STREAM, &input, rows.output()).unwrap();
    (ranks, input, rows)
}

#[test]
fn a_rank_that_comes_late_learns_that_its_peers_gave_up() {
    let (mut ranks, input, rows) = late_dispatch(&group(4));
    let late = &mut ranks[3];
    for _ in 0..2 {
        let Err(error) = late.synchronize(STREAM) else {
            panic!("rank 3 was not told");
        };
        let Error::PeerGaveUp { rank, peer } = error else {
            panic!("{error}");
        };
        assert_eq!((rank, peer), (Rank(3), Rank(0)));
    }
    let refused = late.dispatch(STREAM, &input, rows.output()).err();
    assert!(
        matches!(refused, Some(Error::PeerGaveUp { .. })),
        "{refused:?}"
    );
    Communicator::close_all(ranks).unwrap();
}

/// Rank 3 waits in its combine for a row of rank 0, which has given up on it.
#[test]
fn a_late_rank_that_waits_for_its_peers_is_its_own_culprit() {
    let (mut ranks, _, rows) = late_dispatch(&group(4));
    let late = &mut ranks[3];
    let sums = CombineBuffers::new(late.device(), late.plan()).unwrap();
    let answers = CombineInput::new(rows.output().tokens.unwrap());
    late.combine(STREAM, &answers, &sums.output(1).unwrap())
        .unwrap();
    let Err(Error::Fault(fault)) = late.synchronize(STREAM) else {
        panic!("rank 3 did not give up");
    };
    assert_eq!(fault.kind, FaultKind::PeerTimeout);
    assert_eq!((fault.peer, fault.culprit), (Rank(0), Rank(3)));
    let text = fault.to_string();
    let told = "; rank 0 had given up on this rank, which came late";
    assert!(text.contains(told), "{text}");
    Communicator::close_all(ranks).unwrap();
}

/// Closing finds by itself that a peer gave up on this rank, although its round is open.
#[test]
fn a_late_rank_is_closed_without_having_learned_it() {
    let (ranks, ..) = late_dispatch(&group(4));
    assert_eq!(ranks[3].round(), Round::Dispatched);
    // Not a wait of the communicator's.
    ranks[3].device().synchronize(STREAM).unwrap();
    Communicator::close_all(ranks).unwrap();
}
