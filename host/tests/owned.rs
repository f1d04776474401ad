//! Rounds that have their rank: every step, and what is refused.

#[path = "noted/mod.rs"]
mod noted;
#[path = "support/mod.rs"]
mod support;

use std::sync::Arc;

use ferry::device::FaultPage;
use ferry::*;
use noted::{Notes, empty_tensors, memory, start, timeout};
use support::{STREAM, Tensors, close, two_ranks};

/// Rounds of both kinds with the numbers of `support`.
fn rounds(seed: u64, combine: CombineMode, apart: bool) {
    let config = Config {
        combine,
        ..support::config()
    };
    let (mut ranks, tensors) = two_ranks(seed, config);
    let input = |t: &Tensors| match combine {
        CombineMode::Exact if !apart => t.combine_input(Some(t.weights)),
        _ => t.combine_input(None),
    };
    for splits in [false, true, false] {
        let each = ranks.into_iter().zip(&tensors);
        let dispatched: Vec<DispatchedOwned> = match splits {
            false => each
                .map(|(rank, t)| rank.dispatch_owned(STREAM, &t.input, &t.output).unwrap())
                .collect(),
            true => {
                let sent = each.map(|(rank, t)| rank.dispatch_async_owned(STREAM, &t.input));
                let sent: Vec<_> = sent.map(Result::unwrap).collect();
                let each = sent.into_iter().zip(&tensors);
                each.map(|(sent, t)| sent.wait(STREAM, &t.output).unwrap())
                    .collect()
            }
        };
        for (dispatched, t) in dispatched.iter().zip(&tensors) {
            dispatched.expert_parallel().synchronize(STREAM).unwrap();
            t.answer(dispatched.expert_parallel());
        }
        let each = dispatched.into_iter().zip(&tensors);
        ranks = match splits {
            false => each
                .map(|(d, t)| {
                    d.combine(STREAM, &input(t), &t.combine_output(apart))
                        .unwrap()
                })
                .collect(),
            true => {
                let sent =
                    each.map(|(d, t)| d.combine_async(STREAM, &input(t), &t.combine_output(apart)));
                let sent: Vec<_> = sent.map(Result::unwrap).collect();
                sent.into_iter().map(|d| d.wait(STREAM).unwrap()).collect()
            }
        };
        for (rank, t) in ranks.iter().zip(&tensors) {
            rank.synchronize(STREAM).unwrap();
            t.compare(rank, apart);
        }
    }
    close(ranks);
}

#[test]
fn owned_rounds_bring_what_borrowed_ones_do() {
    for seed in 0..8 {
        rounds(seed, CombineMode::Reduced, false);
        rounds(seed, CombineMode::Exact, false);
        rounds(seed, CombineMode::Exact, true);
    }
}

/// The tensors of a round of a rank that takes notes.
struct Round {
    input: DispatchInput,
    output: DispatchOutput,
    experts: CombineInput,
    sums: CombineOutput,
}

impl Round {
    fn of(rank: &Communicator) -> Self {
        let (input, output) = empty_tensors(rank);
        Self {
            input,
            output,
            experts: CombineInput::new(output.tokens),
            sums: CombineOutput::Apart(Tensor::contiguous(memory(8192), DataType::Bf16, [2, 1, 8])),
        }
    }

    /// The next call of a round, split or not.
    fn next(&self, round: UnfinishedOwned, splits: bool) -> Result<UnfinishedOwned, RoundError> {
        match (round, splits) {
            (UnfinishedOwned::Nothing(rank), false) => rank
                .dispatch_owned(STREAM, &self.input, &self.output)
                .map(UnfinishedOwned::Combine),
            (UnfinishedOwned::Nothing(rank), true) => rank
                .dispatch_async_owned(STREAM, &self.input)
                .map(UnfinishedOwned::DispatchWait),
            (UnfinishedOwned::DispatchWait(sent), _) => sent
                .wait(STREAM, &self.output)
                .map(UnfinishedOwned::Combine),
            (UnfinishedOwned::Combine(dispatched), false) => dispatched
                .combine(STREAM, &self.experts, &self.sums)
                .map(UnfinishedOwned::Nothing),
            (UnfinishedOwned::Combine(dispatched), true) => dispatched
                .combine_async(STREAM, &self.experts, &self.sums)
                .map(UnfinishedOwned::CombineWait),
            (UnfinishedOwned::CombineWait(sent), _) => {
                sent.wait(STREAM).map(UnfinishedOwned::Nothing)
            }
        }
    }
}

/// Rank 0 of two, which takes notes.
fn noted_rank() -> (Arc<Notes>, Communicator, Round) {
    let notes = Arc::default();
    let rank = start(&notes, 2, noted::config()).unwrap();
    let round = Round::of(&rank);
    notes.take();
    (notes, rank, round)
}

const FUSED: [&str; 2] = ["dispatch", "combine"];
const SPLIT: [&str; 4] = [
    "dispatch_async",
    "dispatch_wait",
    "combine_async",
    "combine_wait",
];

#[test]
fn an_owned_round_does_nothing_but_launch() {
    for (splits, kernels) in [(false, &FUSED[..]), (true, &SPLIT[..])] {
        let (notes, rank, tensors) = noted_rank();
        let mut round = UnfinishedOwned::Nothing(rank);
        for _ in kernels {
            round = tensors.next(round, splits).unwrap();
        }
        assert_eq!(notes.take(), kernels);
        assert!(matches!(round, UnfinishedOwned::Nothing(_)), "{round:?}");
        round.into_expert_parallel().close().unwrap();
    }
}

#[test]
fn every_call_that_is_refused_gives_the_rank_back_where_it_was() {
    for (splits, kernels) in [(false, &FUSED[..]), (true, &SPLIT[..])] {
        let (notes, rank, tensors) = noted_rank();
        let mut round = UnfinishedOwned::Nothing(rank);
        for kernel in kernels {
            let before = std::mem::discriminant(&round);
            *notes.refused_launch.lock().unwrap() = Some(0);
            let refused = tensors.next(round, splits).unwrap_err();
            assert!(matches!(refused.error, Error::GroupClosed), "{refused}");
            assert_eq!(notes.take(), [""; 0]);
            round = refused.communicator.unfinished_owned();
            assert_eq!(std::mem::discriminant(&round), before, "{kernel}");
            *notes.refused_launch.lock().unwrap() = None;
            round = tensors.next(round, splits).unwrap();
            assert_eq!(notes.take(), [*kernel]);
        }
        round.into_expert_parallel().close().unwrap();
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused_with_the_rank() {
    let (notes, rank, tensors) = noted_rank();
    let short = DispatchInput {
        topk_ids: Tensor::contiguous(memory(4096), DataType::I32, [1, 1]),
        ..tensors.input
    };
    let refused = rank
        .dispatch_owned(STREAM, &short, &tensors.output)
        .unwrap_err();
    assert!(matches!(refused.error, Error::Tensor(_)), "{refused}");
    let rank = *refused.communicator;
    let dispatched = rank
        .dispatch_owned(STREAM, &tensors.input, &tensors.output)
        .unwrap();
    let apart = CombineOutput::Summed(Tensor::contiguous(memory(8192), DataType::Bf16, [2, 8]));
    let refused = dispatched
        .combine(STREAM, &tensors.experts, &apart)
        .unwrap_err();
    assert!(
        matches!(refused.error, Error::WrongCombineOutput { .. }),
        "{refused}"
    );
    let round = tensors.next(refused.communicator.unfinished_owned(), false);
    assert_eq!(notes.take(), FUSED);
    round.unwrap().into_expert_parallel().close().unwrap();
}

#[test]
fn owned_and_borrowed_calls_make_one_round() {
    let (notes, rank, tensors) = noted_rank();
    let sent = rank.dispatch_async_owned(STREAM, &tensors.input).unwrap();
    let mut rank = sent.into_expert_parallel();
    let again = rank.dispatch(STREAM, &tensors.input, &tensors.output);
    assert!(matches!(again, Err(Error::DispatchNotWaited)), "{again:?}");
    let again = rank
        .dispatch_owned(STREAM, &tensors.input, &tensors.output)
        .unwrap_err();
    assert!(matches!(again.error, Error::DispatchNotWaited), "{again}");
    rank = *again.communicator;
    let Unfinished::DispatchWait(sent) = rank.unfinished() else {
        panic!("{rank:?}");
    };
    let _ = sent.wait(STREAM, &tensors.output).unwrap();
    let round = tensors.next(rank.unfinished_owned(), false).unwrap();
    assert_eq!(notes.take(), ["dispatch_async", "dispatch_wait", "combine"]);
    round.into_expert_parallel().close().unwrap();
}

#[test]
fn a_communicator_that_gave_up_comes_back_to_be_closed() {
    // How many calls come before.
    for calls in 0..SPLIT.len() {
        let (notes, rank, tensors) = noted_rank();
        let mut round = UnfinishedOwned::Nothing(rank);
        for _ in 0..calls {
            round = tensors.next(round, true).unwrap();
        }
        notes.take();
        *notes.page.lock().unwrap() = FaultPage::of(&timeout(), 1);
        let refused = tensors.next(round, true).unwrap_err();
        assert!(matches!(refused.error, Error::Poisoned(fault) if fault == timeout()));
        assert_eq!(notes.take(), [""; 0]);
        refused.communicator.close().unwrap();
        assert_eq!(notes.take(), ["free", "free", "drop page"]);
    }
}

#[test]
fn an_error_alone_drops_the_rank() {
    let notes = Arc::<Notes>::default();
    let group = noted::group_of(&notes);
    let rank = noted::join(&group, noted::config());
    let tensors = Round::of(&rank);
    let call = |rank: Communicator| -> Result<(), Error> {
        *notes.refused_launch.lock().unwrap() = Some(0);
        let _ = rank.dispatch_owned(STREAM, &tensors.input, &tensors.output)?;
        Ok(())
    };
    assert!(matches!(call(rank), Err(Error::GroupClosed)));
    group.close().unwrap();
}

#[test]
fn an_owned_half_that_is_dropped_leaves_the_group() {
    let notes = Arc::<Notes>::default();
    let group = noted::group_of(&notes);
    for calls in 1..SPLIT.len() {
        let rank = noted::join(&group, noted::config());
        let tensors = Round::of(&rank);
        let mut round = UnfinishedOwned::Nothing(rank);
        for _ in 0..calls {
            round = tensors.next(round, true).unwrap();
        }
        notes.take();
        let open = group.close();
        assert!(matches!(
            open,
            Err(Error::CommunicatorsOpen { communicators: 1 })
        ));
        drop(round);
        // Another process may still use the memory.
        assert_eq!(notes.take(), [""; 0]);
    }
    group.close().unwrap();
}

#[test]
fn an_owned_round_can_move_to_another_thread() {
    fn send<T: Send + 'static>() {}
    send::<UnfinishedOwned>();
    send::<RoundError>();
}
