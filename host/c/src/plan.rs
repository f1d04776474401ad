//! Plans, and the sizes of outputs.

use std::convert::Infallible;

use ferry::{Capacity, Plan, Rank};

use crate::arguments::{ferry_combine_output, ferry_dispatch_output};
use crate::config::{ferry_config, output_element};
use crate::group::ferry_group;
use crate::handle::{Opaque, get, make, store, take};
use crate::status::{Failure, ferry_status, guard};
use crate::structs::{flag, read, require_room, sized, write};
use crate::tensor::ferry_tensor;

/// A checked configuration. Any thread may use it.
pub struct ferry_plan(());

impl Opaque for ferry_plan {
    type Value = Plan;
    const NAME: &'static str = "ferry_plan";
    const MAGIC: u64 = u64::from_le_bytes(*b"ferry/pl");
}

/// Sizes of a plan, for each rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferry_plan_info {
    /// sizeof(ferry_plan_info).
    pub size: usize,
    /// Number of ranks in the group.
    pub ranks: u64,
    /// Number of experts on each rank.
    pub local_experts: u64,
    /// Groups of rows in a dispatch's outputs: one for each local expert, after one for the shared expert.
    pub groups: u64,
    /// Most rows that one rank can receive in a dispatch: outputs of this capacity are never too small.
    pub max_rows: u64,
    /// Most blocks of 128 rows of tiled scales.
    pub max_scale_blocks: u64,
    /// Bytes of each rank's receive window.
    pub window_bytes: u64,
    /// Bytes of each rank's private workspace.
    pub workspace_bytes: u64,
    /// Same as max_rows if the experts of each token differ, as in a top-k: never above max_rows, and half of
    /// it for top-8 of 256 experts on 64 ranks. If a token names an expert twice, more rows can come; those
    /// beyond the outputs are left out, an input fault (FERRY_FAULT_OUTPUT_TOO_SMALL).
    pub max_rows_distinct: u64,
    /// Same as max_scale_blocks if the experts of each token differ.
    pub max_scale_blocks_distinct: u64,
    /// Most multiprocessors used by a kernel of this process's ranks: the configuration's max_sms or, if
    /// ranks share a GPU and it is less, the smallest part of the GPU that one of them has. 0: all.
    pub max_sms: u64,
    /// Bytes from one row of a view to the next, a multiple of 128.
    pub view_row_stride: u64,
    /// Number of which the rows of outputs, and the first row of each group, are a multiple:
    /// expert_alignment, in blockwise FP8 at least 4; 1 if rows are not received by expert.
    pub row_alignment: u64,
}
sized!(ferry_plan_info, 64);

/// Capacity of the outputs of a dispatch. All zeros: the most that a dispatch can need.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferry_capacity {
    /// sizeof(ferry_capacity).
    pub size: usize,
    /// Rows, including those of a shared expert and padding rows; by expert a multiple of
    /// ferry_plan_info.row_alignment. Must hold at least the shared expert's rows (FERRY_INVALID_ARGUMENT).
    /// View, strided, padded: exactly max_rows; compact: any number. 0: max_rows of the plan.
    pub rows: u64,
    /// Blocks of 128 rows of tiled scales. 0: the most that so many rows can need.
    pub scale_blocks: u64,
    /// 1: received ids are FERRY_I64, as topk_ids must then be. Without effect by expert.
    pub wide_ids: u32,
    /// 0.
    pub reserved: u32,
}
sized!(ferry_capacity, 24);

impl ferry_capacity {
    /// Reads a capacity; the plan's maximum if the pointer is null.
    ///
    /// # Safety
    /// The rule of pointers.
    pub(crate) unsafe fn get(at: *const Self, plan: &Plan) -> Result<Capacity, Failure> {
        if at.is_null() {
            return Ok(Capacity::max(plan));
        }
        // SAFETY: the rule of pointers.
        let given = unsafe { read(at, "capacity")? };
        let number = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        let mut capacity = match given.rows {
            0 => Capacity::max(plan),
            rows => Capacity::of_rows(plan, number(rows)),
        };
        if given.scale_blocks != 0 {
            capacity.scale_blocks = number(given.scale_blocks);
        }
        capacity.wide_ids = flag("capacity->wide_ids", given.wide_ids)?;
        if given.reserved != 0 {
            return Err(Failure::value(
                "capacity->reserved",
                given.reserved,
                "it must be 0",
            ));
        }
        Ok(capacity)
    }
}

/// Checks a configuration for a group and makes a plan of it. The text of FERRY_INVALID_CONFIG lists every
/// problem. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_plan_new(
    group: *const ferry_group,
    config: *const ferry_config,
    plan: *mut *mut ferry_plan,
) -> ferry_status {
    guard("ferry_plan_new", || {
        // SAFETY: the rules of pointers and handles.
        unsafe {
            make(plan, "plan", || {
                let group = get(group, "group")?;
                let (config, receive) = read(config, "config")?.get()?;
                Ok(Plan::with_fields(group, config, receive)?)
            })
        }
    })
}

/// Frees a plan and sets `*plan` to NULL. Communicators and buffers made with it stay. Not collective. Does
/// not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_plan_free(plan: *mut *mut ferry_plan) -> ferry_status {
    guard("ferry_plan_free", || {
        // SAFETY: the rules of pointers and handles.
        unsafe { take(plan, "*plan") }.map(drop)
    })
}

/// Fills `info`, whose size is set, with the sizes of a plan. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_plan_query(
    plan: *const ferry_plan,
    info: *mut ferry_plan_info,
) -> ferry_status {
    guard("ferry_plan_query", || {
        // SAFETY: the rule of handles.
        let plan = unsafe { get(plan, "plan")? };
        let known = ferry_plan_info {
            size: 0,
            ranks: plan.ranks().into(),
            local_experts: plan.local_experts() as u64,
            groups: plan.groups() as u64,
            max_rows: plan.max_rows() as u64,
            max_scale_blocks: plan.max_scale_blocks() as u64,
            window_bytes: plan.window_bytes(),
            workspace_bytes: plan.workspace_bytes(),
            max_rows_distinct: plan.max_rows_distinct() as u64,
            max_scale_blocks_distinct: plan.max_scale_blocks_distinct() as u64,
            max_sms: plan.max_sms().unwrap_or(0).into(),
            view_row_stride: plan.view_row_stride(),
            row_alignment: plan.row_alignment().into(),
        };
        // SAFETY: the rule of pointers.
        unsafe { write(info, "info", known) }
    })
}

/// Stores which of `tokens` tokens go to the shared expert on `rank`: `count` tokens from `start` on, the
/// first rows of dispatch's outputs. `count` is 0 without a shared expert. Not collective. Does not
/// synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_plan_shared_tokens(
    plan: *const ferry_plan,
    rank: u32,
    tokens: u64,
    start: *mut u64,
    count: *mut u64,
) -> ferry_status {
    guard("ferry_plan_shared_tokens", || {
        // SAFETY: the rule of handles.
        let plan = unsafe { get(plan, "plan")? };
        if rank >= plan.ranks() {
            let rule = format!("the plan is for {} ranks", plan.ranks());
            return Err(Failure::value("rank", rank, &rule));
        }
        let tokens = require_tokens(plan, tokens)?;
        let shared = plan.shared_tokens(Rank(rank), tokens);
        // SAFETY: the rule of pointers.
        unsafe { store(start, "start", shared.start as u64)? };
        // SAFETY: the rule of pointers.
        unsafe { store(count, "count", shared.len() as u64) }
    })
}

fn require_tokens(plan: &Plan, tokens: u64) -> Result<usize, Failure> {
    let most = plan.config().max_tokens_per_rank;
    match usize::try_from(tokens) {
        Ok(tokens) if tokens <= most => Ok(tokens),
        _ => {
            let rule = format!("the plan's max_tokens_per_rank is {most}");
            Err(Failure::value("tokens", tokens, &rule))
        }
    }
}

/// Fills `output`, whose size is set, with the shape, type and bytes of each tensor that a dispatch of the
/// plan writes, for outputs of `capacity` (NULL: max_rows). Addresses are 0: for each tensor whose ndim is
/// not 0, allocate its bytes and set its address. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_plan_dispatch_layout(
    plan: *const ferry_plan,
    capacity: *const ferry_capacity,
    output: *mut ferry_dispatch_output,
) -> ferry_status {
    guard("ferry_plan_dispatch_layout", || {
        // SAFETY: the rule of handles.
        let plan = unsafe { get(plan, "plan")? };
        // SAFETY: the rule of pointers.
        unsafe { require_room(output, "output")? };
        // SAFETY: the rule of pointers.
        let capacity = unsafe { ferry_capacity::get(capacity, plan)? };
        let layout = plan.output_layout(capacity)?;
        let mut layout = layout.iter().map(ferry_tensor::planned);
        let Ok(planned) = plan.each_output(|_| Ok::<_, Infallible>(layout.next()));
        let planned = planned.map(Option::flatten);
        // SAFETY: the rule of pointers.
        unsafe { write(output, "output", ferry_dispatch_output::of(planned)) }
    })
}

/// Fills `output`, whose size is set, with the shape, type and bytes of the tensors that a combine of
/// `tokens` tokens of the plan writes. `type` is the type of sums: FERRY_BF16, or with options FERRY_F16 or
/// FERRY_F32. `apart` is 1 for a combine in exact mode without weights, which does not sum the rows of a
/// token, else 0. Addresses are 0. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_plan_combine_layout(
    plan: *const ferry_plan,
    tokens: u64,
    r#type: u32,
    apart: u32,
    output: *mut ferry_combine_output,
) -> ferry_status {
    guard("ferry_plan_combine_layout", || {
        // SAFETY: the rule of handles.
        let plan = unsafe { get(plan, "plan")? };
        let tokens = usize::try_from(tokens).unwrap_or(usize::MAX);
        let element = output_element("type", r#type)?;
        let planned = plan.result(tokens, element, flag("apart", apart)?)?;
        // SAFETY: the rule of pointers.
        unsafe { write(output, "output", ferry_combine_output::of(&planned)) }
    })
}
