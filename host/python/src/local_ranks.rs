//! Calls for all ranks of a process.

use ferry::{Error, Stream};
use pyo3::prelude::*;

use crate::arguments::{CombineInput, CombineOutput, DispatchInput, DispatchOutput};
use crate::communicator::{Communicator, handle};
use crate::errors;
use crate::interrupt;

type Ranks<'py> = Vec<PyRef<'py, Communicator>>;

/// Takes all ranks out of their handles, makes the call, and puts them back.
fn call(
    py: Python<'_>,
    ranks: &Ranks<'_>,
    streams: &[u64],
    act: impl FnOnce(&mut [ferry::Communicator], &[Stream]) -> Result<(), Error> + Send,
) -> PyResult<()> {
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
    let streams: Vec<_> = streams.iter().map(|&stream| handle(stream)).collect();
    let result = py.detach(|| act(&mut all, &streams));
    for (slot, communicator) in slots.iter_mut().zip(all) {
        **slot = Some(communicator);
    }
    result.map_err(errors::from)
}

fn values<T: pyo3::PyClass, V>(given: &[PyRef<'_, T>], value: impl Fn(&T) -> V) -> Vec<V> {
    given.iter().map(|each| value(each)).collect()
}

#[pyfunction]
pub(crate) fn dispatch_all(
    py: Python<'_>,
    ranks: Ranks<'_>,
    streams: Vec<u64>,
    inputs: Vec<PyRef<'_, DispatchInput>>,
    outputs: Vec<PyRef<'_, DispatchOutput>>,
) -> PyResult<()> {
    let inputs = values(&inputs, |each| each.input);
    let outputs = values(&outputs, |each| each.output);
    call(py, &ranks, &streams, |ranks, streams| {
        ferry::Communicator::dispatch_all(ranks, streams, &inputs, &outputs)
    })?;
    let mut all = ranks.iter().zip(&inputs);
    all.try_for_each(|(rank, input)| rank.has_sent(input))
}

#[pyfunction]
pub(crate) fn dispatch_async_all(
    py: Python<'_>,
    ranks: Ranks<'_>,
    streams: Vec<u64>,
    inputs: Vec<PyRef<'_, DispatchInput>>,
) -> PyResult<()> {
    let inputs = values(&inputs, |each| each.input);
    call(py, &ranks, &streams, |ranks, streams| {
        ferry::Communicator::dispatch_async_all(ranks, streams, &inputs)
    })?;
    let mut all = ranks.iter().zip(&inputs);
    all.try_for_each(|(rank, input)| rank.has_sent(input))
}

#[pyfunction]
pub(crate) fn dispatch_wait_all(
    py: Python<'_>,
    ranks: Ranks<'_>,
    streams: Vec<u64>,
    outputs: Vec<PyRef<'_, DispatchOutput>>,
) -> PyResult<()> {
    let outputs = values(&outputs, |each| each.output);
    call(py, &ranks, &streams, |ranks, streams| {
        ferry::Communicator::dispatch_wait_all(ranks, streams, &outputs)
    })
}

#[pyfunction]
pub(crate) fn combine_all(
    py: Python<'_>,
    ranks: Ranks<'_>,
    streams: Vec<u64>,
    inputs: Vec<PyRef<'_, CombineInput>>,
    outputs: Vec<PyRef<'_, CombineOutput>>,
) -> PyResult<()> {
    let inputs = values(&inputs, |each| each.input);
    let outputs = values(&outputs, |each| each.output);
    call(py, &ranks, &streams, |ranks, streams| {
        ferry::Communicator::combine_all(ranks, streams, &inputs, &outputs)
    })?;
    ranks.iter().try_for_each(|rank| rank.has_returned())
}

#[pyfunction]
pub(crate) fn combine_async_all(
    py: Python<'_>,
    ranks: Ranks<'_>,
    streams: Vec<u64>,
    inputs: Vec<PyRef<'_, CombineInput>>,
    outputs: Vec<PyRef<'_, CombineOutput>>,
) -> PyResult<()> {
    let inputs = values(&inputs, |each| each.input);
    let outputs = values(&outputs, |each| each.output);
    call(py, &ranks, &streams, |ranks, streams| {
        ferry::Communicator::combine_async_all(ranks, streams, &inputs, &outputs)
    })?;
    ranks.iter().try_for_each(|rank| rank.has_returned())
}

#[pyfunction]
pub(crate) fn combine_wait_all(
    py: Python<'_>,
    ranks: Ranks<'_>,
    streams: Vec<u64>,
) -> PyResult<()> {
    call(py, &ranks, &streams, ferry::Communicator::combine_wait_all)
}

#[pyfunction]
pub(crate) fn dispatch_counts_all(
    py: Python<'_>,
    ranks: Ranks<'_>,
    streams: Vec<u64>,
) -> PyResult<()> {
    call(
        py,
        &ranks,
        &streams,
        ferry::Communicator::dispatch_counts_all,
    )
}

#[pyfunction]
pub(crate) fn give_up_all(py: Python<'_>, ranks: Ranks<'_>, streams: Vec<u64>) -> PyResult<()> {
    call(py, &ranks, &streams, ferry::Communicator::give_up_all)?;
    ranks.iter().try_for_each(|rank| rank.has_returned())
}

/// Closes all ranks, or none if a round is open. Returns the first error.
#[pyfunction]
pub(crate) fn close_all(py: Python<'_>, ranks: Ranks<'_>) -> PyResult<()> {
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
