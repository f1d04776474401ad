//! Whole rounds on simulated ranks, compared with numbers computed by hand.

use crate::support::*;
use ferry::*;

/// Fused calls.
fn fused(ranks: &mut [Communicator], tensors: &[Tensors], weights: bool, apart: bool) {
    for (rank, t) in ranks.iter_mut().zip(tensors) {
        rank.dispatch(STREAM, &t.input, &t.output).unwrap();
    }
    answer_all(ranks, tensors);
    for (rank, t) in ranks.iter_mut().zip(tensors) {
        let input = t.combine_input(weights.then_some(t.weights));
        rank.combine(STREAM, &input, &t.combine_output(apart))
            .unwrap();
    }
    compare_all(ranks, tensors, apart);
}

/// Split calls: every rank sends before any waits.
fn split(ranks: &mut [Communicator], tensors: &[Tensors], weights: bool, apart: bool) {
    for (rank, t) in ranks.iter_mut().zip(tensors) {
        rank.dispatch_async(STREAM, &t.input).unwrap();
    }
    for (rank, t) in ranks.iter_mut().zip(tensors) {
        rank.dispatch_wait(STREAM, &t.output).unwrap();
    }
    answer_all(ranks, tensors);
    for (rank, t) in ranks.iter_mut().zip(tensors) {
        let input = t.combine_input(weights.then_some(t.weights));
        rank.combine_async(STREAM, &input, &t.combine_output(apart))
            .unwrap();
    }
    for rank in ranks.iter_mut() {
        rank.combine_wait(STREAM).unwrap();
    }
    compare_all(ranks, tensors, apart);
}

/// Waits for all dispatches, compares their outputs, and lets the experts answer.
fn answer_all(ranks: &[Communicator], tensors: &[Tensors]) {
    for (rank, t) in ranks.iter().zip(tensors) {
        assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
        t.answer(rank);
    }
}

/// Waits for all combines, and compares their outputs.
fn compare_all(ranks: &[Communicator], tensors: &[Tensors], apart: bool) {
    for (rank, t) in ranks.iter().zip(tensors) {
        assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
        t.compare(rank, apart);
    }
}

/// Several rounds of both kinds, over many seeds, on one node and on two.
fn all_kinds(combine: CombineMode, weights: bool, apart: bool) {
    for seed in 0..20 {
        for p2p_world_size in [None, Some(1)] {
            let config = Config {
                combine,
                p2p_world_size,
                ..config()
            };
            let (mut ranks, tensors) = two_ranks(seed, config);
            for _ in 0..2 {
                fused(&mut ranks, &tensors, weights, apart);
                split(&mut ranks, &tensors, weights, apart);
            }
            close(ranks);
        }
    }
}

#[test]
fn the_inputs_are_free_once_a_dispatch_is_sent() {
    let (mut ranks, tensors) = two_ranks(5, config());
    for (rank, t) in ranks.iter_mut().zip(&tensors) {
        rank.dispatch_async(STREAM, &t.input).unwrap();
    }
    for (rank, t) in ranks.iter().zip(&tensors) {
        assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
        let weights = t.input.topk_weights.map(|weights| weights.at);
        for at in [t.input.x.at, t.input.topk_ids.at]
            .into_iter()
            .chain(weights)
        {
            // SAFETY: the kernel that was passed it has ended, and no other uses it.
            unsafe { rank.device().free(at) }.unwrap();
        }
    }
    for (rank, t) in ranks.iter_mut().zip(&tensors) {
        rank.dispatch_wait(STREAM, &t.output).unwrap();
    }
    answer_all(&ranks, &tensors);
    for (rank, t) in ranks.iter_mut().zip(&tensors) {
        let output = t.combine_output(false);
        rank.combine(STREAM, &t.combine_input(None), &output)
            .unwrap();
    }
    compare_all(&ranks, &tensors, false);
    close(ranks);
}

#[test]
fn reduced() {
    all_kinds(CombineMode::Reduced, false, false);
}

#[test]
fn exact_with_weights() {
    all_kinds(CombineMode::Exact, true, false);
}

#[test]
fn exact_apart() {
    all_kinds(CombineMode::Exact, false, true);
}

#[test]
fn ranks_may_live_on_threads_of_their_own() {
    let (ranks, tensors) = two_ranks(3, config());
    let threads: Vec<_> = ranks
        .into_iter()
        .zip(tensors)
        .map(|(mut rank, t)| {
            std::thread::spawn(move || {
                rank.dispatch(STREAM, &t.input, &t.output).unwrap();
                assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
                t.answer(&rank);
                let output = t.combine_output(false);
                rank.combine(STREAM, &t.combine_input(None), &output)
                    .unwrap();
                assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
                t.compare(&rank, false);
                rank.close().unwrap();
            })
        })
        .collect();
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
}

/// Columns of a wider matrix, as in an engine's view. A read between the rows would be noticed.
#[test]
fn rows_of_x_may_have_a_stride() {
    const STRIDE: usize = 3 * HIDDEN;
    for p2p_world_size in [None, Some(1)] {
        let config = Config {
            p2p_world_size,
            ..config()
        };
        let (mut ranks, mut tensors) = two_ranks(5, config);
        for (t, rank) in tensors.iter_mut().zip(&ranks) {
            let packed = download(rank, t.input.x.at, t.input.x.dims[0] * HIDDEN * 2);
            let spread = |row: &[u8]| [&[0xff; HIDDEN * 2][..], row, &[0xff; HIDDEN * 2]].concat();
            let wide: Vec<u8> = packed.chunks(HIDDEN * 2).flat_map(spread).collect();
            // From the first row's elements to those of the last.
            let at = upload(rank, &wide).plus(2 * HIDDEN as u64);
            let view = Tensor::contiguous(at, DataType::Bf16, t.input.x.dims);
            t.input.x = view.with_row_stride(STRIDE);
        }
        fused(&mut ranks, &tensors, false, false);
        split(&mut ranks, &tensors, false, false);
        close(ranks);
    }
}

#[test]
fn a_rank_may_have_no_tokens_and_null_tensors() {
    let (mut ranks, mut tensors) = two_ranks(4, config());
    for t in &mut tensors {
        let none =
            |data_type, columns| Tensor::contiguous(DevicePtr::NULL, data_type, [0, columns]);
        t.input = DispatchInput::new(none(DataType::Bf16, HIDDEN), none(DataType::I32, TOP_K));
        t.summed = none(DataType::Bf16, HIDDEN);
    }
    for (rank, t) in ranks.iter_mut().zip(&tensors) {
        rank.dispatch(STREAM, &t.input, &t.output).unwrap();
        let output = t.combine_output(false);
        rank.combine(STREAM, &t.combine_input(None), &output)
            .unwrap();
    }
    for (rank, t) in ranks.iter().zip(&tensors) {
        assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
        assert_eq!(
            download(rank, t.output.row_offsets.unwrap().at, 12),
            [0; 12]
        );
    }
    close(ranks);
}

#[test]
fn all_are_closed_or_none_while_a_round_is_open() {
    let (mut ranks, tensors) = two_ranks(3, config());
    for (rank, t) in ranks.iter_mut().zip(&tensors) {
        rank.dispatch(STREAM, &t.input, &t.output).unwrap();
    }
    ranks.iter().zip(&tensors).for_each(|(rank, t)| {
        assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
        t.answer(rank);
    });
    let combine = |rank: &mut Communicator| {
        let t = &tensors[rank.rank().0 as usize];
        rank.combine(STREAM, &t.combine_input(None), &t.combine_output(false))
            .unwrap();
    };
    combine(&mut ranks[0]);
    let refused = Communicator::close_all(ranks).unwrap_err();
    assert!(
        refused.to_string().starts_with(
            "closing 2 of 2 ranks failed; rank 0: not closed: the round of rank 1 is open; finish it, then \
             close all; rank 1: rank 1's communicator cannot be closed: the dispatch was not combined"
        ),
        "{refused}"
    );
    let back = refused.into_failures().into_iter();
    let mut ranks: Vec<_> = back
        .map(|(_, failure)| *failure.communicator.unwrap())
        .collect();
    combine(&mut ranks[1]);
    for (rank, t) in ranks.iter().zip(&tensors) {
        assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
        t.compare(rank, false);
    }
    Communicator::close_all(ranks).unwrap();
}
