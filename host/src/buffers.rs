//! Outputs of dispatch and combine, allocated from a plan.

use std::sync::Arc;

use ferry_layout::{CombineMode, Shape, scale_placement};

use crate::plan::MAX_ROWS;
use crate::scales::countable;
use crate::tensor::bytes_of;
use crate::{
    CombineOutput, CombineTensor, Device, DevicePtr, DispatchOutput, Error, Plan, Problem,
    ScaleTensor, Tensor,
};

/// How much the outputs of a dispatch on one rank hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Rows, those that pad experts included. In blockwise FP8 a multiple of 4.
    pub rows: usize,
    /// Blocks of 128 rows of [tiled scales](ScaleTensor::Tiled). Without effect where scales are not tiled.
    pub scale_blocks: usize,
}

impl Capacity {
    /// Of `rows` rows, and of the most blocks that so many rows can take: each expert begins a block.
    pub const fn of_rows(plan: &Plan, rows: usize) -> Self {
        let blocks = scale_placement::max_blocks(rows as u64, plan.shape().local_experts());
        Self {
            rows,
            scale_blocks: blocks as usize,
        }
    }

    /// What no dispatch exceeds: [`Plan::max_rows`] and [`Plan::max_scale_blocks`].
    pub const fn max(plan: &Plan) -> Self {
        Self {
            rows: plan.max_rows(),
            scale_blocks: plan.max_scale_blocks(),
        }
    }

    fn check(self, shape: &Shape) -> Result<(), Error> {
        let refused = |field, value: usize, rule| {
            let value = value.to_string();
            Err(Error::Capacity(Problem { field, value, rule }))
        };
        let alignment = shape.row_alignment();
        for (field, value) in [("rows", self.rows), ("scale_blocks", self.scale_blocks)] {
            if value as u128 > MAX_ROWS {
                return refused(field, value, format!("it must be at most {MAX_ROWS}"));
            }
        }
        if !self.rows.is_multiple_of(alignment as usize) {
            let rule = format!(
                "it must be a multiple of {alignment} in {:?}",
                shape.format()
            );
            return refused("rows", self.rows, rule);
        }
        countable(shape, self.rows, self.scale_blocks)
    }
}

/// Allocations on one device.
pub(crate) struct Memory {
    device: Arc<dyn Device>,
    at: Vec<DevicePtr>,
}

impl Memory {
    /// Lets `make` allocate; where it fails, gives back what it had.
    fn with<T>(
        device: &Arc<dyn Device>,
        make: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<(T, Self), Error> {
        let mut memory = Self {
            device: device.clone(),
            at: Vec::new(),
        };
        match make(&mut memory) {
            Ok(made) => Ok((made, memory)),
            Err(error) => {
                // SAFETY: the addresses went nowhere.
                if let Err(error) = unsafe { memory.free() } {
                    tracing::warn!(%error, "cannot free a part of some buffers");
                }
                Err(error)
            }
        }
    }

    /// A tensor without gaps, of elements of `bits` bits; not cleared.
    pub(crate) fn tensor<const N: usize>(
        &mut self,
        dims: [usize; N],
        bits: u32,
    ) -> Result<Tensor<N>, Error> {
        // A plan and `Capacity::check` bound the sizes far below this.
        let bytes = bytes_of(dims, bits).unwrap_or(u64::MAX);
        let at = self.device.alloc(bytes)?;
        self.at.push(at);
        Ok(Tensor::contiguous(at, dims))
    }

    fn fill(&self, value: u8) -> Result<(), Error> {
        let mut all = self.at.iter();
        all.try_for_each(|&at| self.device.fill(at, value, at.bytes()))
    }

    /// # Safety
    /// As [`Device::free`], of every allocation.
    unsafe fn free(self) -> Result<(), Error> {
        // SAFETY: this device's `alloc` gave them, and each is freed once, also behind one that
        // cannot be freed. The rest is the caller's promise.
        let freed = self.at.iter().map(|&at| unsafe { self.device.free(at) });
        freed.fold(Ok(()), Result::and)
    }
}

/// The outputs of dispatches of one plan on one rank: every tensor that the plan's format has, in device
/// memory of its own.
///
/// | tensor | shape | bytes |
/// |---|---|---|
/// | `tokens` | `[rows, hidden]` | `rows * hidden * bits / 8` |
/// | `scales`, transposed | `[hidden / 128, rows]` | `4 * rows * hidden / 128` |
/// | `scales`, row-major | `[rows, hidden / group]` | `rows * hidden / group` |
/// | `scales`, tiled | `[scale_blocks, hidden / group / 4, 32, 4, 4]` | `scale_blocks * 128 * hidden / group` |
/// | `offsets` of tiled scales | `[local_experts]` | `4 * local_experts` |
/// | `row_scales` | `[rows]` | `2 * rows` |
/// | `row_offsets` | `[local_experts + 1]` | `4 * (local_experts + 1)` |
/// | `expert_ids` | `[local_experts]` | `4 * local_experts` |
/// | `src_info` | `[rows, 2]` | `8 * rows` |
///
/// `rows` and `scale_blocks` are those of the [`Capacity`]. `bits` is 16 in BF16, 8 in FP8 and MXFP8, 4 in
/// the other formats; `group` is 32 in MX formats, 16 in NVFP4.
///
/// Dropped, the memory stays allocated, as kernels and copies of the addresses may still use it;
/// [`free`](Self::free) gives it back.
///
/// ```
/// use ferry::{Config, DispatchBuffers, ExpertParallel, Group, Plan};
///
/// # fn main() -> Result<(), ferry::Error> {
/// let group = Group::simulated(2, 7)?;
/// let plan = Plan::new(&group, Config::new(4, 2, 8, 3))?;
/// for rank in ExpertParallel::new(&group, &plan)? {
///     let buffers = DispatchBuffers::new(rank.device(), &plan)?;
///     assert_eq!(buffers.output().tokens.dims, [plan.max_rows(), 8]);
///     rank.close()?;
///     // SAFETY: the rank is closed, so no kernel uses them.
///     unsafe { buffers.free()? };
/// }
/// # Ok(())
/// # }
/// ```
pub struct DispatchBuffers {
    memory: Memory,
    output: DispatchOutput,
}

impl DispatchBuffers {
    /// Allocates outputs that are never too small, on the device of a rank of `plan`'s group
    /// ([`ExpertParallel::device`](crate::ExpertParallel::device)). Their bytes are not cleared. Not
    /// collective; synchronises.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity).
    pub fn new(device: &Arc<dyn Device>, plan: &Plan) -> Result<Self, Error> {
        Self::with_capacity(device, plan, Capacity::max(plan))
    }

    /// The same for fewer rows: a dispatch that brings more reports a fault
    /// ([`FaultKind`](crate::FaultKind)). Not collective; synchronises.
    ///
    /// # Errors
    /// [`Error::Capacity`] and [`Error::TooManyScales`] before anything is allocated; what the device
    /// reports, then nothing stays allocated.
    pub fn with_capacity(
        device: &Arc<dyn Device>,
        plan: &Plan,
        capacity: Capacity,
    ) -> Result<Self, Error> {
        let (shape, rows) = (plan.shape(), capacity.rows);
        capacity.check(shape)?;
        let (local, sizes) = (plan.local_experts(), shape.sizes());
        let (output, memory) = Memory::with(device, |memory| {
            Ok(DispatchOutput {
                tokens: memory.tensor([rows, plan.config().hidden], sizes.element_bits)?,
                scales: ScaleTensor::alloc(shape, capacity, memory)?,
                row_scales: match sizes.has_row_scale {
                    true => Some(memory.tensor([rows], 16)?),
                    false => None,
                },
                row_offsets: memory.tensor([local + 1], 32)?,
                expert_ids: memory.tensor([local], 32)?,
                src_info: memory.tensor([rows, 2], 32)?,
            })
        })?;
        Ok(Self { memory, output })
    }

    /// The tensors, for [`ExpertParallel::dispatch`](crate::ExpertParallel::dispatch) and for what reads
    /// them.
    pub const fn output(&self) -> &DispatchOutput {
        &self.output
    }

    /// Each tensor's memory, all of its bytes.
    pub fn memory(&self) -> &[DevicePtr] {
        &self.memory.at
    }

    /// Sets every byte of every tensor, so that what reads padding rows finds `value` there. Not collective;
    /// synchronises, but not with other streams than the device's own.
    ///
    /// # Errors
    /// What the device reports.
    pub fn fill(&self, value: u8) -> Result<(), Error> {
        self.memory.fill(value)
    }

    /// Frees all memory, also behind some that cannot be freed. Not collective; synchronises.
    ///
    /// # Errors
    /// What the device reports, first of all.
    ///
    /// # Safety
    /// Nothing uses the tensors any more: no kernel that is enqueued, no open round, no graph that will be
    /// launched, no copy of an address.
    pub unsafe fn free(self) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.memory.free() }
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
/// Dropped, the memory stays allocated, as kernels and copies of the address may still use it;
/// [`free`](Self::free) gives it back.
pub struct CombineBuffers {
    memory: Memory,
    at: DevicePtr,
    /// `max_tokens_per_rank`.
    most: usize,
    hidden: usize,
    /// Rows of a token, where they are kept apart.
    top_k: Option<usize>,
}

impl CombineBuffers {
    /// Allocates the result of combines that sum: in reduced mode all, in exact mode those with weights. Not
    /// cleared. Not collective; synchronises.
    ///
    /// # Errors
    /// What the device reports.
    pub fn new(device: &Arc<dyn Device>, plan: &Plan) -> Result<Self, Error> {
        Self::with_rows(device, plan, None)
    }

    /// Allocates the result of combines in exact mode without weights, which keep the rows of a token apart.
    /// Not cleared. Not collective; synchronises.
    ///
    /// # Errors
    /// [`Error::ApartInReducedMode`]; what the device reports.
    pub fn apart(device: &Arc<dyn Device>, plan: &Plan) -> Result<Self, Error> {
        match plan.config().combine {
            CombineMode::Reduced => Err(Error::ApartInReducedMode),
            CombineMode::Exact => Self::with_rows(device, plan, Some(plan.config().top_k)),
        }
    }

    fn with_rows(
        device: &Arc<dyn Device>,
        plan: &Plan,
        top_k: Option<usize>,
    ) -> Result<Self, Error> {
        let (most, hidden) = (plan.config().max_tokens_per_rank, plan.config().hidden);
        let dims = [most, top_k.unwrap_or(1), hidden];
        let (all, memory) = Memory::with(device, |memory| memory.tensor(dims, 16))?;
        Ok(Self {
            memory,
            at: all.at,
            most,
            hidden,
            top_k,
        })
    }

    /// The tensor for a round to which this rank brings `tokens` tokens.
    ///
    /// # Errors
    /// [`Error::TooManyTokens`].
    pub fn output(&self, tokens: usize) -> Result<CombineOutput, Error> {
        if tokens > self.most {
            return Err(Error::TooManyTokens {
                given: tokens,
                max: self.most,
            });
        }
        let combined = match self.top_k {
            None => CombineTensor::Summed(Tensor::contiguous(self.at, [tokens, self.hidden])),
            Some(top_k) => {
                CombineTensor::Apart(Tensor::contiguous(self.at, [tokens, top_k, self.hidden]))
            }
        };
        Ok(CombineOutput { combined })
    }

    /// Sets every byte. Not collective; synchronises, but not with other streams than the device's own.
    ///
    /// # Errors
    /// What the device reports.
    pub fn fill(&self, value: u8) -> Result<(), Error> {
        self.memory.fill(value)
    }

    /// Frees the memory. Not collective; synchronises.
    ///
    /// # Errors
    /// What the device reports.
    ///
    /// # Safety
    /// As [`DispatchBuffers::free`].
    pub unsafe fn free(self) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.memory.free() }
    }
}

#[cfg(test)]
#[path = "buffers_tests.rs"]
mod tests;
