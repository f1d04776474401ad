//! Outputs of dispatch and combine, allocated from a plan.

pub(crate) mod allocations;
pub(crate) mod copies;
pub(crate) mod decode;

use std::sync::Arc;

use ferry_layout::OutputElement;

use crate::call::buffers::allocations::Allocations;
use crate::call::{CombineOutput, DispatchOutput};
use crate::device::Device;
use crate::error::{Error, Problem};
use crate::plan::Plan;
use crate::plan::capacity::Capacity;
use crate::tensor::handles::DevicePtr;
use crate::tensor::view::View;

/// The outputs of dispatches of one plan on one rank: every tensor that the plan's format and
/// [receive layout](crate::Config::receive) have, in device memory of its own.
///
/// | tensor | shape | bytes |
/// |---|---|---|
/// | `tokens`, but of a view | `[rows, hidden]` | `rows * hidden * bits / 8` |
/// | `scales`, transposed | `[hidden / 128, rows]` | `4 * rows * hidden / 128` |
/// | `scales`, row-major, but of a view | `[rows, hidden / group]` | `rows * hidden / group` scales |
/// | `scales`, tiled | `[scale_blocks, groups / 4, 32, 4, 4]` | `128 * scale_blocks * groups` |
/// | `offsets` of tiled scales | `[row_groups]` | `4 * row_groups` |
/// | `row_scales`, but of a view | `[rows]` | `2 * rows` |
/// | `row_offsets`, by expert | `[row_groups + 1]` | `4 * (row_groups + 1)` |
/// | `expert_ids`, by expert | `[row_groups]` | `4 * row_groups` |
/// | `src_info` | `[rows, 2]`; with `row_sources` `[rows, 3]` | `8 * rows`; `12 * rows` |
/// | `ids`, not by expert | `[rows, top_k]` | `4 * rows * top_k`; with [`wide_ids`](Capacity::wide_ids) 8 |
/// | `weights`, not by expert | `[rows, top_k]` | `4 * rows * top_k` |
/// | `weights`, with `row_sources` | `[rows, 1]` | `4 * rows` |
/// | `source_counts`, not by expert | `[ranks]` | `4 * ranks` |
/// | `expert_counts`, not by expert | `[local_experts]` | `4 * local_experts` |
/// | `expert_counts`, `row_ends`, aligned or padded | `[row_groups]` | `4 * row_groups` each |
/// | `m_indices`, with `m_indices` | `[rows]` | `4 * rows` |
/// | `source_ranges`, padded | `[local_experts, ranks]` | `8 * local_experts * ranks` |
///
/// `rows` and `scale_blocks` are those of the [`Capacity`], `row_groups` is [`Plan::groups`]. `bits` is 16 in
/// BF16, 8 in FP8 and MXFP8, 4 in the other formats; `group` is 128 in blockwise FP8, 32 in MX formats, 16
/// in NVFP4; `groups` is `hidden / group`. A scale of blockwise FP8 has 4 bytes, any other one.
///
/// A drop leaks the memory, as kernels, graphs and copies of the addresses may still use it;
/// [`free`](Self::free) frees it. Each drop is a warning of `tracing` with the bytes; for a program without a
/// subscriber, the first allocation of buffers after a drop says so on stderr, once a process.
///
/// ```
/// use ferry::{Config, DispatchBuffers, Communicator, Group, Plan};
///
/// # fn main() -> Result<(), ferry::Error> {
/// let group = Group::simulated(2, 7)?;
/// let plan = Plan::new(&group, Config::new(4, 2, 8, 3))?;
/// for rank in Communicator::new(&group, &plan)? {
///     let buffers = DispatchBuffers::new(rank.device(), &plan)?;
///     assert_eq!(buffers.output().tokens.unwrap().dims, [plan.max_rows(), 8]);
///     rank.close()?;
///     // SAFETY: the rank is closed, so no kernel uses them.
///     unsafe { buffers.free()? };
/// }
/// # Ok(())
/// # }
/// ```
pub struct DispatchBuffers {
    pub(crate) memory: Allocations,
    output: DispatchOutput,
    pub(crate) plan: Plan,
    /// Memory of [`upload`](Self::upload).
    pub(crate) inputs: Option<Inputs>,
}

/// Memory for a rank's inputs of a dispatch.
pub(crate) struct Inputs {
    pub(crate) memory: Allocations,
    pub(crate) x: DevicePtr,
    pub(crate) topk_ids: DevicePtr,
    pub(crate) topk_weights: DevicePtr,
}

impl Inputs {
    pub(crate) fn alloc(device: &Arc<dyn Device>, plan: &Plan) -> Result<Self, Error> {
        let config = plan.config();
        let tokens = config.max_tokens_per_rank as u64;
        let slots = tokens * config.top_k as u64;
        let (at, memory) = Allocations::with(device, |memory| {
            let x = memory.alloc(2 * tokens * config.hidden as u64)?;
            // Ids of either type.
            Ok([x, memory.alloc(8 * slots)?, memory.alloc(4 * slots)?])
        })?;
        let [x, topk_ids, topk_weights] = at;
        Ok(Self {
            memory,
            x,
            topk_ids,
            topk_weights,
        })
    }
}

impl DispatchBuffers {
    /// Allocates outputs that are never too small, on the device of a rank of `plan`'s group
    /// ([`Communicator::device`](crate::Communicator::device)). Their bytes are not cleared. Not
    /// collective; synchronizes.
    ///
    /// # Errors
    /// Those of [`with_capacity`](Self::with_capacity).
    pub fn new(device: &Arc<dyn Device>, plan: &Plan) -> Result<Self, Error> {
        Self::with_capacity(device, plan, Capacity::max(plan))
    }

    /// Allocates outputs for fewer rows, [`Capacity::max_distinct`] say. If a dispatch brings more, the first
    /// rows are written and the others count as not routed here, with a fault of the input
    /// ([`FaultKind::OutputTooSmall`](crate::FaultKind)). Not collective; synchronizes.
    ///
    /// # Errors
    /// [`Error::Capacity`], also if the outputs take more than the device's free memory, and
    /// [`Error::TooManyScales`], before anything is allocated; errors of the device, after which nothing
    /// stays allocated.
    pub fn with_capacity(
        device: &Arc<dyn Device>,
        plan: &Plan,
        capacity: Capacity,
    ) -> Result<Self, Error> {
        let layout = plan.output_layout(capacity)?;
        let needed = layout.iter().map(|tensor| tensor.bytes).sum();
        require_memory(&**device, plan, capacity, needed)?;
        let (output, memory) = Allocations::with(device, |memory| {
            for tensor in &layout {
                memory.alloc(tensor.bytes)?;
            }
            DispatchOutput::from_addresses(plan, capacity, memory.at())
        })?;
        Ok(Self {
            memory,
            output,
            plan: *plan,
            inputs: None,
        })
    }

    /// The tensors, for [`Communicator::dispatch`](crate::Communicator::dispatch) and for their readers.
    pub const fn output(&self) -> &DispatchOutput {
        &self.output
    }

    /// Each tensor's memory, all of its bytes.
    pub fn memory(&self) -> &[DevicePtr] {
        self.memory.at()
    }

    /// Sets every byte of every output, so that what reads padding rows finds `value` there. Not collective;
    /// synchronizes, but not with other streams than the device's own.
    ///
    /// # Errors
    /// What the device reports.
    pub fn fill(&self, value: u8) -> Result<(), Error> {
        self.memory.fill(value)
    }

    /// Frees all memory, including that of [`upload`](Self::upload), and goes on after an error. Not
    /// collective; synchronizes.
    ///
    /// # Errors
    /// The first error of the device.
    ///
    /// # Safety
    /// Nothing uses the tensors any more: no enqueued kernel, no open round, no graph that will be
    /// launched, no copy of an address. After [`close`](crate::Communicator::close) has returned `Ok`, no
    /// kernel of that communicator does.
    pub unsafe fn free(self) -> Result<(), Error> {
        let inputs = self.inputs.map(|inputs| inputs.memory);
        // SAFETY: nothing uses the tensors any more: documented on this function.
        unsafe {
            self.memory
                .free()
                .and(inputs.map_or(Ok(()), |of| of.free()))
        }
    }
}

/// Refuses outputs of `needed` bytes that the device has no memory for.
fn require_memory(
    device: &dyn Device,
    plan: &Plan,
    capacity: Capacity,
    needed: u64,
) -> Result<(), Error> {
    match device.free_memory()? {
        Some(free) if free < needed => Err(Error::Capacity(Problem {
            field: "rows",
            value: capacity.rows.to_string(),
            rule: format!(
                "the outputs take {needed} bytes (receive {}, format {}), and {} has {free} bytes free",
                plan.config().receive,
                plan.config().format,
                device.name()
            ),
        })),
        _ => Ok(()),
    }
}

/// The result of combines of one plan on one rank, in device memory of its own: BF16, for up to
/// `max_tokens_per_rank` tokens.
///
/// | made by | shape | bytes |
/// |---|---|---|
/// | [`new`](Self::new) | `[tokens, hidden]` | `2 * max_tokens_per_rank * hidden` |
/// | [`apart`](Self::apart) | `[tokens, top_k, hidden]` | `2 * max_tokens_per_rank * top_k * hidden` |
///
/// With [`combine_weights`](crate::KeptRows::combine_weights) also f32 weights `[tokens, top_k]`, of
/// `4 * max_tokens_per_rank * top_k` bytes.
///
/// A drop leaks the memory, as that of [`DispatchBuffers`]; [`free`](Self::free) frees it.
pub struct CombineBuffers {
    pub(crate) memory: Allocations,
    /// Memory of [`upload`](Self::upload).
    pub(crate) expert_rows: Option<Allocations>,
    /// Earlier memory of [`upload`](Self::upload) that was too small for a later call.
    pub(crate) outgrown: Vec<Allocations>,
    pub(crate) plan: Plan,
    element: OutputElement,
    /// Whether the rows of a token are kept apart.
    is_apart: bool,
}

impl CombineBuffers {
    /// Allocates the result of combines that sum: in reduced mode all, in exact mode those with weights. Not
    /// cleared. Not collective; synchronizes.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn new(device: &Arc<dyn Device>, plan: &Plan) -> Result<Self, Error> {
        Self::with_rows(device, plan, false, OutputElement::Bf16)
    }

    /// [`new`](Self::new) with other elements: `element.bits() / 8` bytes each. Not cleared. Not
    /// collective; synchronizes.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn with_element(
        device: &Arc<dyn Device>,
        plan: &Plan,
        element: OutputElement,
    ) -> Result<Self, Error> {
        Self::with_rows(device, plan, false, element)
    }

    /// Allocates the result of combines in exact mode without weights, which keep the rows of a token apart.
    /// Not cleared. Not collective; synchronizes.
    ///
    /// # Errors
    /// [`Error::ApartInReducedMode`]; errors of the device.
    pub fn apart(device: &Arc<dyn Device>, plan: &Plan) -> Result<Self, Error> {
        Self::with_rows(device, plan, true, OutputElement::Bf16)
    }

    fn with_rows(
        device: &Arc<dyn Device>,
        plan: &Plan,
        is_apart: bool,
        element: OutputElement,
    ) -> Result<Self, Error> {
        let largest = plan.result(plan.config().max_tokens_per_rank, element, is_apart)?;
        let ((), memory) = Allocations::with(device, |memory| {
            let mut tensors = largest.views().into_iter().flatten();
            tensors.try_for_each(|tensor| memory.alloc(tensor.span()).map(drop))
        })?;
        Ok(Self {
            memory,
            expert_rows: None,
            outgrown: Vec::new(),
            plan: *plan,
            element,
            is_apart,
        })
    }

    /// The tensor for a round to which this rank brings `tokens` tokens.
    ///
    /// # Errors
    /// [`Error::TooManyTokens`].
    pub fn output(&self, tokens: usize) -> Result<CombineOutput, Error> {
        let output = self.plan.result(tokens, self.element, self.is_apart)?;
        let mut memory = self.memory.at().iter();
        let placed = output.views().map(|tensor| {
            let (tensor, &at) = tensor.zip(memory.next())?;
            Some(View { at, ..tensor }.into())
        });
        Ok(CombineOutput::of(placed)?)
    }

    /// Sets every byte of the result. Not collective; synchronizes, but only with the device's own stream.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn fill(&self, value: u8) -> Result<(), Error> {
        self.memory.fill(value)
    }

    /// Frees the memory, including that of [`upload`](Self::upload). Not collective; synchronizes.
    ///
    /// # Errors
    /// Errors of the device.
    ///
    /// # Safety
    /// As [`DispatchBuffers::free`].
    pub unsafe fn free(self) -> Result<(), Error> {
        let copies = self.expert_rows.into_iter().chain(self.outgrown);
        // SAFETY: nothing uses the tensors any more: documented on this function.
        let freed = copies.map(|memory| unsafe { memory.free() });
        // SAFETY: as above.
        unsafe { self.memory.free() }.and(freed.fold(Ok(()), Result::and))
    }
}

#[cfg(test)]
#[path = "buffers_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "rows_tests.rs"]
mod rows_tests;
