//! Ids that a dispatch keeps in the caller's memory.

use std::time::Duration;

use crate::support::*;
use ferry::*;

/// Lets each rank keep its ids, and overwrites those that it was given once they were sent.
fn dispatch_kept(ranks: &mut [Communicator], tensors: &[Tensors]) -> Vec<Tensor<2>> {
    let mut kept = Vec::new();
    for (rank, t) in ranks.iter_mut().zip(tensors) {
        let ids = t.input.topk_ids;
        let memory = Tensor {
            at: rank.device().alloc(ids.bytes()).unwrap(),
            ..ids
        };
        let input = DispatchInput {
            kept_ids: Some(memory),
            ..t.input
        };
        rank.dispatch(STREAM, &input, &t.output).unwrap();
        kept.push(memory);
    }
    for (rank, t) in ranks.iter().zip(tensors) {
        assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
        let ids = t.input.topk_ids;
        rank.device().fill(ids.at, 0xff, ids.bytes()).unwrap();
    }
    kept
}

#[test]
fn ids_that_were_kept_serve_the_combine_and_a_later_dispatch() {
    let (mut ranks, tensors) = two_ranks(11, config());
    let kept = dispatch_kept(&mut ranks, &tensors);
    for (rank, t) in ranks.iter().zip(&tensors) {
        t.answer(rank);
    }
    combine_all(&mut ranks, &tensors);
    for ((rank, t), topk_ids) in ranks.iter_mut().zip(&tensors).zip(kept) {
        t.compare(rank, false);
        let input = DispatchInput {
            topk_ids,
            ..t.input
        };
        rank.dispatch(STREAM, &input, &t.output).unwrap();
    }
    for (rank, t) in ranks.iter().zip(&tensors) {
        assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
        t.answer(rank);
    }
    combine_all(&mut ranks, &tensors);
    for (rank, t) in ranks.iter().zip(&tensors) {
        t.compare(rank, false);
    }
    close(ranks);
}

/// Combines wait for rows that do not come, or for none; the simulator ends a program that touches memory
/// outside of allocations.
#[test]
fn ids_that_change_before_combine_end_in_wrong_sums_or_a_timeout() {
    let (mut timeouts, mut wrong) = (0, 0);
    for seed in 0..40 {
        let config = Config {
            deadline: Duration::from_millis(1),
            receive: Receive::of(match seed % 2 {
                0 => ReceiveLayout::ByExpert,
                _ => ReceiveLayout::Compact,
            }),
            ..config()
        };
        let (mut ranks, tensors) = two_ranks(seed, config);
        let kept = dispatch_kept(&mut ranks, &tensors);
        for (rank, kept) in ranks.iter().zip(kept) {
            let ids = [3, 0, i32::MAX, 1, 2, -16, 4, i32::MIN];
            let ids = ids.iter().cycle().skip(seed as usize);
            let ids: Vec<i32> = ids.copied().take(kept.bytes() as usize / 4).collect();
            let bytes = words(&ids, i32::to_le_bytes);
            rank.device().upload(kept.at, &bytes).unwrap();
        }
        for (rank, t) in ranks.iter_mut().zip(&tensors) {
            let (input, output) = (t.combine_input(None), t.combine_output(false));
            rank.combine(STREAM, &input, &output).unwrap();
        }
        for rank in &ranks {
            match rank.synchronize(STREAM).map(InputReport::fault) {
                Err(Error::Fault(fault)) if fault.kind == FaultKind::PeerTimeout => timeouts += 1,
                Ok(None) | Err(Error::PeerGaveUp { .. }) => wrong += 1,
                other => panic!("seed {seed}: {other:?}"),
            }
        }
    }
    assert!(
        timeouts > 0 && wrong > 0,
        "{timeouts} timeouts, {wrong} others"
    );
}

#[test]
fn memory_for_ids_is_refused_where_it_does_not_fit() {
    let memory = |rank: &Communicator| rank.device().alloc(64).unwrap();
    let refused = |config: Config, data_type, dims| {
        let (mut rank, t) = alone(config);
        let kept_ids = Some(Tensor::contiguous(memory(&rank), data_type, dims));
        let input = DispatchInput {
            kept_ids,
            ..t.input
        };
        let refused = rank.dispatch(STREAM, &input, &t.output).unwrap_err();
        rank.close().unwrap();
        refused.to_string()
    };
    let exact = Config {
        combine: CombineMode::Exact,
        ..config()
    };
    let local = Config {
        skip_a2a: true,
        ..config()
    };
    for (config, data_type, dims, wanted) in [
        (
            config(),
            DataType::I64,
            [1, TOP_K],
            "wanted elements of i32, given i64",
        ),
        (
            config(),
            DataType::I32,
            [2, TOP_K],
            "wanted shape [1, 2], given [2, 2]",
        ),
        (
            exact,
            DataType::I32,
            [1, TOP_K],
            "wanted none, as the plan's combine is exact, given a tensor",
        ),
        (
            local,
            DataType::I32,
            [1, TOP_K],
            "wanted none, as the plan's skip_a2a is true, given a tensor",
        ),
    ] {
        assert_eq!(
            refused(config, data_type, dims),
            format!("tensor kept_ids: {wanted}")
        );
    }
}
