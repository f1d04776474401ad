//! Numbers found by trial that only the protocol uses. Numbers that fix bytes, or that the host uses as well,
//! are in `ferry_layout`. Each names its entry of `gpu/protocol/TUNING.md` and the GPU.

use ferry_layout::TokenFormat;

/// Whole rows from which on some warps only send, even if there are more warps than rows: the first rows are
/// in the outputs before the last ones leave. measured: T-026, H200.
pub const SPECIALISE_FROM_ROWS: u32 = 512;

/// Bytes of an inline part's payload from which on the senders keep to one half of the multiprocessors.
/// measured: T-092, H200.
pub const SENDER_HALF_FROM_BYTES: u32 = 3584;

/// Warps per notifier, at least: receivers cannot place a row before the counts are there, so a small number
/// of notifiers starts first. measured: T-068, H200.
pub const WARPS_PER_NOTIFIER: u32 = 4;

/// Combine uses more reducers in launches with more warps than this, as the others fill the wire.
/// measured: T-005, H200.
pub const MORE_REDUCERS_FROM_WARPS: u32 = 1056;

/// Items per sending warp from which on combine sends them in batches. measured: T-065, H200.
pub const BATCH_FROM_ITEMS_PER_WARP: u32 = 32;

/// Most warps that may poll all words of their rows repeatedly: the polls of more warps would slow down the
/// rows that arrive. measured: T-049, H200.
pub const POLL_ALL_UP_TO_WARPS: u32 = 512;

/// Warps that only send, enough to fill the wire; the others put rows into the outputs meanwhile. Encoding
/// takes more warps than copying. measured: T-044, H200.
#[inline(always)]
pub const fn saturating_senders(format: TokenFormat) -> u32 {
    match format {
        TokenFormat::Bf16 => 396,
        TokenFormat::Mxfp4(_) => 1056,
        _ => 528,
    }
}

/// Most warps of a launch of `warps` warps that may only send: on a small part of a GPU,
/// [`saturating_senders`] would leave too few receivers. measured: T-068, H200.
#[inline(always)]
pub const fn spared_senders(format: TokenFormat, warps: u32) -> u32 {
    match format {
        TokenFormat::Bf16 => warps * 5 / 16,
        _ => warps * 9 / 16,
    }
}

/// Senders that `items` items keep busy: two items each if rows are copied, as fewer senders keep the wire as
/// busy. measured: T-009, H200.
#[inline(always)]
pub const fn useful_senders(format: TokenFormat, items: u32) -> u32 {
    match format {
        TokenFormat::Bf16 => items / 2,
        _ => items,
    }
}

/// Whether some of a launch's `warps` warps only reduce if a received row has one expert row, which takes as
/// long to be sent as to be reduced. With fewer warps all do one after the other. measured: T-121, H100, and
/// T-124, H200.
#[inline(always)]
pub const fn reduces_rows_beside(warps: u32) -> bool {
    warps > MORE_REDUCERS_FROM_WARPS
}

/// Warps of a block of `in_block` warps that only reduce, if the launch's `warps` warps have more than one
/// item each. `keeps_rows`: whether a received row has one expert row. measured: T-043 and T-124, H200.
#[inline(always)]
pub const fn reducers(in_block: u32, warps: u32, keeps_rows: bool) -> u32 {
    let reducers = if keeps_rows {
        in_block / 2
    } else if warps > MORE_REDUCERS_FROM_WARPS {
        in_block * 3 / 8
    } else {
        in_block / 4
    };
    if reducers == 0 { 1 } else { reducers }
}
