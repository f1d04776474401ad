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
