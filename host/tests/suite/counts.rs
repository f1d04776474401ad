//! Counts of a dispatch on the host, as far as that needs no kernel.

use std::sync::Arc;
use std::time::Duration;

use crate::noted::{self, Notes, empty_tensors, start, timeout};
use crate::support::STREAM;
use ferry::device::{Args, FaultPage};
use ferry::*;

/// Rank 0 of two, which takes notes and has asked for the counts of a dispatch, with the ticket of that call.
fn asked() -> (Arc<Notes>, Communicator, u64) {
    let notes = Arc::<Notes>::default();
    let mut rank = start(&notes, 2, noted::config()).unwrap();
    let (input, _) = empty_tensors(&rank);
    rank.dispatch_async(STREAM, &input).unwrap();
    rank.dispatch_counts(STREAM).unwrap();
    let ticket = ticket_of(&notes);
    (notes, rank, ticket)
}

/// The ticket of the last launch, which has one block.
fn ticket_of(notes: &Notes) -> u64 {
    let launch = notes.launches.lock().unwrap().last().unwrap().clone();
    let Args::Counts(args) = launch.args else {
        panic!("{launch:?}")
    };
    assert_eq!(launch.max_sms, Some(1));
    args.ticket
}

/// Words after the fault page, with a ticket before 32-bit counts.
fn words(ticket: u64, counts: &[u32]) -> Vec<u64> {
    let pairs = counts.chunks(2);
    let words = pairs.map(|pair| u64::from(pair[0]) | u64::from(*pair.get(1).unwrap_or(&0)) << 32);
    [ticket].into_iter().chain(words).collect()
}

#[test]
fn counts_come_with_the_ticket_of_the_last_call_alone() {
    let (notes, mut rank, ticket) = asked();
    // Tokens, rows of two sources, rows of the local experts.
    let experts = rank.plan().local_experts();
    let counts: Vec<u32> = [2, 5, 7]
        .into_iter()
        .chain(10..10 + experts as u32)
        .collect();
    *notes.counts.lock().unwrap() = words(ticket - 1, &counts);
    assert_eq!(rank.received().unwrap(), None);
    *notes.counts.lock().unwrap() = words(ticket, &counts);
    let found = rank.received().unwrap().unwrap();
    assert_eq!(found.source_counts, [5, 7]);
    assert_eq!(found.expert_counts, counts[3..]);
    let rows: u32 = counts[3..].iter().sum();
    assert_eq!(found.capacity.rows, rows as usize);
    rank.dispatch_counts(STREAM).unwrap();
    assert_eq!(ticket_of(&notes), ticket + 1);
    assert_eq!(rank.received().unwrap(), None);
}

#[test]
fn a_loop_around_received_ends_with_the_fault() {
    let (notes, rank, ticket) = asked();
    *notes.counts.lock().unwrap() = words(ticket - 1, &[0; 64]);
    assert_eq!(rank.received().unwrap(), None);
    *notes.page.lock().unwrap() = FaultPage::of(&timeout(), 1);
    let told = rank.received().unwrap_err();
    assert!(
        matches!(told, Error::Fault(fault) if fault == timeout()),
        "{told}"
    );
    let told = rank.received().unwrap_err();
    assert!(
        matches!(told, Error::Poisoned(fault) if fault == timeout()),
        "{told}"
    );
}

#[test]
fn counts_that_nobody_asked_for_are_refused() {
    let notes = Arc::<Notes>::default();
    let mut rank = start(&notes, 2, noted::config()).unwrap();
    let (input, output) = empty_tensors(&rank);
    let refused = |rank: &Communicator| {
        let refused = rank.received().unwrap_err();
        assert!(
            matches!(refused, Error::NoCounts { rank: Rank(0) }),
            "{refused}"
        );
        assert_eq!(
            refused.to_string(),
            "received has no counts of rank 0: call dispatch_counts between dispatch_async and dispatch_wait"
        );
    };
    refused(&rank);
    rank.dispatch_async(STREAM, &input).unwrap();
    refused(&rank);
    rank.dispatch_counts(STREAM).unwrap();
    rank.dispatch_wait(STREAM, &output).unwrap();
    refused(&rank);
}

#[test]
fn counts_are_refused_in_a_capture_and_nothing_is_enqueued() {
    let (notes, mut rank, _) = asked();
    notes.take();
    *notes.captured.lock().unwrap() = Some((STREAM, 3));
    let refused = rank.dispatch_counts(STREAM).unwrap_err();
    assert!(matches!(refused, Error::CountsInGraph), "{refused}");
    assert_eq!(notes.take(), [""; 0]);
    assert_eq!(rank.round(), Round::DispatchSent);
}

/// The kernel waits for a rank that never dispatches.
#[test]
fn counts_of_a_rank_that_does_not_come_are_a_timeout() {
    let options = simulator::Options {
        patience: Some(Duration::ZERO),
        ..simulator::Options::new(2, 7)
    };
    let group = Group::simulated_with(options).unwrap();
    let plan = Plan::new(&group, Config::new(4, 2, 8, 3)).unwrap();
    let mut rank = Communicator::new(&group, &plan).unwrap().remove(0);
    let x = rank
        .device()
        .upload_tensor([1, 8], &[0x3f80_u16; 8])
        .unwrap();
    let ids = rank.device().upload_tensor([1, 2], &[1_i32, 2]).unwrap();
    rank.dispatch_async(STREAM, &DispatchInput::new(x, ids))
        .unwrap();
    rank.dispatch_counts(STREAM).unwrap();
    let told = loop {
        match rank.received() {
            Ok(None) => {}
            told => break told,
        }
    };
    let Err(Error::Fault(fault)) = told else {
        panic!("{told:?}")
    };
    let found = (fault.kind, fault.kernel.name(), fault.culprit);
    assert_eq!(
        found,
        (FaultKind::PeerTimeout, "dispatch_counts", Rank(1)),
        "{fault}"
    );
}

/// Rows of the shared expert are those of the number on the device; outputs have room for all of `x`.
#[test]
fn outputs_of_received_counts_suffice_if_the_device_counts_the_shared_experts_tokens() {
    let tiled = TokenFormat::Mxfp8(ScaleLayout::Tiled);
    for format in [TokenFormat::Bf16, TokenFormat::BlockwiseFp8, tiled] {
        for (number, routed) in [(1, -1), (1, 0), (0, -1), (8, 1)] {
            let group = Group::simulated(1, 5).unwrap();
            let config = Config {
                format,
                shared_expert: true,
                ..Config::new(4, 1, 128, 200)
            };
            let plan = Plan::new(&group, config).unwrap();
            let mut rank = Communicator::new(&group, &plan).unwrap().remove(0);
            let device = rank.device().clone();
            let x = device.upload_tensor([8, 128], &[0x3f80_u16; 8 * 128]);
            let ids = device.upload_tensor([8, 1], &[routed; 8]).unwrap();
            let input = DispatchInput {
                tokens_on_device: Some(device.upload_tensor([1], &[number]).unwrap()),
                ..DispatchInput::new(x.unwrap(), ids)
            };
            rank.dispatch_async(STREAM, &input).unwrap();
            rank.dispatch_counts(STREAM).unwrap();
            let counts = rank.received().unwrap().unwrap();
            let came = if routed < 0 { 0 } else { number };
            assert_eq!(counts.source_counts, [came]);
            let rows = DispatchBuffers::with_capacity(&device, &plan, counts.capacity).unwrap();
            rank.dispatch_wait(STREAM, rows.output()).unwrap();
            assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
            let offsets = rows.download().unwrap().row_offsets;
            let alignment = plan.row_alignment();
            let shared = number.next_multiple_of(alignment);
            assert_eq!(offsets[1], shared);
            assert_eq!(offsets[4 + 1], shared + came.next_multiple_of(alignment));
            rank.give_up(STREAM).unwrap();
        }
    }
}
