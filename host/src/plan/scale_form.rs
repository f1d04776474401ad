//! The way in which the scales of received rows lie.

use ferry_layout::{ReceiveLayout, ScaleLayout, Shape, TokenFormat};

use crate::error::Error;
use crate::plan::Plan;
use crate::plan::receive::ReceiveFields;
use crate::tensor::data_type::DataType;
use crate::tensor::view::{Element, Layout};

/// Kinds of [`ScaleTensor`](crate::ScaleTensor), or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScaleForm {
    /// There are no scales, or they lie in the window alone.
    None,
    /// Transposed, for a number of rows that is a multiple of this one.
    Transposed {
        multiple: usize,
    },
    /// Transposed, for each expert's block of rows by itself.
    TransposedBlocks,
    RowMajor,
    Tiled,
}

impl ScaleForm {
    /// Form of the scales of rows by expert, and of a fused SiLU's rows.
    pub(crate) const fn of_format(format: TokenFormat) -> Self {
        match (format, format.scale_layout()) {
            (TokenFormat::Bf16, _) => Self::None,
            (_, None) => Self::Transposed {
                multiple: format.sizes().row_alignment as usize,
            },
            (_, Some(ScaleLayout::RowMajor)) => Self::RowMajor,
            (_, Some(ScaleLayout::Tiled)) => Self::Tiled,
        }
    }

    /// Its name in error messages.
    pub(crate) const fn title(self) -> &'static str {
        match self {
            Self::None => "no scales",
            Self::Transposed { .. } | Self::TransposedBlocks => "transposed scales",
            Self::Tiled => "tiled scales",
            Self::RowMajor => "row-major scales",
        }
    }

    /// Checks that kernels can number the words of so many scales.
    pub(crate) fn countable(self, shape: &Shape, rows: usize, blocks: usize) -> Result<(), Error> {
        let (unit, given, max) = match self {
            Self::None | Self::Transposed { .. } => return Ok(()),
            Self::TransposedBlocks | Self::RowMajor => ("rows", rows, shape.most_scaled_rows()),
            Self::Tiled => ("blocks", blocks, shape.most_scale_blocks()),
        };
        if given as u64 <= max {
            return Ok(());
        }
        Err(Error::TooManyScales { unit, given, max })
    }

    /// Sizes and elements of the scales of so many rows, or `blocks` of tiled scales, of `experts` groups.
    pub(crate) fn layout(
        self,
        shape: &Shape,
        experts: usize,
        rows: usize,
        blocks: usize,
    ) -> Layout {
        let of_row = shape.hidden.checked_div(shape.sizes().group).unwrap_or(0) as usize;
        let scale = DataType::of_scales(shape.format()).unwrap_or(DataType::U8);
        let of = |element, dims: &[usize]| Layout::new(element, dims, |&size| size);
        match self {
            // TMA takes addresses and strides that are multiples of 16 bytes (CUDA driver API,
            // "cuTensorMapEncodeTiled").
            Self::None | Self::Transposed { .. } => of(Element::row(scale), &[of_row, rows]),
            Self::TransposedBlocks => {
                let block = rows.checked_div(experts).unwrap_or(0);
                of(Element::row(scale), &[experts * of_row, block])
            }
            Self::RowMajor => of(Element::word(scale), &[rows, of_row]),
            Self::Tiled => of(Element::row(scale), &[blocks, of_row / 4, 32, 4, 4]),
        }
    }
}

impl Plan {
    /// Form of the scales of a dispatch's outputs.
    pub(crate) const fn scale_form(&self) -> ScaleForm {
        let config = self.config();
        let by_expert = ScaleForm::of_format(config.format);
        let ReceiveFields {
            layout,
            transposed_scales,
            ..
        } = self.receive();
        match (layout, by_expert) {
            (ReceiveLayout::ByExpert, form) => form,
            (ReceiveLayout::Padded, ScaleForm::Transposed { .. }) if transposed_scales => {
                ScaleForm::TransposedBlocks
            }
            // The number of rows is the user's, or follows from the plan.
            _ if transposed_scales => ScaleForm::Transposed { multiple: 1 },
            (ReceiveLayout::View, _) => ScaleForm::None,
            (_, ScaleForm::Transposed { .. }) => ScaleForm::RowMajor,
            (_, form) => form,
        }
    }
}
