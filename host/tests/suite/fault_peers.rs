//! The table at `Fault::peer`, for the kinds that a caller can cause.

use crate::support::*;
use ferry::*;

/// Report of rank 1 after a dispatch with its tensors changed by `change`.
fn fault(change: fn(&mut Tensors, &Communicator)) -> Fault {
    let config = Config {
        debug_checks: true,
        options: true,
        ..config()
    };
    let (mut ranks, mut tensors) = two_ranks(8, config);
    change(&mut tensors[1], &ranks[1]);
    for (rank, t) in ranks.iter_mut().zip(&tensors) {
        rank.dispatch(STREAM, &t.input, &t.output).unwrap();
    }
    let fault = fault_of(ranks[1].synchronize(STREAM));
    assert_eq!(fault.rank, Rank(1));
    fault
}

fn fault_of(result: Result<InputReport, Error>) -> Fault {
    match result.map(InputReport::fault) {
        Ok(Some(InputFault(fault))) | Err(Error::Fault(fault)) => fault,
        other => panic!("{other:?} is no fault"),
    }
}

fn ids(given: [i32; TOP_K], t: &mut Tensors, rank: &Communicator) {
    t.input.topk_ids = rank.device().upload_tensor([1, TOP_K], &given).unwrap();
}

#[test]
fn where_the_ids_are_at_fault_the_peer_is_a_slot() {
    let invalid = fault(|t, rank| ids([3, 9], t, rank));
    assert_eq!(
        (invalid.kind, invalid.peer),
        (FaultKind::InvalidExpert, Rank(1))
    );
    let invalid = fault(|t, rank| ids([9, 3], t, rank));
    assert_eq!(
        (invalid.kind, invalid.peer),
        (FaultKind::InvalidExpert, Rank(0))
    );
    let twice = fault(|t, rank| ids([0, 0], t, rank));
    assert_eq!(
        (twice.kind, twice.peer),
        (FaultKind::DuplicateExpert, Rank(1))
    );
}

#[test]
fn where_no_other_rank_is_involved_the_peer_is_the_rank_itself() {
    let many = fault(|t, rank| {
        t.input.tokens_on_device = Some(rank.device().upload_tensor([1], &[2_u32]).unwrap());
    });
    assert_eq!(
        (many.kind, many.peer),
        (FaultKind::TooManyOnDevice, Rank(1))
    );
    let small = fault(|t, _| {
        t.output.tokens.as_mut().unwrap().dims[0] = 1;
        t.output.src_info.dims[0] = 1;
    });
    assert_eq!(
        (small.kind, small.peer),
        (FaultKind::OutputTooSmall, Rank(1))
    );
}

#[test]
fn of_a_time_out_the_peer_is_the_rank_that_was_waited_for() {
    let config = Config {
        deadline: std::time::Duration::from_millis(200),
        ..config()
    };
    let (mut ranks, tensors) = two_ranks(8, config);
    let t = &tensors[0];
    ranks[0].dispatch(STREAM, &t.input, &t.output).unwrap();
    let fault = fault_of(ranks[0].synchronize(STREAM));
    assert_eq!((fault.kind, fault.peer), (FaultKind::PeerTimeout, Rank(1)));
}

/// An expert that a token lists twice gets it twice, and both rows count.
#[test]
fn both_assignments_of_a_duplicate_are_routed() {
    let (mut ranks, mut tensors) = two_ranks(8, config());
    ids([0, 0], &mut tensors[1], &ranks[1]);
    let mut outputs = Vec::new();
    for (rank, t) in ranks.iter_mut().zip(&tensors) {
        rank.dispatch(STREAM, &t.input, &t.output).unwrap();
        let output = t.combine_output(false);
        rank.combine(STREAM, &t.combine_input(None), &output)
            .unwrap();
        outputs.push(output);
    }
    for rank in &ranks {
        assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    }
    let offsets = tensors[0].output.row_offsets.unwrap();
    let offsets: Vec<u32> = ranks[0].device().download_tensor(&offsets).unwrap();
    // Expert 0: twice rank 1's token. Expert 1: two of rank 0's.
    assert_eq!(offsets, [0, 2, 4]);
    // 4 * 1 + 4 * 0.25, as the experts return their input.
    let sums = download(&ranks[1], outputs[1].rows().at, 2 * HIDDEN);
    assert_eq!(sums, rows(&[5.0]));
    close(ranks);
}
