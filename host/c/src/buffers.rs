//! Outputs allocated by Ferry.

use ferry::layout::OutputElement;
use ferry::{CombineBuffers, DispatchBuffers};

use crate::arguments::{ferry_combine_output, ferry_dispatch_output};
use crate::config::output_element;
use crate::device::ferry_device;
use crate::handle::{Opaque, get, make, take};
use crate::plan::{ferry_capacity, ferry_plan};
use crate::status::{Failure, ferry_status, guard};
use crate::structs::{flag, write};
use crate::tensor::shown;

/// Outputs for dispatches of one plan on one rank, in device memory of their own. Any thread may use them.
pub struct ferry_dispatch_buffers(());

impl Opaque for ferry_dispatch_buffers {
    type Value = DispatchBuffers;
    const NAME: &'static str = "ferry_dispatch_buffers";
    const MAGIC: u64 = u64::from_le_bytes(*b"ferry/db");
}

/// Output for combines of one plan on one rank, in device memory of its own. Any thread may use it.
pub struct ferry_combine_buffers(());

impl Opaque for ferry_combine_buffers {
    type Value = CombineBuffers;
    const NAME: &'static str = "ferry_combine_buffers";
    const MAGIC: u64 = u64::from_le_bytes(*b"ferry/cb");
}

/// Allocates outputs of `capacity` (NULL: max_rows) on `device`, that of a rank of the plan's group. Not
/// cleared. Not collective. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch_buffers_new(
    device: *const ferry_device,
    plan: *const ferry_plan,
    capacity: *const ferry_capacity,
    buffers: *mut *mut ferry_dispatch_buffers,
) -> ferry_status {
    guard("ferry_dispatch_buffers_new", || {
        // SAFETY: the rules of pointers and handles.
        unsafe {
            make(buffers, "buffers", || {
                let device = &get(device, "device")?.device;
                let plan = get(plan, "plan")?;
                let capacity = ferry_capacity::get(capacity, plan)?;
                Ok(DispatchBuffers::with_capacity(device, plan, capacity)?)
            })
        }
    })
}

/// Writes the buffers' tensors to `output`, for ferry_dispatch and for the experts. Set output->size first.
/// Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch_buffers_output(
    buffers: *const ferry_dispatch_buffers,
    output: *mut ferry_dispatch_output,
) -> ferry_status {
    guard("ferry_dispatch_buffers_output", || {
        // SAFETY: the rule of handles.
        let buffers = unsafe { get(buffers, "buffers")? };
        let tensors = buffers.output().tensors();
        let tensors = ferry_dispatch_output::of(tensors.map(|of| of.as_ref().map(shown)));
        // SAFETY: the rule of pointers.
        unsafe { write(output, "output", tensors) }
    })
}

/// Sets every byte of every tensor to `value`, so that padding rows are defined. Not collective.
/// Synchronises the device's own stream only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch_buffers_fill(
    buffers: *const ferry_dispatch_buffers,
    value: u8,
) -> ferry_status {
    guard("ferry_dispatch_buffers_fill", || {
        // SAFETY: the rule of handles.
        Ok(unsafe { get(buffers, "buffers")? }.fill(value)?)
    })
}

/// Frees the memory and sets `*buffers` to NULL. The tensors must be unused: no enqueued kernel, no open
/// round, and no graph that will be launched may name them. Not collective. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch_buffers_free(
    buffers: *mut *mut ferry_dispatch_buffers,
) -> ferry_status {
    guard("ferry_dispatch_buffers_free", || {
        // SAFETY: the rules of pointers and handles.
        let taken = unsafe { take(buffers, "*buffers")? };
        // SAFETY: nothing uses the tensors any more: documented on this function.
        Ok(unsafe { taken.free() }?)
    })
}

/// Allocates the output of combines of up to max_tokens_per_rank tokens. `type` is FERRY_BF16, or with
/// options FERRY_F16 or FERRY_F32. `apart` is 1 for combines in exact mode without weights, which do not
/// sum the rows of a token (`type` is FERRY_BF16 then), else 0. Not cleared. Not collective. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_combine_buffers_new(
    device: *const ferry_device,
    plan: *const ferry_plan,
    r#type: u32,
    apart: u32,
    buffers: *mut *mut ferry_combine_buffers,
) -> ferry_status {
    guard("ferry_combine_buffers_new", || {
        // SAFETY: the rules of pointers and handles.
        unsafe {
            make(buffers, "buffers", || {
                let device = &get(device, "device")?.device;
                let plan = get(plan, "plan")?;
                match (flag("apart", apart)?, output_element("type", r#type)?) {
                    (false, element) => Ok(CombineBuffers::with_element(device, plan, element)?),
                    (true, OutputElement::Bf16) => Ok(CombineBuffers::apart(device, plan)?),
                    (true, _) => {
                        let rule = "rows that are kept apart are FERRY_BF16";
                        Err(Failure::value("type", r#type, rule))
                    }
                }
            })
        }
    })
}

/// Fills `output`, whose size is set, for a round with `tokens` tokens of this rank. Not collective. Does
/// not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_combine_buffers_output(
    buffers: *const ferry_combine_buffers,
    tokens: u64,
    output: *mut ferry_combine_output,
) -> ferry_status {
    guard("ferry_combine_buffers_output", || {
        // SAFETY: the rule of handles.
        let buffers = unsafe { get(buffers, "buffers")? };
        let tokens = usize::try_from(tokens).unwrap_or(usize::MAX);
        let tensor = ferry_combine_output::of(&buffers.output(tokens)?);
        // SAFETY: the rule of pointers.
        unsafe { write(output, "output", tensor) }
    })
}

/// Sets every byte to `value`. Not collective. Synchronises the device's own stream only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_combine_buffers_fill(
    buffers: *const ferry_combine_buffers,
    value: u8,
) -> ferry_status {
    guard("ferry_combine_buffers_fill", || {
        // SAFETY: the rule of handles.
        Ok(unsafe { get(buffers, "buffers")? }.fill(value)?)
    })
}

/// Frees the memory and sets `*buffers` to NULL, under the conditions of ferry_dispatch_buffers_free. Not
/// collective. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_combine_buffers_free(
    buffers: *mut *mut ferry_combine_buffers,
) -> ferry_status {
    guard("ferry_combine_buffers_free", || {
        // SAFETY: the rules of pointers and handles.
        let taken = unsafe { take(buffers, "*buffers")? };
        // SAFETY: nothing uses the tensor any more: documented on this function.
        Ok(unsafe { taken.free() }?)
    })
}
