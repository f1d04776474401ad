//! Writes on their way to memory.

/// A write that is not visible yet.
pub struct Write {
    pub address: u64,
    pub bytes: Vec<u8>,
    pub polled: Polled,
    /// Number of barriers that all warps of the block had passed when it was written.
    pub barriers: u16,
}

/// Whether the rank of an address may be polling it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Polled {
    /// Not polled.
    No,
    /// Polled as a signal.
    Signal,
    /// Polled as words of an inline row.
    Inline,
}
