//! The scale tensors of each format, and their check.

use ferry_layout::{Shape, TokenFormat};

use crate::error::{Error, TensorError};
use crate::plan::scale_form::ScaleForm;
use crate::tensor::Tensor;
use crate::tensor::any::AnyTensor;
use crate::tensor::view::Element;

/// The scales of dispatch's output rows. Kernels number the 32-bit words of one-byte scales in 32 bits: more
/// are refused ([`Error::TooManyScales`]), in NVFP4 if the tokens take more than 128 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleTensor {
    /// f32 `[hidden / 128, capacity]`, blockwise FP8 by expert, and in other layouts with
    /// [`KeptRows::transposed_scales`](crate::KeptRows::transposed_scales): transposed, for grouped matrix
    /// multiplications that load it by TMA. So it is 16-byte aligned, and by expert so is its stride:
    /// `capacity` is a multiple of 4. In other layouts it may be any number, and TMA takes multiples of 4.
    /// The columns of padding rows are not written without
    /// [`ByExpert::clear_padding`](crate::ByExpert::clear_padding).
    Transposed(Tensor<2>),
    /// MX and NV formats in [`ScaleLayout::Tiled`](crate::ScaleLayout).
    Tiled {
        /// One byte per scale, `[blocks, hidden / (4 * group), 32, 4, 4]`, 16-byte aligned: the scale
        /// of (an expert's row `r`, group `g`) at `[b, g / 4, r % 32, r % 128 / 32, g % 4]` with
        /// `b = row_offsets[expert] / 128 + offsets[expert] + r / 128`. In an expert's last block, what
        /// follows the expert's rows is zero. Rows that pad the expert count as its rows, up to
        /// `row_offsets[expert + 1]`: their scales keep their bits, or are zero with
        /// [`ByExpert::clear_padding`](crate::ByExpert::clear_padding). Blocks of no expert are not written.
        /// [`Plan::max_scale_blocks`](crate::Plan::max_scale_blocks) always suffice, and
        /// [`Padded`](crate::ReceiveLayout::Padded) takes no fewer.
        scales: Tensor<5>,
        /// u32 `[groups]` ([`Plan::groups`](crate::Plan::groups)), written.
        offsets: Tensor<1>,
    },
    /// One byte per scale, `[capacity, hidden / group]`, 4-byte aligned: MX and NV formats in
    /// [`ScaleLayout::RowMajor`](crate::ScaleLayout). f32 `[capacity, hidden / 128]`: blockwise FP8 in rows
    /// that [stay as they came](crate::Config::receive) and in padded blocks.
    RowMajor(Tensor<2>),
}

/// Addresses of scales: 0 for tensors that the format does not have.
#[derive(Clone, Copy, Default)]
pub(crate) struct ScaleAddresses {
    pub(crate) scales: u64,
    pub(crate) offsets: u64,
    /// Blocks of tiled scales.
    pub(crate) blocks: u64,
}

impl ScaleTensor {
    /// The scales of rows by expert in this format, as for a [`FusedSilu`](crate::FusedSilu), in these
    /// tensors. Their sizes and elements are checked by calls.
    ///
    /// # Errors
    /// [`TensorError`] for a tensor of another number of dimensions, and for tiled scales without `offsets`,
    /// which are not looked at in other formats.
    pub fn of(
        format: TokenFormat,
        scales: Option<AnyTensor>,
        offsets: Option<AnyTensor>,
    ) -> Result<Option<Self>, TensorError> {
        let form = ScaleForm::of_format(format);
        let offsets = offsets.filter(|_| scales.is_some() && form == ScaleForm::Tiled);
        Self::in_form(form, scales, offsets)
    }

    /// The scales of this form in these tensors.
    pub(crate) fn in_form(
        form: ScaleForm,
        scales: Option<AnyTensor>,
        offsets: Option<AnyTensor>,
    ) -> Result<Option<Self>, TensorError> {
        let is_tiled = scales.is_some() && form == ScaleForm::Tiled;
        if offsets.is_some() && !is_tiled {
            return Err(TensorError {
                tensor: "scale_offsets",
                wanted: "none, as there are no tiled scales".to_owned(),
                given: "a tensor".to_owned(),
            });
        }
        let Some(given) = scales else {
            return Ok(None);
        };
        Ok(Some(match form {
            ScaleForm::Tiled => Self::Tiled {
                scales: given.of("scales")?,
                offsets: AnyTensor::required("scale_offsets", offsets)?,
            },
            ScaleForm::RowMajor => Self::RowMajor(given.of("scales")?),
            // Without scales, whatever these are is refused by the calls.
            ScaleForm::Transposed { .. } | ScaleForm::TransposedBlocks | ScaleForm::None => {
                Self::Transposed(given.of("scales")?)
            }
        }))
    }

    /// Checks that `given` are the scales of `capacity` rows in `experts` groups, with the format and hidden
    /// size of `shape`, in this form. For a dispatch and for a fused SiLU.
    pub(crate) fn check(
        given: Option<&Self>,
        form: ScaleForm,
        shape: &Shape,
        experts: usize,
        capacity: usize,
    ) -> Result<ScaleAddresses, Error> {
        let (tensor, blocks) = match (given, form) {
            (None, ScaleForm::None) => return Ok(ScaleAddresses::default()),
            (
                Some(Self::Transposed(scales)),
                ScaleForm::Transposed { .. } | ScaleForm::TransposedBlocks,
            )
            | (Some(Self::RowMajor(scales)), ScaleForm::RowMajor) => (scales.view(), 0),
            (Some(Self::Tiled { scales, .. }), ScaleForm::Tiled) => (scales.view(), scales.dims[0]),
            _ => {
                return Err(Error::WrongScales {
                    given: Self::title(given),
                    wanted: form.title(),
                    format: shape.format(),
                });
            }
        };
        form.countable(shape, capacity, blocks)?;
        let wanted = form.layout(shape, experts, capacity, blocks);
        tensor.require("scales", wanted.dims(), wanted.element)?;
        if let ScaleForm::Transposed { multiple } = form
            && !capacity.is_multiple_of(multiple)
        {
            return Err(TensorError {
                tensor: "scales",
                wanted: "a number of rows that is a multiple of 4, as 16 bytes hold".into(),
                given: capacity.to_string(),
            }
            .into());
        }
        let offsets = match given {
            Some(Self::Tiled { offsets, .. }) => {
                offsets.require("scale_offsets", [experts], Element::U32)?;
                offsets.at.address()
            }
            _ => 0,
        };
        Ok(ScaleAddresses {
            scales: tensor.at.address(),
            offsets,
            blocks: blocks as u64,
        })
    }

    /// Name of `scales` in error messages.
    pub(crate) const fn title(scales: Option<&Self>) -> &'static str {
        let form = match scales {
            None => ScaleForm::None,
            Some(Self::Transposed(_)) => ScaleForm::Transposed { multiple: 1 },
            Some(Self::Tiled { .. }) => ScaleForm::Tiled,
            Some(Self::RowMajor(_)) => ScaleForm::RowMajor,
        };
        form.title()
    }
}
