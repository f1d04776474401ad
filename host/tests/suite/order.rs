//! The order of a round's calls, checked at run time: every call at every point.

use std::sync::Arc;

use crate::noted::{self, Notes, empty_tensors, memory, start, timeout};
use crate::support::STREAM;
use ferry::device::FaultPage;
use ferry::*;

/// The calls of a round, each with the point at which it comes and the one that it leads to.
const CALLS: [(&str, Round, Round); 8] = [
    ("dispatch", Round::Idle, Round::Dispatched),
    ("dispatch_async", Round::Idle, Round::DispatchSent),
    ("dispatch_wait", Round::DispatchSent, Round::Dispatched),
    ("combine", Round::Dispatched, Round::Idle),
    ("combine_async", Round::Dispatched, Round::CombineSent),
    ("combine_wait", Round::CombineSent, Round::Idle),
    ("give_up", Round::Dispatched, Round::Idle),
    ("dispatch_counts", Round::DispatchSent, Round::DispatchSent),
];

/// Every point of a round, with the calls that lead to it and the text of an error there.
const POINTS: [(Round, &[&str], &str); 4] = [
    (
        Round::Idle,
        &[],
        "no round is open; dispatch or dispatch_async comes next",
    ),
    (
        Round::DispatchSent,
        &["dispatch_async"],
        "dispatch_async was not waited for; dispatch_wait comes next",
    ),
    (
        Round::Dispatched,
        &["dispatch"],
        "the dispatch was not combined; combine, combine_async or give_up comes next",
    ),
    (
        Round::CombineSent,
        &["dispatch", "combine_async"],
        "combine_async was not waited for; combine_wait comes next",
    ),
];

/// The tensors of a round of a rank that takes notes.
struct Tensors {
    input: DispatchInput,
    output: DispatchOutput,
    experts: CombineInput,
    sums: CombineOutput,
}

impl Tensors {
    fn of(rank: &Communicator) -> Self {
        let (input, output) = empty_tensors(rank);
        Self {
            input,
            output,
            experts: CombineInput::new(output.tokens.unwrap()),
            sums: CombineOutput::Apart(Tensor::contiguous(memory(8192), DataType::Bf16, [2, 1, 8])),
        }
    }

    fn call(&self, rank: &mut Communicator, name: &str) -> Result<(), Error> {
        match name {
            "dispatch" => rank.dispatch(STREAM, &self.input, &self.output),
            "dispatch_async" => rank.dispatch_async(STREAM, &self.input),
            "dispatch_wait" => rank.dispatch_wait(STREAM, &self.output),
            "combine" => rank.combine(STREAM, &self.experts, &self.sums),
            "combine_async" => rank.combine_async(STREAM, &self.experts, &self.sums),
            "combine_wait" => rank.combine_wait(STREAM),
            "give_up" => rank.give_up(STREAM),
            "dispatch_counts" => rank.dispatch_counts(STREAM),
            _ => panic!("there is no call {name}"),
        }
    }

    fn calls(&self, rank: &mut Communicator, names: &[&str]) {
        for name in names {
            self.call(rank, name).unwrap();
        }
    }
}

/// Rank 0 of two, which takes notes.
fn noted_rank() -> (Arc<Notes>, Communicator, Tensors) {
    let notes = Arc::default();
    let rank = start(&notes, 2, noted::config()).unwrap();
    let tensors = Tensors::of(&rank);
    notes.take();
    (notes, rank, tensors)
}

/// Ends the round of `rank` from any point.
fn finish(rank: &mut Communicator, tensors: &Tensors) {
    while let Some((name, ..)) = CALLS.iter().find(|(_, at, _)| *at == rank.round()) {
        if rank.round() == Round::Idle {
            return;
        }
        tensors.call(rank, name).unwrap();
    }
}

#[test]
fn every_call_at_every_point_is_made_or_names_what_is_open() {
    for (point, before, text) in POINTS {
        for (name, at, then) in CALLS {
            let (notes, mut rank, tensors) = noted_rank();
            tensors.calls(&mut rank, before);
            assert_eq!(rank.round(), point);
            notes.take();
            let called = tensors.call(&mut rank, name);
            if point == at {
                called.unwrap();
                assert_eq!(rank.round(), then, "{name}");
                assert_eq!(notes.take(), [name]);
            } else {
                let refused = called.unwrap_err();
                assert!(
                    matches!(refused, Error::WrongOrder { call, rank: Rank(0), open }
                        if call == name && open == point),
                    "{refused}"
                );
                let wanted = format!("{name} is out of order: {text}");
                assert_eq!(refused.to_string(), wanted);
                assert_eq!(rank.round(), point, "{name}");
                assert_eq!(notes.take(), [""; 0]);
            }
            finish(&mut rank, &tensors);
            rank.close().unwrap();
        }
    }
}

#[test]
fn a_launch_that_is_refused_leaves_the_round_where_it_was() {
    for (point, before, _) in POINTS {
        for (name, at, then) in CALLS {
            if point != at {
                continue;
            }
            let (notes, mut rank, tensors) = noted_rank();
            tensors.calls(&mut rank, before);
            notes.take();
            *notes.refused_launch.lock().unwrap() = Some(0);
            let refused = tensors.call(&mut rank, name).unwrap_err();
            assert!(matches!(refused, Error::GroupClosed), "{refused}");
            assert_eq!((rank.round(), notes.take()), (point, vec![]));
            *notes.refused_launch.lock().unwrap() = None;
            tensors.call(&mut rank, name).unwrap();
            assert_eq!((rank.round(), notes.take()), (then, vec![name.to_owned()]));
            finish(&mut rank, &tensors);
            rank.close().unwrap();
        }
    }
}

#[test]
fn closing_with_an_open_round_frees_nothing_and_the_round_goes_on() {
    for (point, before, text) in &POINTS[1..] {
        let (notes, mut rank, tensors) = noted_rank();
        tensors.calls(&mut rank, before);
        notes.take();
        let refused = rank.close().unwrap_err();
        assert!(
            matches!(refused.error, Error::RoundOpen { rank: Rank(0), open } if open == *point),
            "{refused}"
        );
        assert_eq!(
            refused.to_string(),
            format!(
                "rank 0's communicator cannot be closed: {text}; enqueue the rest of the round, then close \
                 it; if a peer is lost, drop it, or close it after synchronize has returned the fault"
            )
        );
        assert!(notes.take().iter().all(|call| !call.contains("free")));
        let mut rank = *refused.communicator.expect("the communicator comes back");
        assert_eq!(rank.round(), *point);
        finish(&mut rank, &tensors);
        tensors.calls(&mut rank, &["dispatch", "combine"]);
        rank.close().unwrap();
        assert!(notes.take().iter().any(|call| call == "free"));
    }
}

#[test]
fn a_communicator_that_gave_up_says_why_and_is_closed_at_any_point() {
    for (_, before, _) in POINTS {
        let (notes, mut rank, tensors) = noted_rank();
        tensors.calls(&mut rank, before);
        notes.take();
        *notes.page.lock().unwrap() = FaultPage::of(&timeout(), 1);
        let refused = rank.check().unwrap_err();
        assert!(matches!(refused, Error::Fault(fault) if fault == timeout()));
        for (name, ..) in CALLS {
            let refused = tensors.call(&mut rank, name).unwrap_err();
            assert!(
                matches!(refused, Error::Poisoned(fault) if fault == timeout()),
                "{name}: {refused}"
            );
        }
        assert_eq!(notes.take(), [""; 0]);
        rank.close().unwrap();
        assert_eq!(notes.take(), ["free", "free", "drop page"]);
    }
}

#[test]
fn a_communicator_that_is_dropped_in_a_round_leaves_the_group() {
    let notes = Arc::<Notes>::default();
    let group = noted::group_of(&notes);
    for (_, before, _) in &POINTS[1..] {
        let mut rank = noted::join(&group, noted::config());
        let tensors = Tensors::of(&rank);
        tensors.calls(&mut rank, before);
        notes.take();
        let open = group.close();
        assert!(matches!(
            open,
            Err(Error::CommunicatorsOpen { communicators: 1 })
        ));
        drop(rank);
        // Another process may still use the memory.
        assert_eq!(notes.take(), [""; 0]);
    }
    group.close().unwrap();
}

#[test]
fn half_a_call_is_refused_where_nothing_travels() {
    let notes = Arc::<Notes>::default();
    let config = Config {
        skip_a2a: true,
        ..noted::config()
    };
    let mut rank = start(&notes, 2, config).unwrap();
    let tensors = Tensors::of(&rank);
    for name in ["dispatch_async", "combine_async", "dispatch_counts"] {
        let refused = tensors.call(&mut rank, name).unwrap_err();
        assert!(
            matches!(refused, Error::SplitWithoutTravel { call } if call == name),
            "{refused}"
        );
    }
    rank.close().unwrap();
}

#[test]
fn a_communicator_can_move_to_another_thread() {
    fn send<T: Send + 'static>() {}
    send::<Communicator>();
    send::<CloseError>();
}
