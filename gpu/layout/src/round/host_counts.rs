//! Counts of a dispatch for the host, in memory that it shares with the device.

use crate::plan::shape::Shape;
use crate::round::fault::FaultPage;

/// Counts of a dispatch, after the fault page: the ticket of the launch that wrote them, a u64 that is stored
/// last; then, as u32, the number of this rank's own tokens, the rows of each source, and those of each local
/// expert. In expert order a row is an assignment; otherwise those of an expert are its assignments, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCounts;

impl HostCounts {
    /// Bytes from the start of the fault page to the ticket.
    pub const START: u64 = size_of::<FaultPage>() as u64;
    /// Index of the number of tokens: like those below in 32-bit words from the ticket on.
    pub const TOKENS: u64 = 2;

    /// Index of the rows of a source.
    #[inline(always)]
    pub const fn source(source: u32) -> u64 {
        Self::TOKENS + 1 + source as u64
    }

    /// Index of the rows of a local expert.
    #[inline(always)]
    pub const fn expert(shape: &Shape, expert: u32) -> u64 {
        Self::source(shape.ranks) + expert as u64
    }

    /// 64-bit words of everything.
    pub const fn words(shape: &Shape) -> usize {
        Self::expert(shape, shape.local_experts()).div_ceil(2) as usize
    }
}

const _: () = assert!(HostCounts::START.is_multiple_of(8));
