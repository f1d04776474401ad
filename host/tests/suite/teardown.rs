//! Communicators that are dropped, and several that are closed together.

use crate::support;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::noted::{self, NotedFabric, Notes, config, empty_tensors, timeout};
use ferry::device::FaultPage;
use ferry::*;

/// Calls by which a rank frees its own memory, and the last one the windows.
const OWN: [&str; 3] = ["free", "free", "drop page"];
const WINDOWS: [&str; 2] = ["barrier", "free_windows"];
const NOTHING: [&str; 0] = [];

/// All ranks of a group of two, which take notes.
fn two(config: Config) -> (Arc<Notes>, Group, [Communicator; 2]) {
    let notes = Arc::new(Notes {
        all_local: true,
        ..Notes::default()
    });
    let fabric = NotedFabric {
        notes: notes.clone(),
        ranks: 2,
    };
    let group = Group::with_fabric(Box::new(fabric)).unwrap();
    let plan = Plan::new(&group, config).unwrap();
    let ranks = Communicator::new(&group, &plan).unwrap();
    notes.take();
    (notes, group, ranks.try_into().unwrap())
}

fn stream(handle: u64) -> Stream {
    // SAFETY: `Stream::new` is about a device's streams, and the noted fabric has none.
    unsafe { Stream::new(handle) }
}

/// Calls since the last check, except launches and waits.
fn freed(notes: &Notes) -> Vec<String> {
    let mut calls = notes.take();
    calls.retain(|call| !["dispatch", "combine", "synchronize", "download"].contains(&&**call));
    calls
}

#[test]
fn a_dropped_rank_that_launched_nothing_is_freed() {
    let (notes, group, [one, two]) = two(config());
    drop(one);
    assert_eq!(freed(&notes), OWN);
    drop(two);
    assert_eq!(freed(&notes), [&OWN[..], &WINDOWS].concat());
    group.close().unwrap();
}

#[test]
fn a_dropped_rank_is_freed_once_each_of_its_streams_was_synchronized() {
    let (notes, _, [mut one, two]) = two(config());
    for handle in [8, 9, 8] {
        noted::round(&mut one, stream(handle)).unwrap();
    }
    assert_eq!(one.synchronize(stream(8)).unwrap().fault(), None);
    assert_eq!(one.synchronize(stream(9)).unwrap().fault(), None);
    drop(one);
    assert_eq!(freed(&notes), OWN);
    two.close().unwrap();
    assert_eq!(freed(&notes), [&OWN[..], &WINDOWS].concat());
}

#[test]
fn a_dropped_rank_with_a_stream_that_was_not_synchronized_since_is_leaked_with_all_windows() {
    let cases: [&[u64]; 3] = [&[], &[9], &[8]];
    for waited in cases {
        let (notes, group, [mut one, two]) = two(config());
        for handle in [8, 9] {
            noted::round(&mut one, stream(handle)).unwrap();
        }
        for &handle in waited {
            assert_eq!(one.synchronize(stream(handle)).unwrap().fault(), None);
        }
        drop(one);
        assert_eq!(freed(&notes), NOTHING, "{waited:?}");
        two.close().unwrap();
        assert_eq!(freed(&notes), OWN);
        group.close().unwrap();
    }
    let (notes, _, [mut one, _two]) = two(config());
    noted::round(&mut one, stream(8)).unwrap();
    assert_eq!(one.synchronize(stream(8)).unwrap().fault(), None);
    noted::round(&mut one, stream(8)).unwrap();
    drop(one);
    assert_eq!(freed(&notes), NOTHING);
}

#[test]
fn a_dropped_rank_that_a_graph_has_had_is_leaked() {
    let (notes, _, [mut one, _two]) = two(config());
    *notes.graph.lock().unwrap() = Some(Vec::new());
    noted::round(&mut one, stream(8)).unwrap();
    // The graph is gone, but its last replay may be at work, in another stream.
    *notes.graph.lock().unwrap() = None;
    assert_eq!(one.synchronize(stream(8)).unwrap().fault(), None);
    drop(one);
    assert_eq!(freed(&notes), NOTHING);
}

#[test]
fn a_dropped_rank_that_a_graph_of_others_has_had_is_leaked_and_its_group_stays() {
    for are_gone in [false, true] {
        let (notes, group, [mut one, two]) = two(config());
        *notes.others_capture.lock().unwrap() = true;
        noted::round(&mut one, stream(8)).unwrap();
        assert_eq!(one.synchronize(stream(8)).unwrap().fault(), None);
        if are_gone {
            // SAFETY: nothing here makes graphs.
            unsafe { one.assume_no_foreign_graphs() };
        }
        drop((one, two));
        let (wanted, left) = if are_gone {
            ([&OWN[..], &OWN, &WINDOWS].concat(), None)
        } else {
            (OWN.to_vec(), Some(1))
        };
        assert_eq!(freed(&notes), wanted);
        let refused = match group.close() {
            Err(Error::CommunicatorsOpen { communicators }) => Some(communicators),
            closed => closed.map(|()| None).unwrap(),
        };
        assert_eq!(refused, left);
    }
}

#[test]
fn a_dropped_rank_of_one_of_several_processes_is_leaked() {
    let notes = Arc::default();
    let mut rank = noted::start(&notes, 2, config()).unwrap();
    notes.take();
    noted::round(&mut rank, stream(8)).unwrap();
    assert_eq!(rank.synchronize(stream(8)).unwrap().fault(), None);
    drop(rank);
    assert_eq!(freed(&notes), NOTHING);
}

#[test]
fn dropped_ranks_of_several_nodes_are_leaked() {
    let (notes, _, ranks) = two(Config {
        p2p_world_size: Some(1),
        ..config()
    });
    drop(ranks);
    assert_eq!(freed(&notes), NOTHING);
}

#[test]
fn a_dropped_rank_that_gave_up_is_freed_once_its_streams_were_synchronized() {
    let (notes, _, ranks) = two(config());
    for mut rank in ranks {
        noted::round(&mut rank, stream(8)).unwrap();
        *notes.page.lock().unwrap() = FaultPage::of(&timeout(), 1);
        assert!(matches!(rank.synchronize(stream(8)), Err(Error::Fault(_))));
        *notes.page.lock().unwrap() = FaultPage::default();
    }
    assert_eq!(freed(&notes), [&OWN[..], &OWN, &WINDOWS].concat());
}

#[test]
fn simulated_ranks_give_their_memory_back_and_the_group_goes_on() {
    let config = support::config();
    let group = Group::simulated(2, 3).unwrap();
    let plan = Plan::new(&group, config).unwrap();
    for is_combined in [true, false] {
        let mut ranks = Communicator::new(&group, &plan).unwrap();
        let tensors: Vec<_> = (ranks.iter().zip(support::TOKENS))
            .map(|(rank, tokens)| support::Tensors::new(rank, tokens))
            .collect();
        for (rank, t) in ranks.iter_mut().zip(&tensors) {
            rank.dispatch(support::STREAM, &t.input, &t.output).unwrap();
            if is_combined {
                let sums = t.combine_output(false);
                let rows = t.combine_input(None);
                rank.combine(support::STREAM, &rows, &sums).unwrap();
            }
        }
        let mut memory = Vec::new();
        for rank in &ranks {
            assert_eq!(rank.synchronize(support::STREAM).unwrap().fault(), None);
            let pointers = rank.device_pointers();
            // SAFETY: the simulator refuses freed addresses.
            let at = [pointers.counters, pointers.table[0][1]]
                .map(|at| unsafe { DevicePtr::new(at, 8) });
            memory.push((rank.device().clone(), at));
        }
        let is_there = |(device, at): &(Arc<dyn Device>, [DevicePtr; 2])| {
            at.map(|at| device.download(at, &mut [0; 8]).is_ok())
        };
        assert!(memory.iter().all(|memory| is_there(memory) == [true; 2]));
        drop(ranks.remove(0));
        // A peer may still write into the window.
        assert_eq!(is_there(&memory[0]), [false, true]);
        drop(ranks);
        assert!(memory.iter().all(|memory| is_there(memory) == [false; 2]));
    }
    group.close().unwrap();
}

/// The calls of a round that no rank waits for, on ranks that it then closes.
fn close_at_work(group: &Group, plan: &Plan, with_calls: usize) {
    let mut ranks = Communicator::new(group, plan).unwrap();
    for (rank, tokens) in ranks.iter_mut().zip(support::TOKENS).take(with_calls) {
        let t = support::Tensors::new(rank, tokens);
        rank.dispatch(support::STREAM, &t.input, &t.output).unwrap();
        rank.give_up(support::STREAM).unwrap();
    }
    Communicator::close_all(ranks).unwrap();
}

#[test]
fn closing_simulated_ranks_waits_for_their_kernels_also_without_a_peer() {
    let deadline = Duration::from_millis(200);
    let config = Config {
        deadline,
        ..support::config()
    };
    let group = Group::simulated(2, 3).unwrap();
    let plan = Plan::new(&group, config).unwrap();
    // Rank 0 waits for rank 1 until its deadline.
    let begun = Instant::now();
    close_at_work(&group, &plan, 1);
    let took = begun.elapsed();
    assert!(
        (deadline / 2..Duration::from_secs(60)).contains(&took),
        "{took:?}"
    );
    close_at_work(&group, &plan, 2);
    // No kernel of the rounds before runs on in freed memory.
    let mut ranks = Communicator::new(&group, &plan).unwrap();
    let tensors: Vec<_> = (ranks.iter().zip(support::TOKENS))
        .map(|(rank, tokens)| support::Tensors::new(rank, tokens))
        .collect();
    for (rank, t) in ranks.iter_mut().zip(&tensors) {
        rank.dispatch(support::STREAM, &t.input, &t.output).unwrap();
    }
    support::combine_all(&mut ranks, &tensors);
    support::close(ranks);
    group.close().unwrap();
}

#[test]
fn all_ranks_are_closed_and_every_failure_is_given() {
    let (notes, group, [mut one, mut two]) = two(config());
    *notes.graph.lock().unwrap() = Some(Vec::new());
    noted::round(&mut one, stream(8)).unwrap();
    let graph = notes.graph.lock().unwrap().take();
    noted::round(&mut two, stream(8)).unwrap();
    notes.take();

    let failed = Communicator::close_all([one, two]).unwrap_err();
    assert_eq!(freed(&notes), OWN);
    let text = failed.to_string();
    assert!(
        text.starts_with("closing 1 of 2 ranks failed; rank 0: "),
        "{text}"
    );
    assert_eq!(failed.failures().len(), 1);
    let (rank, failure) = failed.into_failures().remove(0);
    assert_eq!(rank, Rank(0));
    assert!(
        matches!(failure.error, Error::GraphsAlive { graphs: 1, .. }),
        "{failure}"
    );
    drop(graph);
    Communicator::close_all(failure.communicator.map(|rank| *rank)).unwrap();
    assert_eq!(freed(&notes), [&OWN[..], &WINDOWS].concat());
    group.close().unwrap();
}

#[test]
fn all_failures_of_closing_become_the_first_one() {
    let (notes, _, [mut one, mut two]) = two(config());
    *notes.graph.lock().unwrap() = Some(Vec::new());
    noted::round(&mut one, stream(8)).unwrap();
    let first = notes.graph.lock().unwrap().replace(Vec::new());
    noted::round(&mut two, stream(8)).unwrap();
    let close = |ranks| -> Result<(), Error> { Ok(Communicator::close_all(ranks)?) };
    let error = close(vec![one, two]).unwrap_err();
    assert!(
        matches!(error, Error::GraphsAlive { rank: Rank(0), .. }),
        "{error}"
    );
    drop(first);
}

#[test]
fn a_refused_round_leaves_a_rank_that_can_be_dropped() {
    let (notes, _, [mut one, _two]) = two(config());
    let (input, output) = empty_tensors(&one);
    *notes.page.lock().unwrap() = FaultPage::of(&timeout(), 1);
    let refused = one.dispatch(stream(8), &input, &output);
    assert!(matches!(refused, Err(Error::Poisoned(_))));
    drop(one);
    assert_eq!(freed(&notes), OWN);
}
