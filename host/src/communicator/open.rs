//! The open round of a rank.

use crate::call::combine::Returned;
use crate::call::dispatch::{Received, Sent};
use crate::error::round::Round;

/// A round with the arguments that its next call needs.
#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "an epilogue is kept by value: no call allocates"
)]
pub(crate) enum Open {
    /// No round is open.
    Idle,
    /// `dispatch_async` was enqueued, and perhaps a launch that tells of its counts with a ticket.
    Sent(Sent, Option<u64>),
    /// The dispatch was enqueued whole.
    Received(Received),
    /// `combine_async` was enqueued.
    Returned(Returned),
}

impl Open {
    pub(crate) const fn round(&self) -> Round {
        match self {
            Self::Idle => Round::Idle,
            Self::Sent(..) => Round::DispatchSent,
            Self::Received(_) => Round::Dispatched,
            Self::Returned(_) => Round::CombineSent,
        }
    }
}
