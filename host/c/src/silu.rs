//! The fused SiLU.

use std::ffi::c_void;

use ferry::{Activation, FusedSilu};

use crate::arguments::scales;
use crate::config::format;
use crate::device::{ferry_device, stream_of};
use crate::handle::get;
use crate::status::{Failure, ferry_status, guard};
use crate::structs::{flag, read, sized};
use crate::tensor::ferry_tensor;

/// What is done with gate and up.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ferry_activation {
    /// silu(gate) * up.
    FERRY_SILU = 0,
    /// (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g) with g = min(gate, limit), as gpt-oss has it.
    FERRY_SILU_CLAMPED = 1,
}

/// What a fused SiLU reads and writes. Rows are those of a dispatch: row_offsets is read on the
/// device, and rows from its last entry on are not touched.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ferry_silu {
    /// sizeof(ferry_silu).
    pub size: usize,
    /// FERRY_BF16 [capacity, 2 * columns], 16-byte aligned: gates, then ups.
    pub input: ferry_tensor,
    /// FERRY_U32 [experts + 1]: the first row of each expert, and the end of the last.
    pub row_offsets: ferry_tensor,
    /// FERRY_F32 [experts], NVFP4 only: the global scale of each expert. None: they are 1.
    pub input_scales: ferry_tensor,
    /// [capacity, columns] in the format, 16-byte aligned, written.
    pub output: ferry_tensor,
    /// The rows' scales, written as dispatch writes them.
    pub scales: ferry_tensor,
    /// FERRY_U32 [experts], tiled scales only: as dispatch wrote them, read.
    pub scale_offsets: ferry_tensor,
    /// A ferry_format, not one with row scales.
    pub format: u32,
    /// A ferry_activation.
    pub activation: u32,
    /// Of FERRY_SILU_CLAMPED: steepness of the sigmoid; gpt-oss has 1.702.
    pub alpha: f32,
    /// Of FERRY_SILU_CLAMPED: bound of gate and up, above 0; gpt-oss has 7.
    pub limit: f32,
    /// 1: gates and ups stand side by side instead: gate, up, gate, up.
    pub interleaved: u32,
    /// Most multiprocessors that the kernel takes. 0: all.
    pub max_sms: u32,
}
sized!(ferry_silu, 656);

/// Enqueues a fused SiLU: the activation between the experts' two matrix multiplications, written
/// in any format but those with row scales. Not collective: it needs no round and waits for nobody.
/// Does not synchronise or allocate, and can be captured in a graph.
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
        // SAFETY: the caller's promise.
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
                scales: scales(&self.scales, &self.scale_offsets, format)?,
            })
        }
    }
}
