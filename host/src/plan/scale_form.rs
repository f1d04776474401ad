//! The way in which the scales of received rows lie.

use ferry_layout::{ReceiveLayout, ScaleLayout, TokenFormat};

use crate::plan::Plan;
use crate::plan::receive::ReceiveFields;

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
