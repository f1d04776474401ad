//! Statuses of entries, and the texts of failures.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use ferry::error::{LocalRanksError, SharedGpuError, TensorError};
use ferry::{Error, Round};

/// Result of a call. Unless it is FERRY_OK, ferry_last_error returns a text. Numbers never change; later
/// versions may add some.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ferry_status {
    /// Success.
    FERRY_OK = 0,
    /// A kernel refused an input, and the round went on. The communicator stays usable: go on with the next
    /// call of the round, as the other ranks do. The fault says what was refused.
    FERRY_INPUT_FAULT = 1,
    /// A kernel gave up. The fault says why. The communicator can only be closed.
    FERRY_FAULT = 2,
    /// The communicator gave up earlier and can only be closed. If a fault was the reason, it is reported.
    FERRY_POISONED = 3,
    /// A required pointer is NULL.
    FERRY_NULL = 10,
    /// A pointer is not a handle of the kind that the call takes.
    FERRY_BAD_HANDLE = 11,
    /// The size of a struct is invalid, or bytes that this library does not know are set.
    FERRY_STRUCT_SIZE = 12,
    /// The value of an argument or a field is invalid, or does not match the others.
    FERRY_INVALID_ARGUMENT = 13,
    /// The shape, strides, type, address or bytes of a tensor are invalid.
    FERRY_INVALID_TENSOR = 14,
    /// The configuration is invalid. The text lists every problem.
    FERRY_INVALID_CONFIG = 15,
    /// The call does not come next in the round.
    FERRY_WRONG_ORDER = 16,
    /// Another thread is in a call of the same communicator or graph.
    FERRY_BUSY = 17,
    /// Communicators or graphs still need the object that was to be closed, or the multiprocessors of a GPU
    /// that ranks share. Nothing was done.
    FERRY_IN_USE = 18,
    /// This library was built without the feature that the call needs.
    FERRY_NOT_BUILT = 19,
    /// Processes did not find each other or are set up differently, or another one failed.
    FERRY_PEER = 30,
    /// The CUDA driver or NVSHMEM reported an error, or a device lacks a capability.
    FERRY_DEVICE = 31,
    /// A library is missing, or the operating system reported an error.
    FERRY_SYSTEM = 32,
    /// An error of another kind.
    FERRY_OTHER = 33,
    /// A bug of the library: a panic was caught. Close the handles that can be closed.
    FERRY_INTERNAL = 34,
}

use ferry_status::{
    FERRY_BAD_HANDLE, FERRY_BUSY, FERRY_DEVICE, FERRY_FAULT, FERRY_IN_USE, FERRY_INPUT_FAULT,
    FERRY_INTERNAL, FERRY_INVALID_ARGUMENT, FERRY_INVALID_CONFIG, FERRY_INVALID_TENSOR,
    FERRY_NOT_BUILT, FERRY_NULL, FERRY_OK, FERRY_OTHER, FERRY_PEER, FERRY_POISONED,
    FERRY_STRUCT_SIZE, FERRY_SYSTEM, FERRY_WRONG_ORDER,
};

impl ferry_status {
    /// Every status, with its name in C and its meaning.
    const ALL: [(Self, &CStr); 19] = [
        (FERRY_OK, c"FERRY_OK: done"),
        (
            FERRY_INPUT_FAULT,
            c"FERRY_INPUT_FAULT: a kernel refused an input; go on",
        ),
        (FERRY_FAULT, c"FERRY_FAULT: a kernel gave up"),
        (
            FERRY_POISONED,
            c"FERRY_POISONED: the communicator gave up earlier",
        ),
        (FERRY_NULL, c"FERRY_NULL: a pointer is NULL"),
        (FERRY_BAD_HANDLE, c"FERRY_BAD_HANDLE: not such a handle"),
        (
            FERRY_STRUCT_SIZE,
            c"FERRY_STRUCT_SIZE: a struct of an unknown size",
        ),
        (
            FERRY_INVALID_ARGUMENT,
            c"FERRY_INVALID_ARGUMENT: a value does not fit",
        ),
        (
            FERRY_INVALID_TENSOR,
            c"FERRY_INVALID_TENSOR: a tensor does not fit",
        ),
        (
            FERRY_INVALID_CONFIG,
            c"FERRY_INVALID_CONFIG: the configuration does not work",
        ),
        (
            FERRY_WRONG_ORDER,
            c"FERRY_WRONG_ORDER: the call does not come next",
        ),
        (FERRY_BUSY, c"FERRY_BUSY: another thread is in a call"),
        (FERRY_IN_USE, c"FERRY_IN_USE: something alive needs it"),
        (
            FERRY_NOT_BUILT,
            c"FERRY_NOT_BUILT: built without the feature",
        ),
        (FERRY_PEER, c"FERRY_PEER: another process failed"),
        (FERRY_DEVICE, c"FERRY_DEVICE: the device refused"),
        (FERRY_SYSTEM, c"FERRY_SYSTEM: the system refused"),
        (FERRY_OTHER, c"FERRY_OTHER: another error"),
        (FERRY_INTERNAL, c"FERRY_INTERNAL: a bug of the library"),
    ];
}

/// Failure of an entry.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: ferry_status,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(status: ferry_status, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { status, text }
    }

    /// An argument or a field with an invalid value.
    pub(crate) fn value(name: &str, value: impl ToString, rule: &str) -> Self {
        let value = value.to_string();
        Self::new(FERRY_INVALID_ARGUMENT, format!("{name} is {value}: {rule}"))
    }

    /// A feature that an entry needs and the library lacks.
    #[cfg(not(all(feature = "cuda", feature = "nvshmem")))]
    pub(crate) fn not_built(feature: &str) -> Self {
        let text = format!(
            "this library was built without the feature {feature}; `cargo xtask package-c --features \
             {feature}` builds one with it"
        );
        Self::new(FERRY_NOT_BUILT, text)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(status_of(&error), text_of(&error))
    }
}

impl From<TensorError> for Failure {
    fn from(error: TensorError) -> Self {
        Error::from(error).into()
    }
}

/// Text of an error. Errors that name calls get C's names.
fn text_of(error: &Error) -> String {
    match error {
        Error::WrongOrder { open, .. } => format!("out of order: {}", next_call(*open)),
        Error::RoundOpen { rank, open } => format!(
            "rank {}'s communicator cannot be closed: {}; if a peer is lost, drop it, or close it after \
             ferry_synchronize has returned the fault",
            rank.0,
            next_call(*open)
        ),
        Error::SplitWithoutTravel { .. } => {
            "the plan's skip_a2a is 1, and nothing is sent: call ferry_dispatch and ferry_combine"
                .to_owned()
        }
        Error::CountsInGraph => {
            "a graph cannot tell the host of counts: capture the dispatch without ferry_dispatch_counts"
                .to_owned()
        }
        Error::NoCounts { .. } => {
            "no counts were asked for: call ferry_dispatch_counts between ferry_dispatch_async and \
             ferry_dispatch_wait"
                .to_owned()
        }
        Error::NoView { receive } => format!(
            "the plan's receive is {receive}, and only FERRY_RECEIVE_VIEW leaves rows in the window"
        ),
        Error::Tensor(_) | Error::TensorsOverlap { .. } => with_fields_of_c(error.to_string()),
        Error::LocalRanks(LocalRanksError::Refused { rank, source }) => format!(
            "rank {}: {}; nothing was launched on any rank",
            rank.0,
            text_of(source)
        ),
        Error::SharedGpu(SharedGpuError::OneStream {
            rank,
            kernel,
            waiting,
            waiting_kernel,
        }) => format!(
            "ferry_{} of rank {} would follow ferry_{} of rank {} in a stream, and that waits for it: give \
             ranks that share a GPU a stream each, or send on all of them before one waits \
             (ferry_dispatch_async, ferry_combine_async)",
            kernel.name(),
            rank.0,
            waiting_kernel.name(),
            waiting.0
        ),
        _ => error.to_string(),
    }
}

/// Gives fields that are arrays in the library, and one after the other in C, the names that they have there.
pub(crate) fn with_fields_of_c(text: String) -> String {
    [
        ("biases[0]", "bias_0"),
        ("biases[1]", "bias_1"),
        ("initial[0]", "initial_0"),
        ("initial[1]", "initial_1"),
    ]
    .into_iter()
    .fold(text, |text, (name, in_c)| text.replace(name, in_c))
}

/// The open call of a round, and the call that comes next.
const fn next_call(open: Round) -> &'static str {
    match open {
        Round::Idle => "no round is open; ferry_dispatch or ferry_dispatch_async comes next",
        Round::DispatchSent => {
            "ferry_dispatch_async was not waited for; ferry_dispatch_wait comes next"
        }
        Round::Dispatched => {
            "the dispatch was not combined; ferry_combine, ferry_combine_async or ferry_give_up comes \
             next"
        }
        Round::CombineSent => {
            "ferry_combine_async was not waited for; ferry_combine_wait comes next"
        }
    }
}

/// Status of an error.
fn status_of(error: &Error) -> ferry_status {
    match error {
        Error::Fault(_) => FERRY_FAULT,
        Error::Poisoned(_) | Error::PeerGaveUp { .. } => FERRY_POISONED,
        Error::Tensor(_) | Error::TensorsOverlap { .. } | Error::MemoryTooShort { .. } => {
            FERRY_INVALID_TENSOR
        }
        Error::Plan(_) => FERRY_INVALID_CONFIG,
        Error::WrongOrder { .. }
        | Error::RoundOpen { .. }
        | Error::SplitWithoutTravel { .. }
        | Error::CountsInGraph
        | Error::NoCounts { .. }
        | Error::GroupClosed => FERRY_WRONG_ORDER,
        Error::GraphsAlive { .. }
        | Error::ForeignGraphs { .. }
        | Error::CommunicatorsOpen { .. } => FERRY_IN_USE,
        Error::Bootstrap(_)
        | Error::ShapeMismatch { .. }
        | Error::Node(_)
        | Error::PeerFailed { .. }
        | Error::GpuShared { .. } => FERRY_PEER,
        Error::Cuda(_)
        | Error::NoSuchDevice { .. }
        | Error::NoPeerAccess { .. }
        | Error::Links(_)
        | Error::Nvshmem(_)
        | Error::Driver(_) => FERRY_DEVICE,
        Error::LibraryMissing { .. } | Error::Io { .. } => FERRY_SYSTEM,
        Error::NotBuilt { .. } => FERRY_NOT_BUILT,
        Error::RankCount { .. }
        | Error::DeviceListedTwice { .. }
        | Error::NotLocal { .. }
        | Error::OtherDevice { .. }
        | Error::PlanForOtherGroup { .. }
        | Error::PlanSpansNodes { .. }
        | Error::WrongScales { .. }
        | Error::UnusedInputScale { .. }
        | Error::SiluColumns { .. }
        | Error::SiluLimit { .. }
        | Error::TooManyScales { .. }
        | Error::Capacity(_)
        | Error::MaxSms(_)
        | Error::Deadline(_)
        | Error::TooManyTokens { .. }
        | Error::WeightsInReducedMode
        | Error::WrongCombineOutput { .. }
        | Error::ApartInReducedMode
        | Error::NoView { .. }
        | Error::WithoutOptions { .. }
        | Error::Epilogue(_)
        | Error::GreenContext { .. } => FERRY_INVALID_ARGUMENT,
        #[cfg(feature = "cuda")]
        Error::Kernels(_) => FERRY_INVALID_ARGUMENT,
        Error::SharedGpu(error) => status_of_shared_gpu(error),
        Error::LocalRanks(error) => match error {
            LocalRanksError::Refused { source, .. } => status_of(source),
            LocalRanksError::NotClosed { .. } => FERRY_WRONG_ORDER,
            LocalRanksError::Count { .. }
            | LocalRanksError::OtherCall { .. }
            | LocalRanksError::NoRanks
            | LocalRanksError::OtherCommunicator { .. }
            | LocalRanksError::Missing { .. } => FERRY_INVALID_ARGUMENT,
            LocalRanksError::NotLaunched { .. } | LocalRanksError::Poisoned { .. } => {
                FERRY_POISONED
            }
            _ => FERRY_OTHER,
        },
        _ => FERRY_OTHER,
    }
}

/// Status of an error of ranks that share a GPU.
const fn status_of_shared_gpu(error: &SharedGpuError) -> ferry_status {
    match error {
        SharedGpuError::OneStream { .. } => FERRY_WRONG_ORDER,
        SharedGpuError::NoRoom { .. } => FERRY_IN_USE,
        SharedGpuError::TooManyRanks { .. } => FERRY_INVALID_ARGUMENT,
        SharedGpuError::NeedsMps { .. } => FERRY_PEER,
        _ => FERRY_OTHER,
    }
}

thread_local! {
    /// The text of this thread's last failure.
    static LAST: RefCell<CString> = RefCell::default();
}

/// Keeps the text for [`ferry_last_error`].
fn keep(text: String) {
    let bytes: Vec<u8> = text
        .into_bytes()
        .into_iter()
        .filter(|&byte| byte != 0)
        .collect();
    // Never the default: zero bytes were removed.
    let text = CString::new(bytes).unwrap_or_default();
    // Fails only in a thread that is ending.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
}

/// Runs the whole of an entry: keeps the text of a failure with the entry's name, and catches a panic.
pub(crate) fn guard(
    entry: &'static str,
    work: impl FnOnce() -> Result<(), Failure>,
) -> ferry_status {
    let Failure { status, text } = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return FERRY_OK,
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::new(FERRY_INTERNAL, panic_text(&*panic)),
    };
    // Outside `catch_unwind`: formatting a string can fail only for lack of memory, which aborts.
    keep(format!("{entry}: {text}"));
    status
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let message = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a bug of ferry: {}", message.unwrap_or("a panic"))
}

/// Returns the text of this thread's last call that did not return FERRY_OK, beginning with the call's name;
/// empty if there was none. Valid until the next such call on this thread. Any thread; never fails.
#[unsafe(no_mangle)]
pub extern "C" fn ferry_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr())
        .unwrap_or(c"".as_ptr())
}

/// Returns the name of a ferry_status and its meaning, in English. Valid for ever. Any thread; never fails.
#[unsafe(no_mangle)]
pub extern "C" fn ferry_status_string(status: c_int) -> *const c_char {
    ferry_status::ALL
        .iter()
        .find(|(known, _)| *known as c_int == status)
        .map_or(c"not a ferry_status", |(_, text)| text)
        .as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last() -> String {
        // SAFETY: the text is this thread's, which makes no other call meanwhile.
        let text = unsafe { CStr::from_ptr(ferry_last_error()) };
        text.to_string_lossy().into_owned()
    }

    #[test]
    fn a_panic_becomes_a_status_with_its_text() {
        assert_eq!(guard("ferry_x", || panic!("index {}", 7)), FERRY_INTERNAL);
        assert_eq!(last(), "ferry_x: a bug of ferry: index 7");
    }

    #[test]
    fn a_text_with_a_zero_byte_is_kept() {
        guard("ferry_x", || Err(Failure::new(FERRY_OTHER, "a\0b")));
        assert_eq!(last(), "ferry_x: ab");
    }

    #[test]
    fn every_status_has_a_text_that_begins_with_its_name() {
        for (status, text) in ferry_status::ALL {
            let name = format!("{status:?}: ");
            assert!(text.to_str().unwrap().starts_with(&name), "{name}");
        }
    }
}
