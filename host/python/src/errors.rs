//! Errors of the library as the exceptions of `ferry_ep.core.errors`.

use std::time::Duration;

use ferry::Error;
use ferry::error::{LocalRanksError, Problem};
use ferry::simulator::SimulatorError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::fault::Fault;
use crate::interrupt;

/// Module of the exceptions.
const MODULE: &str = "ferry_ep.core.errors";

/// Class of an exception, and its text.
type Name = &'static str;

/// Returns an exception without fields.
pub(crate) fn raise(class: Name, text: impl Into<String>) -> PyErr {
    build(class, text.into(), |_| Ok(()))
}

/// Reads a number of seconds, the argument `name`.
pub(crate) fn seconds(name: &str, given: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(given).map_err(|_| {
        let text = format!("{name} is {given}, but it is a number of seconds of at least 0");
        raise("ArgumentError", text)
    })
}

/// Returns a `TensorError`.
pub(crate) fn tensor(name: &str, wanted: &str, given: &str) -> PyErr {
    tensor_with(
        format!("tensor {name}: wanted {wanted}, given {given}"),
        name,
        wanted,
        given,
    )
}

/// Returns the exception of a library's error.
pub(crate) fn from(error: Error) -> PyErr {
    let text = error.to_string();
    with_text(error, text)
}

/// [`from`], as a function for `map_err` of results of other types.
pub(crate) fn from_any(error: impl Into<Error>) -> PyErr {
    from(error.into())
}

/// Returns the exception of `error` with another text: that of an error around it.
fn with_text(error: Error, text: String) -> PyErr {
    match error {
        Error::Plan(error) => plan(error.problems.iter().map(problem).collect()),
        // In words of Python.
        Error::RoundOpen { .. } => raise("OrderError", text.replace("drop it,", "`del` it,")),
        Error::Tensor(given) => tensor_with(text, given.tensor, &given.wanted, &given.given),
        Error::TensorsOverlap { first, second } => tensor_with(
            text,
            first,
            "memory of its own",
            &format!("that of {second}"),
        ),
        Error::TooManyTokens { given, max } => tensor_with(
            text,
            "x",
            &format!("at most {max} rows, max_tokens_per_rank"),
            &given.to_string(),
        ),
        Error::Capacity(given) => build("CapacityError", text, |fields| {
            let (field, value, rule) = problem(&given);
            fields.set_item("field", field)?;
            fields.set_item("value", value)?;
            fields.set_item("rule", rule)
        }),
        Error::Fault(fault) => {
            let class = match fault.kind {
                ferry::FaultKind::PeerTimeout => "PeerTimeout",
                _ => "FaultError",
            };
            build(class, text, |fields| fields.set_item("fault", Fault(fault)))
        }
        Error::Poisoned(fault) => build("PoisonedError", text, |fields| {
            fields.set_item("fault", Fault(fault))
        }),
        Error::PeerGaveUp { rank, peer } => build("PeerGaveUp", text, |fields| {
            fields.set_item("rank", rank.0)?;
            fields.set_item("peer", peer.0)
        }),
        Error::PeerFailed { rank, step } => build("PeerFailed", text, |fields| {
            fields.set_item("rank", rank.0)?;
            fields.set_item("step", step)
        }),
        Error::Bootstrap(error) => build("BootstrapError", text, |fields| {
            fields.set_item("lost_rank", error.lost_rank())
        }),
        Error::LocalRanks(error) => of_local_ranks(error, text),
        Error::Simulator(SimulatorError::Interrupted) => {
            interrupt::take().unwrap_or_else(|| raise("SimulatorError", text))
        }
        other => raise(class_of(&other), text),
    }
}

/// Class of errors whose exceptions have no fields.
fn class_of(error: &Error) -> Name {
    match error {
        Error::WrongOrder { .. } | Error::RoundOpen { .. } | Error::NoCounts { .. } => "OrderError",
        Error::WrongScales { .. }
        | Error::UnusedInputScale { .. }
        | Error::SiluColumns { .. }
        | Error::SiluLimit { .. }
        | Error::SplitWithoutTravel { .. }
        | Error::CountsInGraph
        | Error::MemoryTooShort { .. }
        | Error::TooManyScales { .. }
        | Error::WeightsInReducedMode
        | Error::WrongCombineOutput { .. }
        | Error::NoView { .. }
        | Error::MaxSms(_)
        | Error::Deadline(_)
        | Error::ApartInReducedMode
        | Error::WithoutOptions { .. }
        | Error::Epilogue(_)
        | Error::GreenContext { .. }
        | Error::PlanForOtherGroup { .. }
        | Error::PlanSpansNodes { .. } => "ArgumentError",
        Error::RankCount { .. }
        | Error::NoLocalRanks { .. }
        | Error::DeviceListedTwice { .. }
        | Error::NoSuchDevice { .. }
        | Error::NoPeerAccess { .. }
        | Error::GpuShared { .. }
        | Error::SharedGpu(_)
        | Error::NotLocal { .. }
        | Error::FabricAnswer { .. }
        | Error::ShapeMismatch { .. }
        | Error::Links(_)
        | Error::Node(_) => "GroupError",
        Error::Cuda(_)
        | Error::Driver(_)
        | Error::LibraryMissing { .. }
        | Error::OtherDevice { .. }
        | Error::Nvshmem(_) => "DeviceError",
        #[cfg(feature = "cuda")]
        Error::Kernels(_) => "DeviceError",
        Error::GraphsAlive { .. }
        | Error::ForeignGraphs { .. }
        | Error::CommunicatorsOpen { .. } => "InUseError",
        Error::GroupClosed => "ClosedError",
        Error::Simulator(SimulatorError::Busy) => "BusyError",
        Error::Simulator(_) => "SimulatorError",
        _ => "FerryError",
    }
}

fn of_local_ranks(error: LocalRanksError, text: String) -> PyErr {
    match error {
        LocalRanksError::Refused { source, .. } => with_text(*source, text),
        LocalRanksError::Poisoned { .. } => raise("PoisonedError", text),
        LocalRanksError::NotClosed { .. } => raise("OrderError", text),
        LocalRanksError::NotLaunched { .. } => raise("FerryError", text),
        _ => raise("ArgumentError", text),
    }
}

/// Field, value and rule.
pub(crate) type Broken = (&'static str, String, String);

/// Returns a `PlanError` of these problems.
pub(crate) fn plan(problems: Vec<Broken>) -> PyErr {
    let lines = problems
        .iter()
        .map(|(field, value, rule)| format!("\n  {field} is {value}, but {rule}"));
    let text = format!(
        "the configuration does not work:{}",
        String::from_iter(lines)
    );
    build("PlanError", text, |fields| {
        fields.set_item("problems", problems)
    })
}

pub(crate) fn problem(problem: &Problem) -> Broken {
    (problem.field, problem.value.clone(), problem.rule.clone())
}

fn tensor_with(text: String, name: &str, wanted: &str, given: &str) -> PyErr {
    build("TensorError", text, |fields| {
        fields.set_item("name", name)?;
        fields.set_item("wanted", wanted)?;
        fields.set_item("given", given)
    })
}

/// Makes an exception of `class` with a text and fields. If that fails, returns the error of the attempt.
fn build(
    class: Name,
    text: String,
    set_fields: impl FnOnce(&Bound<'_, PyDict>) -> PyResult<()>,
) -> PyErr {
    Python::attach(|py| {
        let fields = PyDict::new(py);
        let made = set_fields(&fields).and_then(|()| {
            let class = py.import(MODULE)?.getattr(class)?;
            class.call((text,), Some(&fields))
        });
        made.map_or_else(|error| error, PyErr::from_value)
    })
}
