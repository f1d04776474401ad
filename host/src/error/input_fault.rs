//! Faults of the input, which do not end a communicator.

use std::fmt;
use std::ops::Deref;

use ferry_layout::Fault;

/// A kernel met an input that is at fault, and the round went on nevertheless. Its
/// [kind](Fault::kind), one that [`is_input`](ferry_layout::FaultKind::is_input), says what was done instead.
///
/// Only the rank that met the fault learns of it. The results of other ranks can be affected nevertheless:
/// after [`OutputTooSmall`](ferry_layout::FaultKind::OutputTooSmall) sums of any rank's tokens may lack
/// terms. An engine whose ranks must all know shares the fault between them.
///
/// One fault is reported for any number of its kind in the same round. It is a value and no error: a rank
/// that skips the rest of its round because of it, with `?` say, keeps all its peers waiting until the
/// deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an input fault says that a round's results are not those of its whole input"]
pub struct InputFault(pub Fault);

/// The fault of an input that a rank's kernels have reported since the last call, if any. Not to be dropped
/// with `?` alone, which a lint of rustc tells:
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// # fn work(rank: &ferry::Communicator, stream: ferry::Stream) -> Result<(), ferry::Error> {
/// rank.synchronize(stream)?;
/// # Ok(())
/// # }
/// ```
///
/// ```
/// #![deny(unused_must_use)]
/// # fn work(rank: &ferry::Communicator, stream: ferry::Stream) -> Result<(), ferry::Error> {
/// if let Some(fault) = rank.synchronize(stream)?.fault() {
///     eprintln!("{fault}");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it may have an input fault, which is returned only once: look at `fault()`"]
pub struct InputReport(pub(crate) Option<InputFault>);

impl InputReport {
    /// No fault.
    pub(crate) const RIGHT: Self = Self(None);

    /// The fault, if there is one.
    #[must_use = "an input fault says that a round's results are not those of its whole input"]
    pub const fn fault(self) -> Option<InputFault> {
        self.0
    }
}

impl Deref for InputFault {
    type Target = Fault;

    fn deref(&self) -> &Fault {
        &self.0
    }
}

impl fmt::Display for InputFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl std::error::Error for InputFault {}
