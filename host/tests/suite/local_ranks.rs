//! Calls for all ranks of a process.

use std::sync::Arc;

use crate::noted::{self, Notes, empty_tensors, group_of, memory};
use crate::support::{self, STREAM, TOKENS, Tensors, two_ranks};
use ferry::device::{Args, FaultPage};
use ferry::error::LocalRanksError;
use ferry::*;

fn all_local() -> Arc<Notes> {
    Arc::new(Notes {
        all_local: true,
        ..Notes::default()
    })
}

/// Two ranks that are only noted, and what they are given.
fn pair() -> (Arc<Notes>, Vec<Communicator>, Given) {
    let notes = all_local();
    let group = group_of(&notes);
    let plan = Plan::new(&group, noted::config()).unwrap();
    let ranks = Communicator::new(&group, &plan).unwrap();
    notes.take();
    let given = given(&ranks);
    (notes, ranks, given)
}

/// Streams of a pair, and every call of a round, the same for both.
struct Given {
    streams: [Stream; 2],
    dispatch: Call,
    dispatch_async: Call,
    dispatch_wait: Call,
    combine: Call,
    combine_async: Call,
    input: DispatchInput,
    output: DispatchOutput,
}

impl Given {
    /// Makes a call on both.
    fn both(&self, ranks: &mut [Communicator], call: Call) -> Result<(), Error> {
        self.each(ranks, [call; 2])
    }

    fn each(&self, ranks: &mut [Communicator], calls: [Call; 2]) -> Result<(), Error> {
        Communicator::together(ranks, &self.streams, &calls)
    }
}

fn given(ranks: &[Communicator]) -> Given {
    let (input, output) = empty_tensors(&ranks[0]);
    let combined =
        CombineOutput::Apart(Tensor::contiguous(memory(8192), DataType::Bf16, [2, 1, 8]));
    let rows = CombineInput::new(output.tokens.unwrap());
    Given {
        // SAFETY: `Stream::new` is about a device's streams, and the noted fabric has none.
        streams: [9, 10].map(|handle| unsafe { Stream::new(handle) }),
        dispatch: Call::Dispatch(input, output),
        dispatch_async: Call::DispatchAsync(input),
        dispatch_wait: Call::DispatchWait(output),
        combine: Call::Combine(rows, combined),
        combine_async: Call::CombineAsync(rows, combined),
        input,
        output,
    }
}

/// Inputs of a dispatch with more tokens than the plan has.
fn too_many(input: DispatchInput) -> DispatchInput {
    let mut wrong = input;
    wrong.x.dims[0] = 5;
    wrong
}

fn close(ranks: Vec<Communicator>) {
    ranks.into_iter().for_each(|rank| rank.close().unwrap());
}

/// A dispatch, as kernel, rank and stream of each launch.
fn launched(notes: &Notes) -> Vec<(&'static str, u32, Stream)> {
    let launches = std::mem::take(&mut *notes.launches.lock().unwrap());
    let each = launches.iter().map(|launch| {
        let rank = match launch.args {
            Args::Dispatch(with) => with.args.common.rank(),
            Args::Combine(with) => with.args.common.rank(),
            Args::Counts(args) => args.common.rank(),
            Args::GiveUp(args) => args.common.rank(),
            Args::Links(_) | Args::Silu(_) => panic!("a kernel that nobody asked for"),
        };
        (launch.kernel.name(), rank.0, launch.stream)
    });
    each.collect()
}

#[test]
fn each_call_launches_on_every_rank_in_its_stream_and_does_nothing_else() {
    let (notes, mut ranks, g) = pair();
    for call in [
        g.dispatch,
        g.combine,
        g.dispatch_async,
        Call::DispatchCounts,
        g.dispatch_wait,
        g.combine_async,
        Call::CombineWait,
        g.dispatch,
        Call::GiveUp,
    ] {
        g.both(&mut ranks, call).unwrap();
    }
    let kernels = [
        "dispatch",
        "combine",
        "dispatch_async",
        "dispatch_counts",
        "dispatch_wait",
        "combine_async",
        "combine_wait",
        "dispatch",
        "give_up",
    ];
    assert_eq!(notes.take(), kernels.map(|name| [name; 2]).concat());
    let each = kernels.map(|name| [(name, 0, g.streams[0]), (name, 1, g.streams[1])]);
    assert_eq!(launched(&notes), each.concat());
    close(ranks);
}

#[test]
fn as_many_values_as_ranks_or_both_numbers_are_named() {
    let (notes, mut ranks, g) = pair();
    let (one, three) = ([g.streams[0]; 1], [g.dispatch; 3]);
    let mut says = |streams: &[Stream], calls: &[Call], wanted: &str| {
        let refused = Communicator::together(&mut ranks, streams, calls).unwrap_err();
        let rule = "were given, but the call is for 2 ranks, [0, 1], and takes one for each";
        assert_eq!(refused.to_string(), format!("{wanted} {rule}"));
        assert!(
            matches!(refused, Error::LocalRanks(LocalRanksError::Count { .. })),
            "{refused:?}"
        );
    };
    says(&one, &three[..2], "1 streams");
    says(&[g.streams[0]; 4], &three[..2], "4 streams");
    says(&g.streams, &three, "3 calls");
    says(&g.streams, &[], "0 calls");
    assert_eq!(notes.take(), [""; 0]);
    close(ranks);
}

/// A rank that gives up and one that combines would wait for each other until the deadline.
#[test]
fn two_kinds_of_calls_are_refused_together() {
    let (notes, mut ranks, g) = pair();
    g.both(&mut ranks, g.dispatch).unwrap();
    let refused = g.each(&mut ranks, [g.combine, Call::GiveUp]).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the call of rank 1 is give_up, and that of the first rank is combine; all ranks make one kind of \
         call together"
    );
    let Error::LocalRanks(LocalRanksError::OtherCall { first, other, rank }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!((first, other, rank), ("combine", "give_up", Rank(1)));
    assert_eq!(notes.take(), ["dispatch"; 2]);
    g.both(&mut ranks, Call::GiveUp).unwrap();
    close(ranks);
}

/// Checks that a call was refused because of rank 1, and returns the reason.
fn of_rank_1(result: Result<(), Error>) -> Error {
    match result.err() {
        Some(Error::LocalRanks(LocalRanksError::Refused {
            rank: Rank(1),
            source,
        })) => *source,
        other => panic!("not refused because of rank 1: {other:?}"),
    }
}

#[test]
fn where_a_check_of_one_rank_fails_nothing_is_launched() {
    let (notes, mut ranks, g) = pair();
    let wrong = too_many(g.input);
    let refused = g.each(&mut ranks, [g.dispatch, Call::Dispatch(wrong, g.output)]);
    let text = refused.as_ref().unwrap_err().to_string();
    assert!(
        text.starts_with("rank 1: 5 tokens given") && text.ends_with("launched on any rank"),
        "{text}"
    );
    let refused = of_rank_1(refused);
    assert!(
        matches!(refused, Error::TooManyTokens { given: 5, max: 4 }),
        "{refused}"
    );
    let sent = [g.dispatch_async, Call::DispatchAsync(wrong)];
    let refused = of_rank_1(g.each(&mut ranks, sent));
    assert!(matches!(refused, Error::TooManyTokens { .. }), "{refused}");

    // A stream without room is found before rank 0 is launched, too.
    *notes.green.lock().unwrap() = vec![(g.streams[1], 3)];
    let refused = of_rank_1(g.both(&mut ranks, g.dispatch));
    assert!(
        matches!(
            refused,
            Error::GreenContext {
                multiprocessors: 3,
                ..
            }
        ),
        "{refused}"
    );
    notes.green.lock().unwrap().clear();

    let Call::Combine(mut rows, combined) = g.combine else {
        panic!("{:?}", g.combine)
    };
    rows.expert_rows.dims[0] = 7;
    g.both(&mut ranks, g.dispatch).unwrap();
    assert_eq!(notes.take(), ["dispatch"; 2]);
    for calls in [
        [g.combine, Call::Combine(rows, combined)],
        [g.combine_async, Call::CombineAsync(rows, combined)],
    ] {
        let refused = of_rank_1(g.each(&mut ranks, calls));
        assert!(matches!(refused, Error::Tensor(_)), "{refused}");
    }
    assert_eq!(notes.take(), [""; 0]);
    g.both(&mut ranks, g.combine).unwrap();
    assert_eq!(notes.take(), ["combine"; 2]);
    assert!(ranks.iter().all(|rank| rank.round() == Round::Idle));
    close(ranks);
}

#[test]
fn a_graph_in_the_making_holds_nothing_of_a_call_that_was_refused() {
    let (notes, mut ranks, g) = pair();
    *notes.graph.lock().unwrap() = Some(Vec::new());
    let wrong = Call::Dispatch(too_many(g.input), g.output);
    of_rank_1(g.each(&mut ranks, [g.dispatch, wrong]));
    assert_eq!(notes.graph.lock().unwrap().as_ref().map(Vec::len), Some(0));
    close(ranks);
}

#[test]
fn a_rank_that_gave_up_keeps_all_from_being_launched() {
    let (notes, mut ranks, g) = pair();
    // Rank 0 was checked before the fault came, and is not checked again.
    *notes.page.lock().unwrap() = FaultPage::of(&noted::timeout(), 1);
    ranks[1].check().unwrap_err();
    *notes.page.lock().unwrap() = FaultPage::default();
    let refused = of_rank_1(g.both(&mut ranks, g.dispatch));
    // No call of rank 1 was enqueued.
    let told = Fault {
        is_culprit_behind: true,
        ..noted::timeout()
    };
    assert!(
        matches!(refused, Error::Poisoned(fault) if fault == told),
        "{refused}"
    );
    assert!(launched(&notes).is_empty());
    assert_eq!(ranks[0].check().unwrap().fault(), None);
    close(ranks);
}

#[test]
fn where_a_launch_fails_all_ranks_of_the_call_are_poisoned() {
    let (notes, mut ranks, g) = pair();
    *notes.refused_launch.lock().unwrap() = Some(1);
    let refused = g.both(&mut ranks, g.dispatch).unwrap_err();
    let Error::LocalRanks(LocalRanksError::NotLaunched { rank, source }) = refused else {
        panic!("{refused}")
    };
    assert_eq!(rank, Rank(1));
    assert!(matches!(*source, Error::GroupClosed), "{source}");
    assert_eq!(launched(&notes).len(), 1);
    *notes.refused_launch.lock().unwrap() = None;
    let is_poisoned = |error: &Error| {
        let Error::LocalRanks(LocalRanksError::Poisoned { rank }) = error else {
            return false;
        };
        *rank == Rank(1)
    };
    for rank in ranks.iter_mut() {
        assert!(is_poisoned(&rank.check().unwrap_err()));
        assert!(is_poisoned(&rank.synchronize(STREAM).unwrap_err()));
        let refused = rank.dispatch(STREAM, &g.input, &g.output);
        assert!(is_poisoned(&refused.unwrap_err()));
    }
    let refused = g.both(&mut ranks, g.dispatch);
    assert!(matches!(
        refused,
        Err(Error::LocalRanks(LocalRanksError::Refused { rank: Rank(0), source })) if is_poisoned(&source)
    ));
    assert!(launched(&notes).is_empty());
    close(ranks);
}

#[test]
fn where_the_first_launch_fails_nothing_was_enqueued_and_the_round_stays() {
    let (notes, mut ranks, g) = pair();
    let of_rank_0 = |refused: Result<(), Error>| {
        let Err(Error::LocalRanks(LocalRanksError::Refused { rank, source })) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(rank, Rank(0));
        assert!(matches!(*source, Error::GroupClosed), "{source}");
        assert!(launched(&notes).is_empty());
    };
    *notes.refused_launch.lock().unwrap() = Some(0);
    of_rank_0(g.both(&mut ranks, g.dispatch));
    *notes.refused_launch.lock().unwrap() = None;
    g.both(&mut ranks, g.dispatch).unwrap();
    assert_eq!(launched(&notes).len(), 2);

    *notes.refused_launch.lock().unwrap() = Some(0);
    of_rank_0(g.both(&mut ranks, g.combine));
    *notes.refused_launch.lock().unwrap() = None;
    ranks
        .iter()
        .for_each(|rank| assert!(rank.check().unwrap().fault().is_none()));
    g.both(&mut ranks, g.combine).unwrap();
    close(ranks);
}

#[test]
fn ranks_at_different_points_are_named() {
    let (notes, mut ranks, g) = pair();
    ranks[1].dispatch_async(g.streams[1], &g.input).unwrap();
    let refused = of_rank_1(g.both(&mut ranks, g.dispatch));
    assert!(
        matches!(
            refused,
            Error::WrongOrder {
                call: "dispatch",
                rank: Rank(1),
                open: Round::DispatchSent
            }
        ),
        "{refused}"
    );
    let refused = g.both(&mut ranks, g.dispatch_wait);
    assert_eq!(
        refused.unwrap_err().to_string(),
        "rank 0: dispatch_wait is out of order: no round is open; dispatch or dispatch_async comes next; \
         nothing was launched on any rank"
    );
    assert_eq!(launched(&notes), [("dispatch_async", 1, g.streams[1])]);
    ranks[0].dispatch_async(g.streams[0], &g.input).unwrap();
    g.both(&mut ranks, g.dispatch_wait).unwrap();
    g.both(&mut ranks, g.combine).unwrap();
    close(ranks);
}

#[test]
fn a_slice_has_all_ranks_of_one_communicator_in_any_order() {
    let notes = all_local();
    let group = group_of(&notes);
    let plan = Plan::new(&group, noted::config()).unwrap();
    let mut ranks = Communicator::new(&group, &plan).unwrap();
    let mut others = Communicator::new(&group, &plan).unwrap();
    let g = given(&ranks);
    notes.take();
    let dispatch = |ranks: &mut [Communicator]| {
        let count = ranks.len();
        Communicator::together(ranks, &g.streams[..count], &[g.dispatch; 2][..count])
    };
    let refused = |ranks: &mut [Communicator]| dispatch(ranks).unwrap_err().to_string();
    assert_eq!(
        refused(&mut ranks[..1]),
        "rank 1 is missing: ranks [0] were given, but the call is for all ranks of this process"
    );
    assert_eq!(
        refused(&mut ranks[1..]),
        "rank 0 is missing: ranks [1] were given, but the call is for all ranks of this process"
    );
    assert_eq!(
        refused(&mut []),
        "no communicators were given; the call is for all ranks of this process"
    );
    std::mem::swap(&mut ranks[1], &mut others[1]);
    assert_eq!(
        refused(&mut ranks),
        "rank 1 is of another communicator than rank 0, which is given first; pass ranks that were made \
         together"
    );
    std::mem::swap(&mut ranks[1], &mut others[1]);
    assert_eq!(notes.take(), [""; 0]);
    ranks.reverse();
    dispatch(&mut ranks).unwrap();
    g.both(&mut ranks, g.combine).unwrap();
    assert_eq!(
        launched(&notes),
        [
            ("dispatch", 1, g.streams[0]),
            ("dispatch", 0, g.streams[1]),
            ("combine", 1, g.streams[0]),
            ("combine", 0, g.streams[1])
        ]
    );
    close(others);
    // One that was closed is missing, too.
    let last = ranks.pop().unwrap();
    last.close().unwrap();
    assert!(refused(&mut ranks).starts_with("rank 0 is missing"));
    close(ranks);
}

/// Rounds in the simulator, fused and split, compared with numbers computed by hand.
#[test]
fn rounds_of_all_ranks_at_once_carry_tokens_there_and_back() {
    for (seed, split, mode) in [
        (1, false, CombineMode::Reduced),
        (2, true, CombineMode::Reduced),
        (3, false, CombineMode::Exact),
        (4, true, CombineMode::Exact),
    ] {
        let config = Config {
            combine: mode,
            ..support::config()
        };
        let (mut ranks, tensors) = two_ranks(seed, config);
        let apart = mode == CombineMode::Exact;
        let streams = [STREAM; 2];
        let together = |ranks: &mut [Communicator], call: &dyn Fn(&Tensors) -> Call| {
            let calls: Vec<_> = tensors.iter().map(call).collect();
            Communicator::together(ranks, &streams, &calls).unwrap();
        };
        let answers = |t: &Tensors| (t.combine_input(None), t.combine_output(apart));
        for _ in 0..3 {
            if split {
                together(&mut ranks, &|t| Call::DispatchAsync(t.input));
                together(&mut ranks, &|t| Call::DispatchWait(t.output));
            } else {
                together(&mut ranks, &|t| Call::Dispatch(t.input, t.output));
            }
            for (t, rank) in tensors.iter().zip(&ranks) {
                assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
                t.answer(rank);
            }
            if split {
                together(&mut ranks, &|t| {
                    let (input, output) = answers(t);
                    Call::CombineAsync(input, output)
                });
                together(&mut ranks, &|_| Call::CombineWait);
            } else {
                together(&mut ranks, &|t| {
                    let (input, output) = answers(t);
                    Call::Combine(input, output)
                });
            }
            for (t, rank) in tensors.iter().zip(&ranks) {
                assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
                t.compare(rank, apart);
            }
        }
        assert_eq!(ranks.iter().len(), TOKENS.len());
        close(ranks);
    }
}
