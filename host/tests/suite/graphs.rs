//! Captured rounds, as far as that needs no GPU.

use std::sync::Arc;

use crate::noted::*;
use ferry::device::FaultPage;
use ferry::*;

const STREAM: Stream = Stream::DEFAULT;

/// Captures the work that `work` enqueues, as `CudaDevice::capture` does: if `work` fails, nothing remains.
fn capture(
    notes: &Notes,
    work: impl FnOnce() -> Result<(), Error>,
) -> Result<(Held, Vec<String>), Error> {
    notes.take();
    *notes.graph.lock().unwrap() = Some(Vec::new());
    let worked = work();
    let held = notes.graph.lock().unwrap().take();
    let kernels = notes.take();
    worked.map(|()| (held.unwrap(), kernels))
}

#[test]
fn a_round_whose_capture_failed_is_ended_in_a_capture_that_is_thrown_away() {
    let notes = Arc::<Notes>::default();
    let group = group_of(&notes);
    let mut rank = join(&group, config());
    let (input, output) = empty_tensors(&rank);
    let experts = CombineInput::new(output.tokens.unwrap());
    let sums = CombineOutput::Apart(Tensor::contiguous(memory(8192), DataType::Bf16, [2, 1, 8]));
    // The experts' kernels fail after the dispatch.
    let failed = capture(&notes, || {
        rank.dispatch(STREAM, &input, &output)?;
        Err(Error::GroupClosed)
    });
    assert!(matches!(failed, Err(Error::GroupClosed)));
    let again = capture(&notes, || rank.dispatch(STREAM, &input, &output));
    assert!(matches!(
        again,
        Err(Error::WrongOrder {
            open: Round::Dispatched,
            ..
        })
    ));

    let ended = capture(&notes, || rank.combine(STREAM, &experts, &sums));
    let (held, kernels) = ended.unwrap();
    assert_eq!((held.len(), &kernels[..]), (1, &["combine".to_owned()][..]));
    drop(held);
    let (held, kernels) = capture(&notes, || round(&mut rank, STREAM)).unwrap();
    assert_eq!((held.len(), kernels.len()), (1, 2));
    drop(held);
    rank.close().unwrap();
    group.close().unwrap();
}

#[test]
fn nothing_of_a_communicator_that_gave_up_is_captured() {
    let notes = Arc::<Notes>::default();
    let mut rank = start(&notes, 2, config()).unwrap();
    *notes.page.lock().unwrap() = FaultPage::of(&timeout(), 1);
    let mut refused = None;
    let (held, kernels) = capture(&notes, || {
        refused = round(&mut rank, STREAM).err();
        Ok(())
    })
    .unwrap();
    assert!(matches!(refused, Some(Error::Poisoned(fault)) if fault == timeout()));
    assert_eq!((held.len(), kernels.len()), (0, 0));
    // No graph holds it.
    rank.close().unwrap();
}
