//! Encoding of a token in the format of a launch.

use ferry_layout::{Table, Tensor, f32_of_bf16_bits, nvfp4};
use ferry_protocol::{ByteRange, Row, Tiles};

use super::Warp;
use crate::encode::{Encoded, encode, largest};

/// A byte range of a token's payload, encoded.
pub struct EncodedToken {
    /// Payload and scales.
    pub encoded: Encoded,
    /// Index of the first word of scales in the row's.
    pub first_word: u32,
    /// The token's own scale, if the format has one and the range begins the row.
    pub row_scale: Option<u16>,
}

impl Warp<'_> {
    /// Encodes a byte range of a token's payload.
    pub(super) fn encode_token(&self, range: ByteRange, token: u32) -> EncodedToken {
        let (shape, sizes) = (&self.common.shape, self.common.shape.sizes());
        let source = self.row(Row::Tensor(Tensor::Input, token));
        let data = self.load_bytes(source.start, 2 * u64::from(shape.hidden));
        let values: Vec<f32> = data
            .as_chunks()
            .0
            .iter()
            .map(|&bits| f32_of_bf16_bits(u16::from_le_bytes(bits)))
            .collect();
        let inverse = nvfp4::inverse_global_bits(largest(&values));
        let global = match (sizes.has_row_scale, self.table(Table::InputScale)) {
            (true, _) => nvfp4::global_of_inverse(inverse),
            (false, 0) => 1.0,
            (false, at) => f32::from_bits(self.with_memory(|memory| memory.read_u32(at))),
        };
        let element = |byte: u32| byte * 8 / sizes.element_bits;
        let (first, end) = (element(range.start), element(range.end));
        let values = &values[first as usize..end as usize];
        EncodedToken {
            encoded: encode(shape.format(), values, global),
            first_word: sizes.scale_words(first),
            row_scale: (sizes.has_row_scale && range.start == 0).then_some(inverse),
        }
    }
}
