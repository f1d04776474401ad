//! Outputs that Ferry allocates.

use ferry::layout::OutputElement;
use ferry::{CombineBuffers, DispatchBuffers, Plan};

use crate::arguments::{ferry_combine_output, ferry_dispatch_output};
use crate::config::output_element;
use crate::device::ferry_device;
use crate::handle::{Opaque, get, put, require_place, take};
use crate::plan::{ferry_capacity, ferry_plan};
use crate::status::{Failure, ferry_status, guard};
use crate::structs::{flag, write};

/// The outputs of dispatches of one plan on one rank, in device memory of their own. Any thread may use it.
pub struct ferry_dispatch_buffers(());

impl Opaque for ferry_dispatch_buffers {
    type Value = OfPlan<DispatchBuffers>;
    const NAME: &'static str = "ferry_dispatch_buffers";
    const MAGIC: u64 = u64::from_le_bytes(*b"ferry/db");
}

/// The result of combines of one plan on one rank, in device memory of its own. Any thread may use it.
pub struct ferry_combine_buffers(());

impl Opaque for ferry_combine_buffers {
    type Value = OfPlan<CombineBuffers>;
    const NAME: &'static str = "ferry_combine_buffers";
    const MAGIC: u64 = u64::from_le_bytes(*b"ferry/cb");
}

/// Buffers, and the plan that their types follow from.
pub(crate) struct OfPlan<B> {
    buffers: B,
    plan: Plan,
}

/// Allocates outputs on the device of a rank of the plan's group, for `capacity` (NULL: of
/// max_rows). Not cleared. Not collective. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch_buffers_new(
    device: *const ferry_device,
    plan: *const ferry_plan,
    capacity: *const ferry_capacity,
    buffers: *mut *mut ferry_dispatch_buffers,
) -> ferry_status {
    guard("ferry_dispatch_buffers_new", || {
        // SAFETY: the rule of pointers.
        unsafe { require_place(buffers, "buffers", 1)? };
        // SAFETY: the rule of handles.
        let device = unsafe { get(device, "device")? };
        // SAFETY: the rule of handles.
        let plan = *unsafe { get(plan, "plan")? };
        // SAFETY: the rule of pointers.
        let capacity = unsafe { ferry_capacity::get(capacity, &plan)? };
        let made = DispatchBuffers::with_capacity(&device.device, &plan, capacity)?;
        // SAFETY: checked above.
        unsafe {
            put(
                buffers,
                OfPlan {
                    buffers: made,
                    plan,
                },
            )
        };
        Ok(())
    })
}

/// Fills `output`, whose size is set, with the tensors, for ferry_dispatch and for what reads them.
/// Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch_buffers_output(
    buffers: *const ferry_dispatch_buffers,
    output: *mut ferry_dispatch_output,
) -> ferry_status {
    guard("ferry_dispatch_buffers_output", || {
        // SAFETY: the rule of handles.
        let OfPlan { buffers, .. } = unsafe { get(buffers, "buffers")? };
        let tensors = ferry_dispatch_output::of(buffers.output());
        // SAFETY: the rule of pointers.
        unsafe { write(output, "output", tensors) }
    })
}

/// Sets every byte of every tensor to `value`, so that what reads padding rows finds it there. Not
/// collective. Synchronises, but not with other streams than the device's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch_buffers_fill(
    buffers: *const ferry_dispatch_buffers,
    value: u8,
) -> ferry_status {
    guard("ferry_dispatch_buffers_fill", || {
        // SAFETY: the rule of handles.
        Ok(unsafe { get(buffers, "buffers")? }.buffers.fill(value)?)
    })
}

/// Frees the memory, and sets `*buffers` to NULL. Nothing uses the tensors any more: no kernel that
/// is enqueued, no open round, no graph that will be launched. Not collective. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch_buffers_free(
    buffers: *mut *mut ferry_dispatch_buffers,
) -> ferry_status {
    guard("ferry_dispatch_buffers_free", || {
        // SAFETY: the rules of pointers and handles.
        let taken = unsafe { take(buffers, "*buffers")? };
        // SAFETY: the caller says that nothing uses the tensors.
        Ok(unsafe { taken.buffers.free() }?)
    })
}

/// Allocates the result of combines of up to max_tokens_per_rank tokens. `type` is FERRY_BF16, or
/// with options FERRY_F16 or FERRY_F32; `apart` is 1 for combines in exact mode without weights,
/// which keep the rows of a token apart, in FERRY_BF16, else 0. Not cleared. Not collective.
/// Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_combine_buffers_new(
    device: *const ferry_device,
    plan: *const ferry_plan,
    r#type: u32,
    apart: u32,
    buffers: *mut *mut ferry_combine_buffers,
) -> ferry_status {
    guard("ferry_combine_buffers_new", || {
        // SAFETY: the rule of pointers.
        unsafe { require_place(buffers, "buffers", 1)? };
        // SAFETY: the rule of handles.
        let device = &unsafe { get(device, "device")? }.device;
        // SAFETY: the rule of handles.
        let plan = *unsafe { get(plan, "plan")? };
        let element = output_element("type", r#type)?;
        let made = match (flag("apart", apart)?, element) {
            (false, element) => CombineBuffers::with_element(device, &plan, element)?,
            (true, OutputElement::Bf16) => CombineBuffers::apart(device, &plan)?,
            (true, _) => {
                let rule = "rows that are kept apart are FERRY_BF16";
                return Err(Failure::value("type", r#type, rule));
            }
        };
        // SAFETY: checked above.
        unsafe {
            put(
                buffers,
                OfPlan {
                    buffers: made,
                    plan,
                },
            )
        };
        Ok(())
    })
}

/// Fills `output`, whose size is set, for a round to which this rank brings `tokens` tokens. Not
/// collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_combine_buffers_output(
    buffers: *const ferry_combine_buffers,
    tokens: u64,
    output: *mut ferry_combine_output,
) -> ferry_status {
    guard("ferry_combine_buffers_output", || {
        // SAFETY: the rule of handles.
        let OfPlan { buffers, plan } = unsafe { get(buffers, "buffers")? };
        let tokens = crate::plan::require_tokens(plan, tokens)?;
        let tensor = ferry_combine_output::of(&buffers.output(tokens)?);
        // SAFETY: the rule of pointers.
        unsafe { write(output, "output", tensor) }
    })
}

/// Sets every byte to `value`. Not collective. Synchronises, but not with other streams than the
/// device's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_combine_buffers_fill(
    buffers: *const ferry_combine_buffers,
    value: u8,
) -> ferry_status {
    guard("ferry_combine_buffers_fill", || {
        // SAFETY: the rule of handles.
        Ok(unsafe { get(buffers, "buffers")? }.buffers.fill(value)?)
    })
}

/// Frees the memory, and sets `*buffers` to NULL, as ferry_dispatch_buffers_free. Not collective.
/// Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_combine_buffers_free(
    buffers: *mut *mut ferry_combine_buffers,
) -> ferry_status {
    guard("ferry_combine_buffers_free", || {
        // SAFETY: the rules of pointers and handles.
        let taken = unsafe { take(buffers, "*buffers")? };
        // SAFETY: the caller says that nothing uses the tensor.
        Ok(unsafe { taken.buffers.free() }?)
    })
}
