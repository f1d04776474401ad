//! Rows of the outputs that are made of this rank's own tokens: nothing of them travels.

use ferry_layout::{DispatchArgs, Tensor, TokenFormat};

use crate::dispatch::scales;
use crate::machine::Machine;
use crate::machine::rows::{ByteRange, OutputRow, Row};
use crate::sync::launch::Launch;

/// Writes a byte range of a token's payload to the row `to(i)` of the outputs for every set bit `i` of
/// `targets`, with the scales of the groups in that range. The row's own scale goes with the range
/// that begins the row. As what travels, BF16 [avoids the sentinel](ferry_layout::avoid_sentinel).
#[inline(always)]
pub fn write_output<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    range: ByteRange,
    token: u32,
    targets: u32,
    to: impl Fn(u32) -> OutputRow,
) {
    let (machine, shape) = (launch.machine, &launch.common.shape);
    match shape.format() {
        TokenFormat::Bf16 => {
            let from = Row::Tensor(Tensor::Input, token);
            let to = |target| Row::Tensor(Tensor::Output, to(target).row);
            machine.copy_arrived(range, from, targets, to);
        }
        _ => {
            let stride = scales::stride(shape, args);
            machine.encode_output(range, token, stride, targets, to);
        }
    }
}
