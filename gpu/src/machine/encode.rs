//! Encoding of tokens into rows, in the format of the launch.

use ferry_layout::{Arguments, Table, Tensor, TokenFormat, nvfp4};
use ferry_protocol::{ByteRange, OutputRow, Row, Tiles};

use super::Gpu;
use crate::elements::{Elements, Input};
use crate::encode::{self, EncodedRow, OutputTarget, Target};
use crate::ptx::memory;

impl<A: Arguments, const SHMEM: bool> Gpu<'_, A, SHMEM> {
    /// Encodes a token into the row `to(i)` for every set bit `i` of `targets`: a byte range of the
    /// payload, and the scales of the groups in that range. The token's own scale goes with the
    /// range that begins the row.
    #[inline(always)]
    pub fn encode_token<T: Target>(
        &self,
        range: ByteRange,
        token: u32,
        targets: u64,
        to: impl Fn(u32) -> T,
    ) {
        let elements = Input {
            source: self.row(Row::Tensor(Tensor::Input, token)),
            // With ranks of other nodes registers are scarce, and the network is slower.
            loads_ahead: !SHMEM,
            lane: self.lane,
            ahead: [[0; 4]; 2],
        };
        self.encode_elements(range, token, elements, targets, to);
    }

    /// Encodes a token like [`encode_token`](Self::encode_token), but takes its elements from `elements`
    /// instead of loading them. They must be those of the input, from which a row's own scale is computed.
    #[inline(always)]
    pub fn encode_elements<T: Target>(
        &self,
        range: ByteRange,
        token: u32,
        elements: impl Elements,
        targets: u64,
        to: impl Fn(u32) -> T,
    ) {
        let shape = &self.common().shape;
        let row = EncodedRow {
            source: self.row(Row::Tensor(Tensor::Input, token)),
            elements: shape.hidden,
            lane: self.lane,
            targets,
            to,
        };
        // SAFETY: the protocol encodes whole tokens into rows with room for payload and scales.
        unsafe {
            match shape.format() {
                TokenFormat::Bf16 => {}
                TokenFormat::BlockwiseFp8 => row.encode(&encode::BlockwiseFp8, range, elements),
                TokenFormat::Mxfp8(_) => row.encode(&encode::Mxfp8, range, elements),
                TokenFormat::Mxfp4(_) => row.encode(&encode::Mxfp4, range, elements),
                TokenFormat::Nvfp4(_) => {
                    let global = match self.args.table(Table::InputScale) {
                        0 => 1.0,
                        at => f32::from_bits(memory::load_u32(at)),
                    };
                    row.encode(&encode::Nvfp4::new(global), range, elements);
                }
                TokenFormat::Nvfp4RowScaled(_) => {
                    let inverse = nvfp4::inverse_global_bits(row.largest());
                    if range.start == 0 {
                        row.store_row_scale(inverse);
                    }
                    let global = nvfp4::global_of_inverse(inverse);
                    row.encode(&encode::Nvfp4::new(global), range, elements);
                }
            }
        }
    }

    /// Places of a row of the outputs and of its scales, which are `stride` words apart.
    #[inline(always)]
    pub(super) fn output_target(&self, to: OutputRow, stride: u64) -> OutputTarget {
        let table = |table| self.args.table(table);
        OutputTarget {
            payload: self.row(Row::Tensor(Tensor::Output, to.row)),
            scales: table(Table::Scales) + 4 * to.scales as u64,
            stride,
            row_scale: table(Table::RowScales) + 2 * to.row as u64,
        }
    }
}
