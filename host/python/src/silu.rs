//! The fused SiLU.

use ferry::{Activation, AnyTensor, FusedSilu, ScaleTensor, TokenFormat};
use pyo3::prelude::*;

use crate::communicator::{Communicator, handle};
use crate::errors;
use crate::tensor::{Tensor, any};

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
            input_scales: AnyTensor::optional("input_scales", any(input_scales, "input_scales")?)
                .map_err(errors::from_any)?,
            output: output.get().of("output")?,
            scales: ScaleTensor::of(
                format,
                any(scales, "scales")?,
                any(scale_offsets, "scale_offsets")?,
            )
            .map_err(errors::from_any)?,
        };
        let device = self.device_of()?;
        let launched = py.detach(|| device.fused_silu(handle(stream), &silu, max_sms));
        launched.map_err(errors::from)
    }
}
