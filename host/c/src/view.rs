//! Received rows where they lie in the window.

use crate::communicator::{ferry_communicator, look_at};
use crate::status::{ferry_status, guard};
use crate::structs::{sized, write};
use crate::tensor::{ferry_tensor, strided};

/// Received rows of FERRY_RECEIVE_VIEW: row source * max_tokens_per_rank + token for each source rank and
/// token. They are read-only, and may be read by work that the streams order after ferry_dispatch or
/// ferry_dispatch_wait and before ferry_combine, ferry_combine_async or ferry_give_up. Rows without a token
/// (ids is -1) hold old bits, NaNs among them: leave them out, as 0 * NaN is NaN. Addresses and strides are
/// those of every round. With debug_checks later reads find bytes of 0xff.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ferry_view {
    /// sizeof(ferry_view).
    pub size: usize,
    /// [ranks * max_tokens_per_rank, hidden] in the plan's format.
    pub tokens: ferry_tensor,
    /// Scales of each row, row by row: FERRY_F32 in blockwise FP8, else one byte each. None in BF16, and with
    /// transposed_scales, which are an output of the dispatch.
    pub scales: ferry_tensor,
    /// FERRY_BF16 [ranks * max_tokens_per_rank], NVFP4 with row scales only.
    pub row_scales: ferry_tensor,
    /// Bytes from one row to the next, in all three. The tensors' strides are in elements.
    pub row_stride: u64,
}
sized!(ferry_view, 328);

/// Fills `view`, whose size is set, with the rows that the last dispatch leaves in the window.
/// FERRY_WRONG_ORDER unless ferry_dispatch or ferry_dispatch_wait was called last. Does not read device
/// memory. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_communicator_view(
    communicator: *const ferry_communicator,
    view: *mut ferry_view,
) -> ferry_status {
    guard("ferry_communicator_view", || {
        // SAFETY: the rules of handles and pointers.
        unsafe {
            look_at(communicator, |rank| {
                // The caller reads it between dispatch and combine only: documented in ferry.h.
                let found = rank.view()?;
                let found = ferry_view {
                    size: 0,
                    tokens: strided(found.tokens),
                    scales: found.scales.map_or(ferry_tensor::NONE, strided),
                    row_scales: found.row_scales.map_or(ferry_tensor::NONE, strided),
                    row_stride: found.row_stride,
                };
                write(view, "view", found)
            })
        }
    })
}
