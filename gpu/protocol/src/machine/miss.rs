//! What a warp that takes or places a row did not get.

/// A row had not arrived when the launch should abort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOut {
    /// Its number among the rows that were waited for; 0 where that is one.
    pub row: u32,
}

/// Why a row was not put into its places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// It did not come.
    TimedOut(TimedOut),
    /// It belongs outside the outputs.
    OutOfBounds {
        /// Its position there.
        position: u32,
    },
}

impl From<TimedOut> for Miss {
    #[inline(always)]
    fn from(timed_out: TimedOut) -> Self {
        Self::TimedOut(timed_out)
    }
}
