//! Tokens that a rank is given encoded, and the places of their scales.

use ferry::{Config, DataType, Device, DevicePtr, Error, Tensor, TokenFormat};
use ferry_reference::bf16;

use crate::formats::Encoded;
use crate::formats::given::{Given, Strides};

/// Bytes of a gap between rows of codes, and between rows of scales.
const GAPS: [usize; 2] = [16, 4];
/// Contents of gaps: a NaN in each type.
const GAP: u8 = 0xff;

/// Form of a rank's tokens.
#[derive(Clone, Copy)]
pub(super) struct Encoding {
    format: TokenFormat,
    hidden: usize,
    given: Given,
    strides: Strides,
    input_scale: f32,
}

impl Encoding {
    pub(super) fn of(config: &Config, given: Given, strides: Strides, input_scale: f32) -> Self {
        Self {
            format: config.format,
            hidden: config.hidden,
            given: given.in_format(config.format, config.hidden),
            strides,
            input_scale,
        }
    }

    /// A token as dispatch is given it.
    pub(super) fn encode(&self, row: &[bf16]) -> Encoded {
        self.given.given(self.format, row, self.input_scale)
    }

    /// Tokens, without their scales.
    pub(super) fn codes(
        &self,
        rows: usize,
        mut alloc: impl FnMut(usize) -> Result<DevicePtr, Error>,
    ) -> Result<Tensor<2>, Error> {
        let data_type = match self.given.is_encoded() {
            true => DataType::of_tokens(self.format),
            false => DataType::Bf16,
        };
        let bits = data_type.bits() as usize;
        let has_gaps = self.given.is_encoded() && self.strides == Strides::Gaps;
        let gap = if has_gaps { 8 * GAPS[0] / bits } else { 0 };
        let at = alloc(rows * (self.hidden + gap) * bits / 8)?;
        let dims = [rows, self.hidden];
        Ok(Tensor::contiguous(at, data_type, dims).with_row_stride(self.hidden + gap))
    }

    /// Their scales, if they are encoded.
    pub(super) fn scales(
        &self,
        rows: usize,
        mut alloc: impl FnMut(usize) -> Result<DevicePtr, Error>,
    ) -> Result<Option<Tensor<2>>, Error> {
        if !self.given.is_encoded() {
            return Ok(None);
        }
        let data_type = self.given.scales(self.format);
        let columns = self.given.scales_of_row(self.format, self.hidden);
        let bytes = data_type.bits() as usize / 8;
        let strides = match self.strides {
            Strides::Gaps => [columns + GAPS[1] / bytes, 1],
            Strides::Transposed if bytes == 4 => [1, rows + 1],
            Strides::RowMajor | Strides::Transposed => [columns, 1],
        };
        let elements = rows.max(1) * strides[0] + columns * strides[1];
        let at = alloc(elements * bytes)?;
        Ok(Some(Tensor {
            strides,
            ..Tensor::contiguous(at, data_type, [rows, columns])
        }))
    }
}

/// Uploads rows to their places in a tensor, and [`GAP`] to all else of its memory.
pub(super) fn place<'a>(
    device: &dyn Device,
    tensor: &Tensor<2>,
    rows: impl Iterator<Item = &'a [u8]>,
) -> Result<(), Error> {
    let mut memory = vec![GAP; tensor.at.bytes() as usize];
    let ([row_stride, stride], bits) = (tensor.strides, tensor.data_type.bits() as usize);
    for (index, row) in rows.enumerate() {
        let start = index * row_stride * bits / 8;
        match stride {
            1 => memory[start..start + row.len()].copy_from_slice(row),
            _ => {
                for (column, element) in row.chunks(bits / 8).enumerate() {
                    let at = start + column * stride * bits / 8;
                    memory[at..at + element.len()].copy_from_slice(element);
                }
            }
        }
    }
    device.upload(tensor.at, &memory)
}
