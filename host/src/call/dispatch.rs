//! The kernels' arguments of a dispatch.

use bytemuck::Zeroable;
use ferry_layout::{
    Common, DispatchArgs, DispatchOptions, DispatchWith, EncodedInput, GroupTables, ReceivedRows,
    scale_placement,
};

use super::{DispatchInput, DispatchOutput, address_or_none};
use crate::call::arguments::{self, Sizes};
use crate::call::scales::{ScaleAddresses, ScaleTensor};
use crate::error::{Error, Problem, TensorError};
use crate::plan::Plan;
use crate::plan::capacity::Capacity;
use crate::plan::scale_form::ScaleForm;
use crate::tensor::Tensor;
use crate::tensor::data_type::DataType;
use crate::tensor::view::Element;

impl DispatchInput {
    /// The inputs that the wait of a split dispatch needs.
    pub(crate) fn sent(&self, with: &DispatchWith) -> Sent {
        Sent {
            input: *self,
            encoded: with.options.encoded,
        }
    }

    /// Bytes from one row of `x` to the next.
    const fn x_stride(&self) -> u64 {
        // For a single row it may be any number.
        (self.x.strides[0] as u64).wrapping_mul(self.x.data_type.bits() as u64) / 8
    }

    /// The kernels' arguments without outputs.
    pub(crate) fn args(&self, common: &Common, plan: &Plan) -> Result<DispatchWith, Error> {
        let config = plan.config();
        let tokens = self.x.dims[0];
        if tokens > config.max_tokens_per_rank {
            return Err(Error::TooManyTokens {
                given: tokens,
                max: config.max_tokens_per_rank,
            });
        }
        let dims = [tokens, config.hidden];
        let encoded = self.encoded(config.format, dims)?;
        self.require_scales_of_codes(config.format)?;
        self.x
            .require_rows("x", dims, self.element(config.format))?;
        self.require_ids(plan)?;
        let sizes = Sizes { tokens, rows: 0 };
        let tensors = self.views();
        arguments::check(Self::ARGUMENTS, &tensors, plan, sizes)?;
        self.require_kept_ids_apart(&tensors)?;
        Ok(DispatchWith {
            args: DispatchArgs {
                x: self.x.at.address(),
                x_stride: self.x_stride(),
                topk_ids: self.topk_ids.at.address(),
                topk_weights: address_or_none(self.topk_weights),
                input_scale: address_or_none(self.input_scale),
                ..args_of(&with_kept(common, self.kept_ids), tokens)
            },
            options: DispatchOptions {
                encoded,
                ..self.options(plan)
            },
        })
    }

    /// Checks the ids of experts, in either type.
    pub(super) fn require_ids(&self, plan: &Plan) -> Result<(), TensorError> {
        let given = self.topk_ids.data_type;
        let element = match given {
            DataType::I64 if plan.takes_options() => DataType::I64,
            _ => DataType::I32,
        };
        if !element.takes(given) {
            let wanted = match (plan.takes_options(), given) {
                (true, _) => "elements of i32 or i64",
                (false, DataType::I64) => {
                    "elements of i32, as the plan's options is false: pass i32, or set options to true"
                }
                (false, _) => "elements of i32, or of i64 if the plan's options is true",
            };
            return Err(TensorError {
                tensor: "topk_ids",
                wanted: wanted.to_owned(),
                given: given.to_string(),
            });
        }
        let dims = [self.x.dims[0], plan.config().top_k];
        self.topk_ids
            .require("topk_ids", dims, Element::natural(element))
    }

    /// Options of both halves, without outputs.
    fn options(&self, plan: &Plan) -> DispatchOptions {
        let config = plan.config();
        let mut rows = ReceivedRows::NONE;
        if config.receive.keeps_rows() {
            rows.is_on = 1;
            let fields = plan.receive();
            rows.layout = fields.layout.number();
            rows.clears_absent = fields.clear_absent.into();
            rows.transposes_scales = fields.transposed_scales.into();
        }
        DispatchOptions {
            tokens_on_device: address_or_none(self.tokens_on_device),
            wide_ids: (self.topk_ids.data_type == DataType::I64).into(),
            rows,
            ..DispatchOptions::NONE
        }
    }
}

/// Inputs of a dispatch's first half that the second half needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    /// Input of the first half. With a shared expert, the second half writes its `x`, in the plan's format
    /// and with its `input_scale` or `x_scales`, to the shared expert's rows.
    pub(super) input: DispatchInput,
    /// Its scales, if it is encoded.
    encoded: EncodedInput,
}

impl Sent {
    /// The kernels' arguments without outputs. Without a shared expert, no input is read.
    pub(crate) fn args(&self, common: &Common, plan: &Plan) -> DispatchWith {
        let input = &self.input;
        let (mut args, mut options) = (args_of(common, self.tokens()), input.options(plan));
        if plan.config().shared_expert {
            (args.x, args.x_stride) = (input.x.at.address(), input.x_stride());
            args.input_scale = address_or_none(input.input_scale);
            options.encoded = self.encoded;
        }
        DispatchWith { args, options }
    }

    /// Number of rows of `x`.
    pub(crate) const fn tokens(&self) -> usize {
        self.input.x.dims[0]
    }

    /// Whether expert ids are i64.
    pub(crate) fn has_wide_ids(&self) -> bool {
        self.input.topk_ids.data_type == DataType::I64
    }

    /// Whether the number of tokens is on the device.
    pub(crate) const fn is_counted(&self) -> bool {
        self.input.tokens_on_device.is_some()
    }
}

/// `common`, with the routes of a round whose caller keeps its ids.
pub(crate) fn with_kept(common: &Common, kept_ids: Option<Tensor<2>>) -> Common {
    let mut common = *common;
    if let Some(kept) = kept_ids {
        common.tables.routes = kept.at.address().wrapping_sub(common.workspace);
    }
    common
}

/// The kernels' arguments without inputs and outputs.
pub(crate) fn args_of(common: &Common, tokens: usize) -> DispatchArgs {
    DispatchArgs {
        common: Common {
            tokens: tokens as u32,
            ..*common
        },
        ..DispatchArgs::zeroed()
    }
}

impl DispatchOutput {
    /// Outputs by expert in BF16: all other tensors are `None`.
    pub const fn by_expert(
        tokens: Tensor<2>,
        row_offsets: Tensor<1>,
        expert_ids: Tensor<1>,
        src_info: Tensor<2>,
    ) -> Self {
        Self {
            tokens: Some(tokens),
            scales: None,
            row_scales: None,
            row_offsets: Some(row_offsets),
            expert_ids: Some(expert_ids),
            src_info,
            ids: None,
            weights: None,
            source_counts: None,
            expert_counts: None,
            row_ends: None,
            m_indices: None,
            source_ranges: None,
        }
    }

    /// The rows' tensor, which experts read.
    ///
    /// # Errors
    /// [`TensorError`] for a view, whose rows stay in the window:
    /// [`Communicator::view`](crate::Communicator::view) has them.
    pub fn tokens(&self) -> Result<Tensor<2>, TensorError> {
        self.tokens.ok_or_else(|| TensorError {
            tensor: "tokens",
            wanted: "a tensor, which a view does not have: Communicator::view has its rows"
                .to_owned(),
            given: "none".to_owned(),
        })
    }

    /// Checks that a dispatch of this plan takes these outputs, as far as they are concerned. Not collective;
    /// does not synchronize.
    ///
    /// # Errors
    /// [`Error::Capacity`], [`Error::TooManyScales`], [`Error::WrongScales`], [`Error::Tensor`],
    /// [`Error::TensorsOverlap`].
    pub fn fits(&self, plan: &Plan) -> Result<(), Error> {
        self.check(plan)?;
        self.require_disjoint()
    }

    /// Checks every tensor by itself.
    pub(crate) fn check(&self, plan: &Plan) -> Result<ScaleAddresses, Error> {
        let (form, shape, rows) = (plan.scale_form(), plan.shape(), self.capacity());
        let scales = ScaleTensor::check(self.scales.as_ref(), form, shape, plan.groups(), rows)?;
        let capacity = Capacity {
            rows,
            scale_blocks: scales.blocks as usize,
            wide_ids: self.has_wide_ids(),
        };
        capacity.fits(plan)?;
        self.require(plan, capacity)?;
        Ok(scales)
    }

    fn has_wide_ids(&self) -> bool {
        self.ids.is_some_and(|ids| ids.data_type == DataType::I64)
    }

    /// Checks that ids come out in the type in which they went in.
    fn require_type_of_ids(&self, options: &DispatchOptions) -> Result<(), TensorError> {
        let went_in = match options.wide_ids {
            0 => DataType::I32,
            _ => DataType::I64,
        };
        match self.ids {
            Some(ids) if self.has_wide_ids() != (options.wide_ids != 0) => Err(TensorError {
                tensor: "ids",
                wanted: format!("elements of {went_in}, as in topk_ids"),
                given: ids.data_type.to_string(),
            }),
            _ => Ok(()),
        }
    }

    /// `args`, with these outputs.
    pub(crate) fn add_to(&self, with: DispatchWith, plan: &Plan) -> Result<DispatchWith, Error> {
        let (scales, capacity) = (self.check(plan)?, self.capacity());
        self.require_type_of_ids(&with.options)?;
        let args = DispatchArgs {
            output_tokens: address_or_none(self.tokens),
            output_scales: scales.scales,
            scales_offsets: scales.offsets,
            row_scales: address_or_none(self.row_scales),
            block_capacity: scales.blocks,
            row_offsets: address_or_none(self.row_offsets),
            expert_ids: address_or_none(self.expert_ids),
            src_info: self.src_info.at.address(),
            row_capacity: capacity as u64,
            ..with.args
        };
        let options = DispatchOptions {
            shared_of: plan.shared_of(),
            ..self.tables(with.options, plan)
        };
        require_room_for_shared(&args, &options)?;
        Ok(DispatchWith { args, options })
    }

    /// `options`, with the tables of rows that stay as they came, or of those by expert.
    fn tables(&self, options: DispatchOptions, plan: &Plan) -> DispatchOptions {
        let (weights, of_expert) = (
            address_or_none(self.weights),
            address_or_none(self.expert_counts),
        );
        let config = plan.config();
        if config.receive.keeps_rows() {
            let rows = ReceivedRows {
                ids: address_or_none(self.ids),
                weights,
                of_source: address_or_none(self.source_counts),
                of_expert,
                ..options.rows
            };
            return DispatchOptions { rows, ..options };
        }
        let groups = GroupTables {
            counts: of_expert,
            ends: address_or_none(self.row_ends),
            weights,
            m_indices: address_or_none(self.m_indices),
            ranges: address_or_none(self.source_ranges),
            clears_padding: plan.receive().clear_padding.into(),
            ..plan.blocks()
        };
        DispatchOptions { groups, ..options }
    }

    /// Number of rows that fit in the outputs.
    pub(crate) const fn capacity(&self) -> usize {
        match &self.tokens {
            Some(tokens) => tokens.dims[0],
            None => self.src_info.dims[0],
        }
    }
}

impl Plan {
    /// Blocks of experts, and places of scales in them, without tables; all zero if there are none.
    fn blocks(&self) -> GroupTables {
        let (shape, block) = (self.shape(), self.block_rows() as u32);
        if block == 0 {
            return GroupTables::NONE;
        }
        let words = shape.scale_words();
        let (scale_row, scale_stride, scale_block) = match self.scale_form() {
            // Position `block * expert + row` becomes word `block * words * expert + row`.
            ScaleForm::TransposedBlocks => (1, block, block.wrapping_mul(words.wrapping_sub(1))),
            _ => (words, 1, 0),
        };
        GroupTables {
            block,
            scale_row,
            scale_stride,
            scale_block,
            ..GroupTables::NONE
        }
    }
}

/// Sizes of a dispatch that its combine needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    /// Tokens of this rank.
    pub(crate) tokens: usize,
    /// Rows that fit in its outputs.
    pub(crate) capacity: usize,
    /// Whether the number of tokens is on the device.
    pub(crate) is_counted: bool,
    /// Memory of the caller that has the ids.
    pub(crate) kept_ids: Option<Tensor<2>>,
}

impl Received {
    pub(crate) const fn of(sent: &Sent, output: &DispatchOutput) -> Self {
        Self {
            tokens: sent.tokens(),
            capacity: output.capacity(),
            is_counted: sent.is_counted(),
            kept_ids: sent.input.kept_ids,
        }
    }
}

/// Refuses outputs with fewer rows, or blocks of scales, than the shared expert's tokens take, which are
/// written before the number of other rows is known.
fn require_room_for_shared(args: &DispatchArgs, options: &DispatchOptions) -> Result<(), Error> {
    if !options.has_shared_expert() {
        return Ok(());
    }
    let (common, tokens) = (&args.common, options.shared(args.common.tokens).count);
    let rows = common.row.padded(tokens);
    let blocks = if common.shape.has_tiled_scales() {
        scale_placement::blocks(rows)
    } else {
        0
    };
    for (field, needed, given) in [
        ("rows", rows, args.row_capacity),
        ("scale_blocks", blocks, args.block_capacity),
    ] {
        if u64::from(needed) > given {
            return Err(Error::Capacity(Problem {
                field,
                value: given.to_string(),
                rule: format!("the shared expert's {tokens} tokens alone take {needed}"),
            }));
        }
    }
    Ok(())
}
