//! What dispatch and combine take, and how it is checked.

pub(crate) mod buffers;
pub(crate) mod epilogue;
pub(crate) mod scales;
pub(crate) mod silu;
pub(crate) mod tensors;

mod apart;
mod combine;

use bytemuck::Zeroable;
use ferry_layout::{
    Common, DispatchArgs, DispatchOptions, DispatchWith, OutputElement, TokenFormat,
    scale_placement,
};

use crate::call::epilogue::CombineEpilogue;
use crate::call::scales::ScaleAddresses;
use crate::call::scales::ScaleTensor;
use crate::error::{Error, Problem, TensorError};
use crate::plan::Plan;
use crate::tensor::Element;
use crate::tensor::Tensor;
use crate::tensor::data_type::DataType;

/// What a rank brings to a dispatch. `tokens` is 0 to `max_tokens_per_rank` and may differ from
/// rank to rank and from round to round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchInput {
    /// BF16 `[tokens, hidden]`, 16-byte aligned. The one tensor whose rows need not follow each other
    /// ([`Tensor::with_row_stride`]). Of a split dispatch with a
    /// [shared expert](crate::Config::shared_expert) the wait reads it once more, and the `input_scale`.
    pub x: Tensor<2>,
    /// i32 `[tokens, top_k]`: the experts of each token, or -1 for "not routed". An id outside
    /// `-1..experts` is not routed either, and reported as a fault. An expert that stands twice gets the
    /// token twice, in the order of the slots, and both rows count;
    /// [`debug_checks`](crate::Config::debug_checks) report it.
    pub topk_ids: Tensor<2>,
    /// f32 `[tokens, top_k]`: the router's weights, which the reduced mode applies. `None`: all
    /// are 1.
    pub topk_weights: Option<Tensor<2>>,
    /// f32 `[1]`, [`TokenFormat::Nvfp4`](crate::TokenFormat) only: the global scale that the block
    /// scales are multiplied with, 2^-126 to 2^126, usually `448 * 6 / amax` of a calibration. `None`: it
    /// is 1. Rows do not carry it: every rank gives the same, or the experts cannot tell whose rows
    /// mean what.
    pub input_scale: Option<Tensor<1>>,
    /// u32 `[1]`: how many tokens there are, `x`'s first ones; `None`: all of `x`. Read when the
    /// kernel begins, so that one captured graph serves any number up to `x`'s rows. A number above
    /// them is taken as these rows, and reported as a fault
    /// ([`FaultKind::TooManyOnDevice`](crate::FaultKind)). Combine leaves rows of `combined` from
    /// the number on as they are. It must not change until the stream has passed the kernel: its
    /// warps read the number one by one. Takes [`Config::options`](crate::Config::options), which a
    /// shared expert and `skip_a2a` imply.
    pub tokens_on_device: Option<Tensor<1>>,
}

/// Where a rank receives the tokens of a dispatch. `capacity` is any number of rows, in blockwise FP8 a
/// multiple of 4; [`Plan::max_rows`] always suffice. Of more rows than that the first ones are written, and
/// the others count as not routed here: see [`FaultKind::OutputTooSmall`](crate::FaultKind).
/// [`DispatchBuffers`](crate::DispatchBuffers) allocates all of it. Each tensor has memory of its own: none
/// of it is another output's, or that of an input which the same call reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchOutput {
    /// `[capacity, hidden]` in the plan's format (4-bit elements: two a byte, the even one in the low
    /// half), 16-byte aligned: rows by expert, then source rank, then token, then top-k slot, where a token
    /// names an expert twice. With a [shared expert](crate::Config::shared_expert) this rank's own tokens
    /// stand before them, in their order: row `t` is token `t`; with [`skip_a2a`](crate::Config::skip_a2a)
    /// this rank's part of the tokens ([`Plan::shared_tokens`]): row `t` is token `start + t`. Rows from
    /// `row_offsets[groups]` on, and those that pad a group, are left as they are.
    pub tokens: Tensor<2>,
    /// The rows' scales, in the layout of the plan's format; `None` for BF16.
    pub scales: Option<ScaleTensor>,
    /// BF16 `[capacity]`, [`TokenFormat::Nvfp4RowScaled`](crate::TokenFormat) only: the inverse of
    /// each row's own global scale. An element is code times scale times this.
    pub row_scales: Option<Tensor<1>>,
    /// u32 `[groups + 1]` ([`Plan::groups`]): the first row of each group, and the end of the last. A group
    /// is a local expert; with a shared expert, that is the first group, and local expert `e` is group
    /// `e + 1`. Blockwise FP8 pads every group to a multiple of 4 rows. Never above `capacity`: where
    /// more rows come, groups end with the last row that is here, and those behind it are empty.
    pub row_offsets: Tensor<1>,
    /// i32 `[groups]`: `0, 1, ..`, the number of each group of rows, as grouped matrix multiplications want
    /// it.
    pub expert_ids: Tensor<1>,
    /// i32 `[capacity, 2]`: each row's token on its source rank, and its top-k slot there. Those of
    /// the shared expert's rows and of rows that pad a group are left as they are. Neither the source rank
    /// nor a group's number of rows without padding is given.
    pub src_info: Tensor<2>,
}

/// What a rank gives back in a combine.
///
/// `row_weights` and `epilogue` take kernels with options
/// ([`Config::options`](crate::Config::options)). Each rank may give its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CombineInput {
    /// BF16 `[capacity, hidden]`, 16-byte aligned: the experts' outputs in the order of the
    /// dispatch's `tokens`, with the same capacity. May be the same memory.
    pub expert_rows: Tensor<2>,
    /// f32 `[tokens, top_k]`, exact mode only: the weights of this rank's own tokens. `None`
    /// keeps the rows of a token apart.
    pub topk_weights: Option<Tensor<2>>,
    /// f32 `[capacity]`, reduced mode only: what each of `expert_rows` is weighted with, instead of
    /// the router's weight that came with its token. Those of rows that nobody was sent are not
    /// read.
    pub row_weights: Option<Tensor<1>>,
    /// What is done with the sums of this rank's own tokens.
    pub epilogue: CombineEpilogue,
}

/// Where a rank receives the result of a combine: a tensor whose shape depends on the mode, 16-byte aligned,
/// not in the memory of `expert_rows`, as rows are still read while sums are written.
/// [`CombineBuffers`](crate::CombineBuffers) allocates it.
///
/// With [`skip_a2a`](crate::Config::skip_a2a) the result is what this rank's experts add, and zeros where
/// they add nothing: the sum over the ranks is the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CombineOutput {
    /// `[tokens, hidden]`: the weighted sum of a token's rows, from +0 on: rows of -0 alone, and no rows, sum
    /// to +0. In reduced mode always; in exact mode when the combine is given weights. BF16; f16 and f32 take
    /// kernels with options ([`Config::options`](crate::Config::options)).
    Summed(Tensor<2>),
    /// BF16 `[tokens, top_k, hidden]`: each row by itself, bit for bit, +0 where nothing was routed. In exact
    /// mode without weights.
    Apart(Tensor<3>),
}

impl CombineOutput {
    /// The same elements as rows, one after another: `[tokens, hidden]` or `[tokens * top_k, hidden]`.
    pub const fn rows(&self) -> Tensor<2> {
        match *self {
            Self::Summed(tensor) => tensor,
            Self::Apart(Tensor {
                at,
                data_type,
                dims,
                ..
            }) => Tensor::contiguous(at, data_type, [dims[0].saturating_mul(dims[1]), dims[2]]),
        }
    }
}

impl CombineOutput {
    /// What the result is made of. Rows that are kept apart are BF16, and so are 16 bits without a name.
    pub(crate) fn element(&self) -> Result<OutputElement, TensorError> {
        let given = match self {
            Self::Apart(_) => return Ok(OutputElement::Bf16),
            Self::Summed(combined) if combined.data_type == DataType::U16 => {
                return Ok(OutputElement::Bf16);
            }
            Self::Summed(combined) => combined.data_type,
        };
        let mut all = OutputElement::ALL.into_iter();
        all.find(|&element| DataType::from(element) == given)
            .ok_or_else(|| TensorError {
                tensor: "combined",
                wanted: "elements of bf16, f16 or f32".to_owned(),
                given: given.to_string(),
            })
    }
}

impl DispatchInput {
    /// Tokens and their experts, and nothing else: all weights are 1.
    pub const fn new(x: Tensor<2>, topk_ids: Tensor<2>) -> Self {
        Self {
            x,
            topk_ids,
            topk_weights: None,
            input_scale: None,
            tokens_on_device: None,
        }
    }

    /// What the wait of a split dispatch takes of the inputs.
    pub(crate) fn sent(&self) -> Sent {
        Sent { input: *self }
    }

    /// Bytes from one row of `x` to the next.
    const fn x_stride(&self) -> u64 {
        // Of a single row it may be any number.
        (self.x.strides[0] as u64).wrapping_mul(2)
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
        self.x.require_rows("x", [tokens, config.hidden])?;
        self.topk_ids
            .require("topk_ids", [tokens, config.top_k], Element::I32)?;
        if let Some(weights) = &self.topk_weights {
            weights.require("topk_weights", [tokens, config.top_k], Element::F32)?;
        }
        let takes_scale = matches!(config.format, TokenFormat::Nvfp4(_));
        match &self.input_scale {
            Some(scale) if takes_scale => scale.require("input_scale", [1], Element::F32)?,
            Some(_) => {
                return Err(Error::UnusedInputScale {
                    format: config.format,
                });
            }
            None => {}
        }
        if let Some(count) = &self.tokens_on_device {
            count.require("tokens_on_device", [1], Element::U32)?;
        }
        Ok(DispatchWith {
            args: DispatchArgs {
                x: self.x.at.address(),
                x_stride: self.x_stride(),
                topk_ids: self.topk_ids.at.address(),
                topk_weights: address_or_none(self.topk_weights),
                input_scale: address_or_none(self.input_scale),
                ..args_of(common, tokens)
            },
            options: DispatchOptions {
                tokens_on_device: address_or_none(self.tokens_on_device),
                ..DispatchOptions::NONE
            },
        })
    }
}

/// What the second half of a dispatch must know of the first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    /// A shared expert's rows are made of its `x` and `input_scale`.
    input: DispatchInput,
}

impl Sent {
    /// The kernels' arguments without outputs. Without a shared expert, nothing of the inputs is read.
    pub(crate) fn args(&self, common: &Common, plan: &Plan) -> DispatchWith {
        let input = &self.input;
        let mut args = args_of(common, self.tokens());
        if plan.config().shared_expert {
            (args.x, args.x_stride) = (input.x.at.address(), input.x_stride());
            args.input_scale = address_or_none(input.input_scale);
        }
        DispatchWith {
            args,
            options: DispatchOptions {
                tokens_on_device: address_or_none(input.tokens_on_device),
                ..DispatchOptions::NONE
            },
        }
    }

    /// Rows of `x`.
    pub(crate) const fn tokens(&self) -> usize {
        self.input.x.dims[0]
    }

    /// Whether the device says how many tokens there are.
    pub(crate) const fn is_counted(&self) -> bool {
        self.input.tokens_on_device.is_some()
    }
}

/// What the second half of a combine must know of the first, and of its dispatch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Returned {
    pub(crate) received: Received,
    pub(crate) input: CombineInput,
    pub(crate) output: CombineOutput,
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
    /// Checks every tensor.
    pub(crate) fn check(&self, plan: &Plan) -> Result<ScaleAddresses, Error> {
        let capacity = self.capacity();
        let element = Element::row(DataType::of_tokens(plan.config().format));
        self.tokens
            .require("tokens", [capacity, plan.config().hidden], element)?;
        let scales =
            ScaleTensor::check(self.scales.as_ref(), plan.shape(), plan.groups(), capacity)?;
        match (&self.row_scales, plan.shape().sizes().has_row_scale) {
            (Some(given), true) => given.require("row_scales", [capacity], Element::BF16)?,
            (None, false) => {}
            (given, _) => {
                return Err(Error::WrongRowScales {
                    given: given.is_some(),
                    format: plan.config().format,
                });
            }
        }
        self.row_offsets
            .require("row_offsets", [plan.groups() + 1], Element::U32)?;
        self.expert_ids
            .require("expert_ids", [plan.groups()], Element::I32)?;
        self.src_info
            .require("src_info", [capacity, 2], Element::I32)?;
        self.require_disjoint()?;
        Ok(scales)
    }

    /// `args`, with these outputs.
    pub(crate) fn add_to(&self, with: DispatchWith, plan: &Plan) -> Result<DispatchWith, Error> {
        let (scales, capacity) = (self.check(plan)?, self.capacity());
        let args = DispatchArgs {
            output_tokens: self.tokens.at.address(),
            output_scales: scales.scales,
            scales_offsets: scales.offsets,
            row_scales: address_or_none(self.row_scales),
            block_capacity: scales.blocks,
            row_offsets: self.row_offsets.at.address(),
            expert_ids: self.expert_ids.at.address(),
            src_info: self.src_info.at.address(),
            row_capacity: capacity as u64,
            ..with.args
        };
        let options = DispatchOptions {
            shared_of: plan.shared_of(),
            ..with.options
        };
        require_room_for_shared(&args, &options)?;
        Ok(DispatchWith { args, options })
    }

    /// Rows that the outputs hold.
    pub(crate) const fn capacity(&self) -> usize {
        self.tokens.dims[0]
    }
}

/// What a combine must know of its dispatch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    /// Tokens that this rank brought.
    pub(crate) tokens: usize,
    /// Rows that its outputs hold.
    pub(crate) capacity: usize,
    /// Whether the device says how many of the tokens there are.
    pub(crate) is_counted: bool,
}

impl Received {
    pub(crate) const fn of(sent: &Sent, output: &DispatchOutput) -> Self {
        Self {
            tokens: sent.tokens(),
            capacity: output.capacity(),
            is_counted: sent.is_counted(),
        }
    }
}

/// Refuses outputs that hold fewer rows, or blocks of scales, than the shared expert's tokens take, which are
/// written before it is known what comes.
fn require_room_for_shared(args: &DispatchArgs, options: &DispatchOptions) -> Result<(), Error> {
    if !options.has_shared_expert() {
        return Ok(());
    }
    let (common, tokens) = (&args.common, options.shared(args.common.tokens).count);
    let rows = common.row.padded(tokens);
    let blocks = match common.shape.has_tiled_scales() {
        true => scale_placement::blocks(rows),
        false => 0,
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

pub(crate) fn address_or_none<const N: usize>(tensor: Option<Tensor<N>>) -> u64 {
    tensor.map_or(0, |tensor| tensor.at.address())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ferry_layout::CombineMode;

    use super::*;
    use crate::plan::config::Config;
    use crate::tensor::handles::DevicePtr;

    /// In exact mode a position is also a row of the staging, of which there are
    /// [`Shape::max_rows`]: fewer than [`Plan::max_rows`] where that is rounded up.
    #[test]
    fn positions_of_a_combine_stay_in_the_staging() {
        let config = Config {
            p2p_world_size: Some(1),
            format: TokenFormat::BlockwiseFp8,
            combine: CombineMode::Exact,
            deadline: Duration::from_secs(1),
            ..Config::new(2, 1, 1024, 4)
        };
        let plan = Plan::check(2, true, config).unwrap();
        assert!(plan.max_rows() as u64 > plan.shape().max_rows());
        // SAFETY: nothing here reads or writes device memory.
        let memory = |address| unsafe { DevicePtr::new(address, 1 << 20) };
        let rows = Tensor::contiguous(memory(1 << 20), DataType::Bf16, [plan.max_rows(), 1024]);
        let input = CombineInput::new(rows);
        let output = CombineOutput::Apart(Tensor::contiguous(
            memory(1 << 21),
            DataType::Bf16,
            [4, 1, 1024],
        ));
        let received = Received {
            tokens: 4,
            capacity: plan.max_rows(),
            is_counted: false,
        };
        let args = input
            .args(&output, &Common::of(plan.shape()), &plan, received, None)
            .unwrap();
        assert_eq!(args.args.row_capacity, plan.shape().max_rows());
    }
}
