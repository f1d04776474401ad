//! The fused SiLU.

use ferry::{Activation, FusedSilu, ScaleLayout, ScaleTensor, TokenFormat};
use pyo3::prelude::*;

use crate::communicator::{Communicator, handle};
use crate::errors;
use crate::tensor::{Tensor, optional};

#[pymethods]
impl Communicator {
    /// Enqueues a fused SiLU. `clamp` is `(alpha, limit)`.
    #[expect(clippy::too_many_arguments, reason = "keywords of one Python call")]
    #[pyo3(signature = (
        stream, input, row_offsets, output, *, format, scales=None, scale_offsets=None, input_scales=None,
        interleaved=false, clamp=None, max_sms=None
    ))]
    fn silu(
        &self,
        py: Python<'_>,
        stream: u64,
        input: &Bound<'_, Tensor>,
        row_offsets: &Bound<'_, Tensor>,
        output: &Bound<'_, Tensor>,
        format: &str,
        scales: Option<&Bound<'_, Tensor>>,
        scale_offsets: Option<&Bound<'_, Tensor>>,
        input_scales: Option<&Bound<'_, Tensor>>,
        interleaved: bool,
        clamp: Option<(f32, f32)>,
        max_sms: Option<u32>,
    ) -> PyResult<()> {
        if self.lock()?.is_none() {
            return Err(self.is_closed());
        }
        let format: TokenFormat =
            format
                .parse()
                .map_err(|unknown: ferry::layout::UnknownName| {
                    errors::raise("ArgumentError", unknown.to_string())
                })?;
        let silu = FusedSilu {
            input: input.get().of("input")?,
            interleaved,
            row_offsets: row_offsets.get().of("row_offsets")?,
            activation: match clamp {
                Some((alpha, limit)) => Activation::Clamped { alpha, limit },
                None => Activation::Silu,
            },
            format,
            input_scales: optional(input_scales, "input_scales")?,
            output: output.get().of("output")?,
            scales: scale_tensor(format, scales, scale_offsets)?,
        };
        let device = self.device_of()?;
        let launched = py.detach(|| device.fused_silu(handle(stream), &silu, max_sms));
        launched.map_err(errors::from)
    }
}

/// Returns the scales for a format, or `None` if none are given. Fails if tiled scales come without
/// `offsets`, which are ignored in other layouts. The library refuses scales that the format does not have.
fn scale_tensor(
    format: TokenFormat,
    scales: Option<&Bound<'_, Tensor>>,
    offsets: Option<&Bound<'_, Tensor>>,
) -> PyResult<Option<ScaleTensor>> {
    let Some(scales) = scales.map(|scales| scales.get()) else {
        return Ok(None);
    };
    Ok(Some(match (format.scale_layout(), offsets) {
        (Some(ScaleLayout::Tiled), Some(offsets)) => ScaleTensor::Tiled {
            scales: scales.of("scales")?,
            offsets: offsets.get().of("scale_offsets")?,
        },
        (Some(ScaleLayout::Tiled), None) => {
            return Err(errors::tensor("scale_offsets", "a tensor", "none"));
        }
        (Some(ScaleLayout::RowMajor), _) => ScaleTensor::RowMajor(scales.of("scales")?),
        (None, _) => ScaleTensor::Transposed(scales.of("scales")?),
    }))
}
