//! Tokens that the user has encoded: their codes are a dispatch's `x`, with scales beside them.

use ferry_layout::{EncodedInput, TokenFormat};

use crate::call::DispatchInput;
use crate::error::TensorError;
use crate::tensor::Tensor;
use crate::tensor::data_type::DataType;
use crate::tensor::view::Element;

/// Elements that share a power of two in packed scales, and bytes of scales in a word: those of blockwise FP8
/// as DeepGEMM takes them on sm_100.
const PACKED: usize = 4;

/// Bytes of words that kernels number in 32 bits.
const MOST_BYTES: u64 = 4 << 32;

impl DispatchInput {
    /// Type of the elements of `x`.
    pub(super) const fn element(&self, format: TokenFormat) -> Element {
        match self.x_scales {
            Some(_) => Element::row(DataType::of_tokens(format)),
            None => Element::BF16_ROW,
        }
    }

    /// Checks the scales, if there are any, and describes them to kernels.
    pub(super) fn encoded(
        &self,
        format: TokenFormat,
        [tokens, hidden]: [usize; 2],
    ) -> Result<EncodedInput, TensorError> {
        let Some(scales) = &self.x_scales else {
            return Ok(EncodedInput::NONE);
        };
        let group = match format {
            TokenFormat::Bf16 => return Err(unwanted(format, "whose x has no scales")),
            TokenFormat::Nvfp4RowScaled(_) => {
                return Err(unwanted(format, "whose rows have scales of their own, too"));
            }
            _ => format.sizes().group as usize,
        };
        if self.input_scale.is_some() {
            return Err(TensorError {
                tensor: "input_scale",
                wanted: "none, as x is encoded: it comes with scales".to_owned(),
                given: "a tensor".to_owned(),
            });
        }
        let is_packed = format == TokenFormat::BlockwiseFp8
            && matches!(scales.data_type, DataType::I32 | DataType::U32);
        let (columns, element) = match (is_packed, DataType::of_scales(format)) {
            (true, _) => (packed_columns(hidden, group)?, DataType::I32),
            (false, element) => (hidden / group, element.unwrap_or(DataType::U8)),
        };
        let words = element.bits() / 8;
        scales.require_words([tokens, columns], Element::word(element))?;
        // The stride of a dimension of size 1 may be any number, and is not read.
        let stride = |index: usize| match scales.dims[index] {
            0 | 1 => 0,
            _ => scales.strides[index] as u32,
        };
        Ok(EncodedInput {
            scales: scales.at.address(),
            // Of scales of a byte, four are a word.
            row_stride: stride(0) / (4 / words),
            word_stride: if words == 4 { stride(1) } else { 1 },
            all_ones: format.all_ones(),
            is_packed: is_packed.into(),
        })
    }

    /// Refuses codes without scales.
    pub(super) fn require_scales_of_codes(&self, format: TokenFormat) -> Result<(), TensorError> {
        let codes = DataType::of_tokens(format);
        if self.x_scales.is_some() || codes == DataType::Bf16 || self.x.data_type != codes {
            return Ok(());
        }
        Err(TensorError {
            tensor: "x_scales",
            wanted: format!("a tensor, as x is {codes}"),
            given: "none".to_owned(),
        })
    }
}

fn unwanted(format: TokenFormat, reason: &str) -> TensorError {
    TensorError {
        tensor: "x_scales",
        wanted: format!("none (format {format}, {reason})"),
        given: "a tensor".to_owned(),
    }
}

/// Words of a row of packed scales.
fn packed_columns(hidden: usize, group: usize) -> Result<usize, TensorError> {
    if hidden.is_multiple_of(PACKED * group) {
        return Ok(hidden / (PACKED * group));
    }
    Err(TensorError {
        tensor: "x_scales",
        wanted: format!(
            "elements of f32, as hidden {hidden} is no multiple of {}: a word holds scales of so many \
             elements",
            PACKED * group
        ),
        given: "i32".to_owned(),
    })
}

impl Tensor<2> {
    /// Checks scales that are read in words of 32 bits: rows may have a stride, and words one, too.
    fn require_words(&self, dims: [usize; 2], element: Element) -> Result<(), TensorError> {
        let refused = |wanted: String| {
            Err(TensorError {
                tensor: "x_scales",
                wanted,
                given: format!("strides {:?} (shape {dims:?})", self.strides),
            })
        };
        self.view().require_elements("x_scales", &dims, element)?;
        let of_word = 4 / (element.data_type.bits() as usize / 8);
        let [row, between] = self.strides;
        if self.elements() > 0 {
            if of_word > 1 && dims[1] > 1 && between != 1 {
                return refused("columns without gaps: make it contiguous".to_owned());
            }
            if dims[0] > 1 && (!row.is_multiple_of(of_word) || row >= 1 << 31) {
                return refused(format!(
                    "rows a multiple of {of_word} elements apart, fewer than 2^31: make it contiguous"
                ));
            }
            if dims[1] > 1 && between >= 1 << 31 {
                return refused("columns fewer than 2^31 elements apart".to_owned());
            }
        }
        let span = self.view().span();
        if span > MOST_BYTES {
            return refused("at most 16 GiB from the first element to the last".to_owned());
        }
        self.view().require_memory("x_scales", Some(span))
    }
}
