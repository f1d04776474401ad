//! Orders of two ranks' kernels in streams and captures, those that work and those that do not.

use super::graphs::{Recorded, take};
use super::*;
use Kernel::{
    Combine, CombineAsync, CombineWait, Dispatch, DispatchAsync, DispatchWait, FusedSilu, GiveUp,
};

/// The driver gives each capture a number of its own.
fn capture() -> u64 {
    use std::sync::atomic::AtomicU64;

    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn stream(handle: u64) -> Stream {
    // SAFETY: `Stream::new` is about enqueued work, and nothing here enqueues.
    unsafe { Stream::new(handle) }
}

fn lane(handle: u64) -> Lane {
    Lane::of(stream(handle), None)
}

fn pair() -> [Turn; 2] {
    let turns = Order::of(vec![Rank(4), Rank(6)]);
    turns.try_into().ok().unwrap()
}

/// Makes calls of ranks, by index, until one is refused; returns its position and the two kernels.
fn run(turns: &[Turn; 2], calls: &[(usize, Kernel, Lane)]) -> Option<(usize, [Rank; 2])> {
    for (place, &(index, kernel, lane)) in calls.iter().enumerate() {
        match turns[index].reserve(kernel, lane) {
            Ok(turn) => turn.launched(true),
            Err(SharedGpuError::OneStream { rank, waiting, .. }) => {
                return Some((place, [rank, waiting]));
            }
            Err(other) => panic!("{other}"),
        }
    }
    None
}

/// Calls of ranks, by index, in one stream.
fn in_one(calls: &[(usize, Kernel)]) -> Vec<(usize, Kernel, Lane)> {
    calls
        .iter()
        .map(|&(index, kernel)| (index, kernel, lane(9)))
        .collect()
}

const SECOND: [Rank; 2] = [Rank(6), Rank(4)];
const FIRST: [Rank; 2] = [Rank(4), Rank(6)];

#[test]
fn a_fused_call_behind_one_that_waits_for_it_is_refused() {
    let calls = in_one(&[(0, Dispatch), (0, Combine), (1, Dispatch)]);
    assert_eq!(run(&pair(), &calls), Some((2, SECOND)));
    let turns = pair();
    for round in 0..3 {
        let apart = [
            (0, Dispatch, 9),
            (1, Dispatch, 8),
            (1, Combine, 8),
            (0, Combine, 9),
        ];
        let apart = apart.map(|(index, kernel, handle)| (index, kernel, lane(handle)));
        assert_eq!(run(&turns, &apart), None, "round {round}");
    }
    // Both dispatches are over there, and the combines are not.
    let turns = pair();
    run(&turns, &[(1, Dispatch, lane(8)), (0, Dispatch, lane(9))]);
    let calls = in_one(&[(1, Combine), (0, Combine)]);
    assert_eq!(run(&turns, &calls), Some((1, FIRST)));
}

#[test]
fn split_calls_that_send_before_one_waits_are_taken_round_after_round() {
    let turns = pair();
    for round in 0..3 {
        let calls = [
            DispatchAsync,
            DispatchWait,
            FusedSilu,
            CombineAsync,
            CombineWait,
        ];
        let calls = calls.map(|kernel| [(0, kernel), (1, kernel)]).concat();
        assert_eq!(run(&turns, &in_one(&calls)), None, "round {round}");
    }
    // The last one to send may wait in the same call.
    let calls = in_one(&[(0, DispatchAsync), (1, Dispatch), (0, DispatchWait)]);
    assert_eq!(run(&turns, &calls), None);
}

#[test]
fn a_wait_before_another_rank_has_sent_is_refused_there() {
    let calls = in_one(&[(0, DispatchAsync), (0, DispatchWait), (1, DispatchAsync)]);
    assert_eq!(run(&pair(), &calls), Some((2, SECOND)));
    let dispatched = [
        (0, DispatchAsync),
        (1, DispatchAsync),
        (0, DispatchWait),
        (1, DispatchWait),
    ];
    let combined = [(1, CombineAsync), (1, CombineWait), (0, CombineAsync)];
    let calls = in_one(&[&dispatched[..], &combined].concat());
    assert_eq!(run(&pair(), &calls), Some((6, FIRST)));
    // The next round's dispatch waits for credits of this one's combine.
    let combined = [
        (0, CombineAsync),
        (1, CombineAsync),
        (0, CombineWait),
        (0, DispatchAsync),
    ];
    let turns = pair();
    assert_eq!(
        run(&turns, &in_one(&[&dispatched[..], &combined].concat())),
        None
    );
    let next = in_one(&[(1, CombineWait), (1, DispatchAsync)]);
    assert_eq!(run(&turns, &next), None);
}

#[test]
fn a_round_is_given_up_on_all_before_one_sends_again() {
    let dispatched = [DispatchAsync, DispatchWait];
    let dispatched = dispatched.map(|kernel| [(0, kernel), (1, kernel)]).concat();
    let early = [(0, GiveUp), (0, DispatchAsync), (1, GiveUp)];
    let calls = in_one(&[&dispatched[..], &early].concat());
    assert_eq!(run(&pair(), &calls), Some((6, SECOND)));
    let turns = pair();
    for round in 0..3 {
        let given_up = [(0, GiveUp), (1, GiveUp)];
        let calls = in_one(&[&dispatched[..], &given_up].concat());
        assert_eq!(run(&turns, &calls), None, "round {round}");
    }
}

#[test]
fn a_call_that_was_refused_may_be_made_in_another_stream() {
    let turns = pair();
    assert!(run(&turns, &in_one(&[(0, Dispatch), (1, Dispatch)])).is_some());
    assert_eq!(run(&turns, &[(1, Dispatch, lane(8))]), None);
    // And the kernel there waits for it no more.
    assert_eq!(run(&turns, &in_one(&[(1, CombineAsync)])), None);
}

#[test]
fn handles_0_and_1_are_one_stream_and_2_one_of_each_thread() {
    let calls = |second| [(0, Dispatch, second), (1, Dispatch, lane(0))];
    assert_eq!(run(&pair(), &calls(lane(1))), Some((1, SECOND)));
    assert_eq!(run(&pair(), &calls(lane(2))), None);
    let mine = lane(2);
    assert_eq!(
        run(&pair(), &[(0, Dispatch, mine), (1, Dispatch, lane(2))]),
        Some((1, SECOND))
    );
    let other = thread::scope(|scope| scope.spawn(|| lane(2)).join().unwrap());
    assert_eq!(
        run(&pair(), &[(0, Dispatch, mine), (1, Dispatch, other)]),
        None
    );
}

#[test]
fn calls_of_several_ranks_are_reserved_together_and_taken_back() {
    let turns = pair();
    let each = |kernel, handles: [u64; 2]| {
        let mut reserved = Vec::new();
        for (turn, handle) in turns.iter().zip(handles) {
            let refused = turn.reserve(kernel, lane(handle));
            reserved.push(refused.map_err(|_| turn.rank())?);
        }
        Ok(())
    };
    assert_eq!(each(Dispatch, [8, 9]), Ok(()));
    assert_eq!(each(Dispatch, [9, 9]), Err(Rank(6)));
    assert_eq!(each(DispatchAsync, [9, 9]), Ok(()));
    // Nothing of that was enqueued.
    assert_eq!(
        run(&turns, &in_one(&[(1, DispatchAsync), (0, Dispatch)])),
        None
    );
}

#[test]
fn within_a_capture_the_same_holds_and_nothing_of_it_counts_outside() {
    let turns = pair();
    for _ in 0..3 {
        let captured = Lane::of(stream(9), Some(capture()));
        let calls = [
            (0, Dispatch, captured),
            (0, Combine, captured),
            (1, Dispatch, captured),
        ];
        assert_eq!(run(&turns, &calls), Some((2, SECOND)));
    }
    // A rank's graph alone, as often as that.
    let alone = Lane::of(stream(9), Some(capture()));
    assert_eq!(
        run(&turns, &[(1, Dispatch, alone), (1, Combine, alone)]),
        None
    );
    let calls = in_one(&[(0, DispatchAsync), (1, DispatchAsync), (0, DispatchWait)]);
    assert_eq!(run(&turns, &calls), None);
}

#[test]
fn a_capture_may_begin_in_the_middle_of_a_round() {
    let kernels = [DispatchWait, CombineAsync, CombineWait, DispatchAsync];
    for start in 0..4 {
        let captured = Lane::of(stream(9), Some(capture()));
        let calls: Vec<_> = (start..start + 4)
            .flat_map(|at| [0, 1].map(|index| (index, kernels[at % 4], captured)))
            .collect();
        assert_eq!(run(&pair(), &calls), None, "from {:?}", kernels[start]);
    }
    let kernels = [DispatchWait, GiveUp, DispatchAsync];
    for start in 0..3 {
        let captured = Lane::of(stream(9), Some(capture()));
        let calls: Vec<_> = (start..start + 3)
            .flat_map(|at| [0, 1].map(|index| (index, kernels[at % 3], captured)))
            .collect();
        assert_eq!(run(&pair(), &calls), None, "from {:?}", kernels[start]);
    }
    // The other rank's half is due if its own call shows that it was not sent before.
    for (first, second) in [
        (Combine, Combine),
        (DispatchWait, DispatchAsync),
        (CombineWait, CombineAsync),
    ] {
        let captured = Lane::of(stream(9), Some(capture()));
        let calls = [(0, first, captured), (1, second, captured)];
        assert_eq!(run(&pair(), &calls), Some((1, SECOND)), "{first:?}");
    }
}

/// The recordings of a capture of these calls, each in a stream of its own.
fn recorded(turns: &[Turn; 2], calls: &[(usize, Kernel)]) -> Recorded {
    let number = capture();
    let in_lane = |&(index, kernel): &(usize, Kernel)| {
        let lane = Lane::of(stream(20 + index as u64), Some(number));
        (index, kernel, lane)
    };
    assert_eq!(
        run(turns, &calls.iter().map(in_lane).collect::<Vec<_>>()),
        None
    );
    let mut all = take(number);
    assert!(all.len() == 1 && take(number).is_empty());
    all.remove(0)
}

#[test]
fn graphs_of_two_ranks_are_launched_into_two_streams() {
    let turns = pair();
    let [first, second] = [0, 1].map(|at| recorded(&turns, &[(at, Dispatch), (at, Combine)]));
    for _ in 0..3 {
        for (graph, handle) in [(&first, 9), (&second, 8)] {
            graph.reserve(lane(handle)).unwrap().launched(true);
        }
    }
    first.reserve(lane(9)).unwrap().launched(true);
    let refused = second.reserve(lane(9)).err().unwrap();
    let SharedGpuError::OneStream { rank, waiting, .. } = refused else {
        panic!("{refused}")
    };
    assert_eq!([rank, waiting], SECOND);
    // Nor is a call taken there.
    assert!(turns[1].reserve(Dispatch, lane(9)).is_err());
    drop(second.reserve(lane(8)).unwrap());
    // A launch that failed met nothing.
    assert!(turns[1].reserve(Dispatch, lane(9)).is_err());
}

#[test]
fn a_graph_with_branches_of_two_ranks_is_one_launch() {
    let turns = pair();
    let calls = [(0, Dispatch), (1, Dispatch), (0, Combine), (1, Combine)];
    let graph = recorded(&turns, &calls);
    for _ in 0..3 {
        graph.reserve(lane(9)).unwrap().launched(true);
    }
    let calls = in_one(&[(0, DispatchAsync), (1, DispatchAsync), (1, DispatchWait)]);
    assert_eq!(run(&turns, &calls), None);
}

#[test]
fn behind_a_capture_of_others_only_captures_are_looked_at() {
    let turns = pair();
    let captured = Lane::of(stream(9), Some(capture()));
    let turn = turns[0].reserve(Dispatch, captured).unwrap();
    turn.launched(false);
    assert!(turns[1].reserve(Dispatch, captured).is_err());
    assert_eq!(run(&turns, &in_one(&[(0, Dispatch), (1, Dispatch)])), None);
}

#[test]
fn what_a_failed_launch_would_have_met_is_waited_for_again() {
    let turns = pair();
    let failing = turns[0].reserve(Dispatch, lane(8)).unwrap();
    // Meanwhile the other rank's kernel seems to follow no kernel that waits for it.
    turns[1].reserve(Dispatch, lane(9)).unwrap().launched(true);
    drop(failing);
    assert_eq!(run(&turns, &in_one(&[(0, Dispatch)])), Some((0, FIRST)));
    assert_eq!(run(&turns, &[(0, Dispatch, lane(8))]), None);
    assert!(lock(&turns[0].order.enqueued).waits.is_empty());
}

#[test]
fn a_capture_of_many_communicators_keeps_what_each_has_recorded() {
    let captured = Lane::of(stream(9), Some(capture()));
    let pairs: Vec<_> = (0..=MOST_RECORDINGS).map(|_| pair()).collect();
    for turns in &pairs {
        assert_eq!(run(turns, &[(0, Dispatch, captured)]), None);
    }
    for turns in &pairs {
        assert_eq!(run(turns, &[(1, Dispatch, captured)]), Some((0, SECOND)));
    }
}
