//! Calls of one rank, or of all ranks of a process.

use ferry::{Error, Stream};
use pyo3::prelude::*;

use crate::arguments::{CombineInput, CombineOutput, DispatchInput, DispatchOutput};
use crate::communicator::{Communicator, handle};
use crate::errors;
use crate::interrupt;

type Ranks<'py> = Vec<PyRef<'py, Communicator>>;
type Each<'py, T> = Vec<PyRef<'py, T>>;

/// Each call takes a value for each rank: of one rank, or of all ranks of this process, of which none
/// launches before all have checked.
#[pymethods]
impl Communicator {
    #[staticmethod]
    fn dispatch(
        py: Python<'_>,
        ranks: Ranks<'_>,
        streams: Vec<u64>,
        inputs: Each<'_, DispatchInput>,
        outputs: Each<'_, DispatchOutput>,
    ) -> PyResult<()> {
        let inputs = values(&inputs, |each| each.input);
        let outputs = values(&outputs, |each| each.output);
        call(py, &ranks, &streams, |ranks, streams| {
            match (&mut *ranks, streams, &inputs[..], &outputs[..]) {
                ([rank], &[stream], [input], [output]) => rank.dispatch(stream, input, output),
                _ => ferry::Communicator::dispatch_all(ranks, streams, &inputs, &outputs),
            }
        })?;
        have_sent(&ranks, &inputs)
    }

    #[staticmethod]
    fn dispatch_async(
        py: Python<'_>,
        ranks: Ranks<'_>,
        streams: Vec<u64>,
        inputs: Each<'_, DispatchInput>,
    ) -> PyResult<()> {
        let inputs = values(&inputs, |each| each.input);
        call(py, &ranks, &streams, |ranks, streams| {
            match (&mut *ranks, streams, &inputs[..]) {
                ([rank], &[stream], [input]) => rank.dispatch_async(stream, input),
                _ => ferry::Communicator::dispatch_async_all(ranks, streams, &inputs),
            }
        })?;
        have_sent(&ranks, &inputs)
    }

    #[staticmethod]
    fn dispatch_counts(py: Python<'_>, ranks: Ranks<'_>, streams: Vec<u64>) -> PyResult<()> {
        call(py, &ranks, &streams, |ranks, streams| {
            match (&mut *ranks, streams) {
                ([rank], &[stream]) => rank.dispatch_counts(stream),
                _ => ferry::Communicator::dispatch_counts_all(ranks, streams),
            }
        })
    }

    #[staticmethod]
    fn dispatch_wait(
        py: Python<'_>,
        ranks: Ranks<'_>,
        streams: Vec<u64>,
        outputs: Each<'_, DispatchOutput>,
    ) -> PyResult<()> {
        let outputs = values(&outputs, |each| each.output);
        call(py, &ranks, &streams, |ranks, streams| {
            match (&mut *ranks, streams, &outputs[..]) {
                ([rank], &[stream], [output]) => rank.dispatch_wait(stream, output),
                _ => ferry::Communicator::dispatch_wait_all(ranks, streams, &outputs),
            }
        })
    }

    #[staticmethod]
    fn combine(
        py: Python<'_>,
        ranks: Ranks<'_>,
        streams: Vec<u64>,
        inputs: Each<'_, CombineInput>,
        outputs: Each<'_, CombineOutput>,
    ) -> PyResult<()> {
        let inputs = values(&inputs, |each| each.input);
        let outputs = values(&outputs, |each| each.output);
        call(py, &ranks, &streams, |ranks, streams| {
            match (&mut *ranks, streams, &inputs[..], &outputs[..]) {
                ([rank], &[stream], [input], [output]) => rank.combine(stream, input, output),
                _ => ferry::Communicator::combine_all(ranks, streams, &inputs, &outputs),
            }
        })?;
        have_returned(&ranks)
    }

    #[staticmethod]
    fn combine_async(
        py: Python<'_>,
        ranks: Ranks<'_>,
        streams: Vec<u64>,
        inputs: Each<'_, CombineInput>,
        outputs: Each<'_, CombineOutput>,
    ) -> PyResult<()> {
        let inputs = values(&inputs, |each| each.input);
        let outputs = values(&outputs, |each| each.output);
        call(py, &ranks, &streams, |ranks, streams| {
            match (&mut *ranks, streams, &inputs[..], &outputs[..]) {
                ([rank], &[stream], [input], [output]) => rank.combine_async(stream, input, output),
                _ => ferry::Communicator::combine_async_all(ranks, streams, &inputs, &outputs),
            }
        })?;
        have_returned(&ranks)
    }

    #[staticmethod]
    fn combine_wait(py: Python<'_>, ranks: Ranks<'_>, streams: Vec<u64>) -> PyResult<()> {
        call(py, &ranks, &streams, |ranks, streams| {
            match (&mut *ranks, streams) {
                ([rank], &[stream]) => rank.combine_wait(stream),
                _ => ferry::Communicator::combine_wait_all(ranks, streams),
            }
        })
    }

    #[staticmethod]
    fn give_up(py: Python<'_>, ranks: Ranks<'_>, streams: Vec<u64>) -> PyResult<()> {
        call(py, &ranks, &streams, |ranks, streams| {
            match (&mut *ranks, streams) {
                ([rank], &[stream]) => rank.give_up(stream),
                _ => ferry::Communicator::give_up_all(ranks, streams),
            }
        })?;
        have_returned(&ranks)
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

/// Makes the call. Takes several ranks out of their handles, and puts them back.
fn call(
    py: Python<'_>,
    ranks: &Ranks<'_>,
    streams: &[u64],
    act: impl FnOnce(&mut [ferry::Communicator], &[Stream]) -> Result<(), Error> + Send,
) -> PyResult<()> {
    let streams: Vec<_> = streams.iter().map(|&stream| handle(stream)).collect();
    if let [rank] = &ranks[..] {
        return rank.call(py, |rank| act(std::slice::from_mut(rank), &streams));
    }
    let mut numbers: Vec<_> = ranks.iter().map(|rank| rank.number()).collect();
    numbers.sort_unstable();
    if let Some(twice) = numbers.windows(2).find(|pair| pair[0] == pair[1]) {
        let text = format!("rank {} is given twice", twice[0].0);
        return Err(errors::raise("ArgumentError", text));
    }
    let mut slots = Vec::new();
    for rank in ranks {
        let slot = rank.lock()?;
        if slot.is_none() {
            return Err(rank.is_closed());
        }
        slots.push(slot);
    }
    let mut all: Vec<_> = slots.iter_mut().filter_map(|slot| slot.take()).collect();
    let result = py.detach(|| act(&mut all, &streams));
    for (slot, communicator) in slots.iter_mut().zip(all) {
        **slot = Some(communicator);
    }
    result.map_err(errors::from)
}

fn values<T: pyo3::PyClass, V>(given: &Each<'_, T>, value: impl Fn(&T) -> V) -> Vec<V> {
    given.iter().map(|each| value(each)).collect()
}

/// Notes a dispatch of each rank.
fn have_sent(ranks: &Ranks<'_>, inputs: &[ferry::DispatchInput]) -> PyResult<()> {
    let mut all = ranks.iter().zip(inputs);
    all.try_for_each(|(rank, input)| rank.has_sent(input))
}

/// Counts a combine of each rank.
fn have_returned(ranks: &Ranks<'_>) -> PyResult<()> {
    ranks.iter().try_for_each(|rank| rank.has_returned())
}
