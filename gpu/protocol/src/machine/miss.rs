//! Reasons why a warp did not get or place a row.

/// A row that had not arrived when the launch had to abort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOut {
    /// Its number among the awaited rows; 0 if there was only one.
    pub row: u32,
}

/// Reason why a row was not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// It did not arrive.
    TimedOut(TimedOut),
    /// The row or its scales would lie outside the outputs.
    OutOfBounds {
        /// Output row.
        position: u32,
    },
}

impl From<TimedOut> for Miss {
    #[inline(always)]
    fn from(timed_out: TimedOut) -> Self {
        Self::TimedOut(timed_out)
    }
}
