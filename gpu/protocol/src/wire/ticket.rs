//! Words for the host, and the ticket after them: a host that sees the ticket sees the words.

use crate::machine::host::Host;
use crate::machine::signals::Signals;

/// The right to tell the host that words of its memory are written. Only a release grants it.
#[derive(Clone, Copy)]
pub struct Ticket(u64);

impl Ticket {
    /// Orders all writes of this warp before the store of [`tell`](Self::tell). All lanes.
    #[inline(always)]
    pub fn release<S: Signals>(signals: &S, ticket: u64) -> Self {
        signals.release();
        Self(ticket)
    }

    /// Stores the ticket. For one lane.
    #[inline(always)]
    pub fn tell<S: Host>(self, host: &S) {
        host.tell_host(self.0);
    }
}
