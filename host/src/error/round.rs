//! The states of a round.

use std::fmt;

/// State of a rank's round, which determines the next call; see
/// [`Communicator::round`](crate::Communicator::round).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Round {
    /// No round is open: `dispatch` or `dispatch_async` comes next.
    Idle,
    /// `dispatch_async` was enqueued: `dispatch_wait` comes next.
    DispatchSent,
    /// The dispatch was enqueued whole: `combine`, `combine_async` or `give_up` comes next.
    Dispatched,
    /// `combine_async` was enqueued: `combine_wait` comes next.
    CombineSent,
}

impl fmt::Display for Round {
    /// Names the open call and the next one: "dispatch_async was not waited for; dispatch_wait comes next".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "no round is open; dispatch or dispatch_async comes next",
            Self::DispatchSent => "dispatch_async was not waited for; dispatch_wait comes next",
            Self::Dispatched => {
                "the dispatch was not combined; combine, combine_async or give_up comes next"
            }
            Self::CombineSent => "combine_async was not waited for; combine_wait comes next",
        })
    }
}
