//! Fused SiLU.

use std::ffi::c_void;

use ferry::{Activation, FusedSilu, ScaleTensor};

use crate::config::format;
use crate::device::{ferry_device, stream_of};
use crate::handle::get;
use crate::status::{Failure, ferry_status, guard};
use crate::structs::{flag, read, sized};
use crate::tensor::ferry_tensor;

/// Activation applied to gate and up.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ferry_activation {
    /// silu(gate) * up.
    FERRY_SILU = 0,
    /// (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g) with g = min(gate, limit), as in gpt-oss.
    FERRY_SILU_CLAMPED = 1,
}

/// Arguments of ferry_fused_silu. Rows are those of a dispatch: row_offsets is read on the device, and rows
/// from its last entry on are not touched.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ferry_silu {
    /// sizeof(ferry_silu).
    pub size: usize,
    /// FERRY_BF16 [capacity, 2 * columns], 16-byte aligned: gates, then ups.
    pub input: ferry_tensor,
    /// FERRY_U32 [experts + 1]: the first row of each expert, and the end of the last one.
    pub row_offsets: ferry_tensor,
    /// FERRY_F32 [experts], NVFP4 only: the global scale of each expert. None: they are 1.
    pub input_scales: ferry_tensor,
    /// Written: [capacity, columns] in `format`, 16-byte aligned.
    pub output: ferry_tensor,
    /// Written: the rows' scales, in the layout of a dispatch by expert (blockwise FP8: FERRY_F32
    /// [columns / 128, capacity]), whatever the plan's receive layout is. None in BF16.
    pub scales: ferry_tensor,
    /// FERRY_U32 [experts], tiled scales only: read, as dispatch wrote them.
    pub scale_offsets: ferry_tensor,
    /// A ferry_format, not one with row scales.
    pub format: u32,
    /// A ferry_activation.
    pub activation: u32,
    /// Steepness of the sigmoid of FERRY_SILU_CLAMPED; 1.702 in gpt-oss.
    pub alpha: f32,
    /// Bound of gate and up of FERRY_SILU_CLAMPED, above 0; 7 in gpt-oss.
    pub limit: f32,
    /// 1: gates and ups alternate instead: gate, up, gate, up.
    pub interleaved: u32,
    /// Most multiprocessors used by the kernel. 0: all.
    pub max_sms: u32,
}
sized!(ferry_silu, 656);

/// Enqueues a fused SiLU, the activation between the experts' two matrix multiplications, written in any
/// format except those with row scales. Needs no round. Not collective. Does not synchronise or allocate, and
/// can be captured in a graph.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_fused_silu(
    device: *const ferry_device,
    stream: *mut c_void,
    silu: *const ferry_silu,
) -> ferry_status {
    guard("ferry_fused_silu", || {
        // SAFETY: the rule of handles.
        let device = unsafe { get(device, "device")? };
        // SAFETY: the rule of pointers.
        let given = unsafe { read(silu, "silu")? };
        let max_sms = (given.max_sms != 0).then_some(given.max_sms);
        // SAFETY: the rules of memory and streams.
        let (silu, stream) = unsafe { (given.get()?, stream_of(stream)) };
        Ok(device.device.fused_silu(stream, &silu, max_sms)?)
    })
}

impl ferry_silu {
    /// # Safety
    /// The rule of memory.
    unsafe fn get(&self) -> Result<FusedSilu, Failure> {
        const SILU: u32 = ferry_activation::FERRY_SILU as u32;
        const CLAMPED: u32 = ferry_activation::FERRY_SILU_CLAMPED as u32;
        let format = format("silu->format", self.format)?;
        // SAFETY: the rule of memory.
        unsafe {
            Ok(FusedSilu {
                input: self.input.require("input")?,
                interleaved: flag("silu->interleaved", self.interleaved)?,
                row_offsets: self.row_offsets.require("row_offsets")?,
                activation: match self.activation {
                    SILU => Activation::Silu,
                    CLAMPED => Activation::Clamped {
                        alpha: self.alpha,
                        limit: self.limit,
                    },
                    other => {
                        let name = "silu->activation";
                        return Err(Failure::value(name, other, "no ferry_activation"));
                    }
                },
                format,
                input_scales: self.input_scales.get("input_scales")?,
                output: self.output.require("output")?,
                scales: ScaleTensor::of(
                    format,
                    self.scales.any("scales")?,
                    self.scale_offsets.any("scale_offsets")?,
                )?,
            })
        }
    }
}
