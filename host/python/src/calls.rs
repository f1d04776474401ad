//! Calls of one rank, or of all ranks of a process.

use ferry::Stream;
use pyo3::prelude::*;

use crate::arguments::Call;
use crate::communicator::{Communicator, handle};
use crate::errors;
use crate::interrupt;

type Ranks<'py> = Vec<PyRef<'py, Communicator>>;

#[pymethods]
impl Communicator {
    /// Makes the call of each rank: of one rank, or of all ranks of this process, of which none launches
    /// before all have checked.
    #[staticmethod]
    fn together(
        py: Python<'_>,
        ranks: Ranks<'_>,
        streams: Vec<u64>,
        calls: Vec<PyRef<'_, Call>>,
    ) -> PyResult<()> {
        let streams: Vec<_> = streams.iter().map(|&stream| handle(stream)).collect();
        let calls: Vec<_> = calls.iter().map(|call| call.call).collect();
        if let ([rank], [stream], [call]) = (&ranks[..], &streams[..], &calls[..]) {
            return rank.enqueue(py, *stream, call);
        }
        enqueue_all(py, &ranks, &streams, &calls)?;
        let mut each = ranks.iter().zip(&calls);
        each.try_for_each(|(rank, call)| rank.note(call))
    }

    /// Closes all ranks, or none if a round is open. Returns the first error.
    #[staticmethod]
    fn close_all(py: Python<'_>, ranks: Ranks<'_>) -> PyResult<()> {
        let mut slots = Vec::new();
        for rank in &ranks {
            slots.push(rank.lock()?);
        }
        let all: Vec<_> = slots.iter_mut().filter_map(|slot| slot.take()).collect();
        let closed = interrupt::detach(py, || ferry::Communicator::close_all(all))?;
        let mut first = None;
        for (number, failure) in closed
            .err()
            .map_or_else(Vec::new, |failed| failed.into_failures())
        {
            let at = ranks.iter().position(|rank| rank.number() == number);
            if let (Some(at), Some(communicator)) = (at, failure.communicator) {
                *slots[at] = Some(*communicator);
            }
            first.get_or_insert(failure.error);
        }
        for (rank, slot) in ranks.iter().zip(&slots) {
            rank.note_closed(slot.is_none())?;
        }
        first.map_or(Ok(()), |error| Err(errors::from(error)))
    }
}

/// Takes the ranks out of their handles, makes the calls, and puts them back.
fn enqueue_all(
    py: Python<'_>,
    ranks: &Ranks<'_>,
    streams: &[Stream],
    calls: &[ferry::Call],
) -> PyResult<()> {
    let mut slots = Vec::new();
    for rank in ranks {
        let slot = rank.lock()?;
        if slot.is_none() {
            return Err(rank.is_closed());
        }
        slots.push(slot);
    }
    let mut all: Vec<_> = slots.iter_mut().filter_map(|slot| slot.take()).collect();
    let result = py.detach(|| ferry::Communicator::together(&mut all, streams, calls));
    for (slot, communicator) in slots.iter_mut().zip(all) {
        **slot = Some(communicator);
    }
    result.map_err(errors::from)
}
