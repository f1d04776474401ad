//! Decisions of a launch, taken once, from numbers that are the same on every warp of a rank. The rest of
//! this crate matches on these values and compares no number of tokens, rows or warps with a constant.
//!
//! | choice | values |
//! |---|---|
//! | parts | whole rows, or a power of two of parts (`ferry_layout`, as both ends need it) |
//! | [`Numbering`] | in the block, or tiles and a scan |
//! | [`Wire`] | inline flags, flagged one by one or by block, remote |
//! | [`Split`] | the warps that notify, send, receive, reduce: see [`roles`] |
//!
//! Each function compares the plan's most tokens before the launch's, as far as it can: kernels for one shape
//! then have no code for cases that never occur.

pub mod combine;
pub mod dispatch;
pub mod local;
pub mod roles;
pub mod tuning;

/// Ways in which rows travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Every word is its own flag.
    Inline,
    /// Each sender releases its row, or its part of a row, and flags it.
    Flagged,
    /// The last sender of a block releases the rows of all of them, and sets their flags: no sender has more
    /// than one item.
    FlaggedByBlock,
    /// Some ranks are on other nodes: rows for them are put from the staging area. Rows for this node are
    /// [`Flagged`](Self::Flagged).
    Remote,
}

/// Ways in which assignments get their ranks within their experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbering {
    /// Each block numbers all assignments in its shared memory.
    InBlock,
    /// A warp numbers a tile of assignments, and the tiles are scanned.
    Tiles,
}

/// Division of a launch's work among its warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// The first warps notify, all others send, and all of them receive, or reduce, afterwards.
    Shared,
    /// Senders are on one half of the multiprocessors, otherwise like [`Shared`](Self::Shared): loads of the
    /// other half do not queue behind stores to peers, so notifications and offsets come earlier.
    SenderHalf,
    /// Notifiers send as well, otherwise like [`Shared`](Self::Shared): nobody receives in this launch.
    AllSend,
    /// A warp sends or receives, or sends or reduces, not both.
    Specialised,
    /// Specialises multiprocessors, too: the loads of each queue behind its own stores to peers, so one that
    /// receives should not also send.
    SpecialisedBySm,
}

/// Halves of dispatch or combine that a launch runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Only sends.
    Send,
    /// Only waits.
    Wait,
    /// Sends, then waits.
    Fused,
}
