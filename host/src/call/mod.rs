//! The arguments of dispatch and combine, and their checks.

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

/// A rank's inputs of a dispatch. `tokens` is 0 to `max_tokens_per_rank` and may differ between ranks and
/// rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchInput {
    /// BF16 `[tokens, hidden]`, 16-byte aligned. The only tensor whose rows may have a stride
    /// ([`Tensor::with_row_stride`]). In a split dispatch with a
    /// [shared expert](crate::Config::shared_expert) the wait reads it again, and the `input_scale`.
    pub x: Tensor<2>,
    /// i32 `[tokens, top_k]`: the experts of each token, or -1 for "not routed". An id outside
    /// `-1..experts` is not routed either, and reported as a fault. An expert that is listed twice gets the
    /// token twice, in the order of the slots, and both rows count;
    /// [`debug_checks`](crate::Config::debug_checks) report it.
    pub topk_ids: Tensor<2>,
    /// f32 `[tokens, top_k]`: the router's weights, which combine applies in reduced mode, on the experts'
    /// rank; exact mode does not read them. `None`: all are 1.
    pub topk_weights: Option<Tensor<2>>,
    /// f32 `[1]`, [`TokenFormat::Nvfp4`](crate::TokenFormat) only: the global scale that the block
    /// scales are multiplied with, 2^-126 to 2^126, usually `448 * 6 / amax` of a calibration. `None`: it
    /// is 1. Rows do not carry it: every rank must pass the same, or the experts cannot know the scale of
    /// a row.
    pub input_scale: Option<Tensor<1>>,
    /// u32 `[1]`: number of tokens, the first rows of `x`; `None`: all rows of `x`. Read when the
    /// kernel begins, so that one captured graph serves any number up to the rows of `x`. A larger number
    /// counts as all rows, and is reported as a fault
    /// ([`FaultKind::TooManyOnDevice`](crate::FaultKind)). Combine does not write the rows of `combined` from
    /// the number on. It must not change until the stream has passed the kernel: its
    /// warps read the number one by one. Needs [`Config::options`](crate::Config::options), which a
    /// shared expert and `skip_a2a` imply.
    pub tokens_on_device: Option<Tensor<1>>,
}

/// A rank's outputs of a dispatch. `capacity` is any number of rows, in blockwise FP8 a
/// multiple of 4; [`Plan::max_rows`] always suffice. If more rows arrive, the first ones are written, and
/// the others count as not routed here: see [`FaultKind::OutputTooSmall`](crate::FaultKind).
/// [`DispatchBuffers`](crate::DispatchBuffers) allocates all tensors. Each has memory of its own, which no
/// other output and no input of the same call overlaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchOutput {
    /// `[capacity, hidden]` in the plan's format (4-bit elements: two a byte, the even one in the low
    /// half), 16-byte aligned: rows by expert, then source rank, then token, then top-k slot, if a token
    /// names an expert twice. With a [shared expert](crate::Config::shared_expert) this rank's own tokens
    /// precede them, in their order: row `t` is token `t`; with [`skip_a2a`](crate::Config::skip_a2a)
    /// this rank's part of the tokens ([`Plan::shared_tokens`]): row `t` is token `start + t`. Rows from
    /// `row_offsets[groups]` on, and those that pad a group, are not written.
    pub tokens: Tensor<2>,
    /// The rows' scales, in the layout of the plan's format; `None` for BF16.
    pub scales: Option<ScaleTensor>,
    /// BF16 `[capacity]`, [`TokenFormat::Nvfp4RowScaled`](crate::TokenFormat) only: the inverse of
    /// each row's own global scale. An element is its code times its scale times this.
    pub row_scales: Option<Tensor<1>>,
    /// u32 `[groups + 1]` ([`Plan::groups`]): the first row of each group, and the end of the last. A group
    /// is a local expert; with a shared expert, that is the first group, and local expert `e` is group
    /// `e + 1`. Blockwise FP8 pads every group to a multiple of 4 rows. Never above `capacity`: if
    /// more rows arrive, groups end with the last row that fits, and the groups after it are empty.
    pub row_offsets: Tensor<1>,
    /// i32 `[groups]`: `0, 1, ..`, the number of each group of rows, for grouped matrix multiplications that
    /// take one.
    pub expert_ids: Tensor<1>,
    /// i32 `[capacity, 2]`: each row's token on its source rank, and its top-k slot there. Not written for
    /// the shared expert's rows and for rows that pad a group. Neither the source rank
    /// nor a group's number of rows without padding is available.
    pub src_info: Tensor<2>,
}

/// A rank's inputs of a combine.
///
/// `row_weights` and `epilogue` need kernels with options
/// ([`Config::options`](crate::Config::options)). They may differ between ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CombineInput {
    /// BF16 `[capacity, hidden]`, 16-byte aligned: the experts' outputs in the order of the
    /// dispatch's `tokens`, with the same capacity. May be the same memory.
    pub expert_rows: Tensor<2>,
    /// f32 `[tokens, top_k]`, exact mode only: the weights of this rank's own tokens, with which this rank
    /// multiplies the rows that return, in f32. `None` keeps the rows of a token apart.
    pub topk_weights: Option<Tensor<2>>,
    /// f32 `[capacity]`, reduced mode only: the weight of each of `expert_rows`, instead of
    /// the router's weight that came with its token. Not read for rows of no token.
    pub row_weights: Option<Tensor<1>>,
    /// Steps on the sums of this rank's own tokens.
    pub epilogue: CombineEpilogue,
}

/// A rank's output of a combine: a tensor whose shape depends on the mode, 16-byte aligned,
/// not in the memory of `expert_rows`, as rows are still read while sums are written.
/// [`CombineBuffers`](crate::CombineBuffers) allocates it.
///
/// With [`skip_a2a`](crate::Config::skip_a2a) it holds the part of this rank's experts, and zeros for tokens
/// that name none of them: the sum over the ranks is the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CombineOutput {
    /// `[tokens, hidden]`: the weighted sum of each token's rows. In reduced mode always; in exact mode if
    /// combine has weights. BF16; f16 and f32 need kernels with options
    /// ([`Config::options`](crate::Config::options)).
    ///
    /// Products and sums are rounded to f32 one by one, beginning with +0: rows of -0 alone, and no rows, sum
    /// to +0. The order is fixed. In exact mode this rank adds the rows by top-k slot. In reduced mode each
    /// rank adds its rows of the token by top-k slot and rounds the sum to BF16, and this rank adds these
    /// sums by rank. Then follow the [shared expert](crate::Config::shared_expert)'s row and the
    /// [epilogue](CombineInput::epilogue), if any, and one rounding to the tensor's elements.
    Summed(Tensor<2>),
    /// BF16 `[tokens, top_k, hidden]`: each row by itself, bit for bit, +0 for slots that were not routed. In
    /// exact mode without weights.
    Apart(Tensor<3>),
}

impl CombineOutput {
    /// Returns the same elements as rows: `[tokens, hidden]` or `[tokens * top_k, hidden]`.
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
    /// Type of the result's elements. Rows that are kept apart are BF16, and so is [`DataType::U16`].
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
    /// Tokens and their experts alone: all weights are 1.
    pub const fn new(x: Tensor<2>, topk_ids: Tensor<2>) -> Self {
        Self {
            x,
            topk_ids,
            topk_weights: None,
            input_scale: None,
            tokens_on_device: None,
        }
    }

    /// The inputs that the wait of a split dispatch needs.
    pub(crate) fn sent(&self) -> Sent {
        Sent { input: *self }
    }

    /// Bytes from one row of `x` to the next.
    const fn x_stride(&self) -> u64 {
        // For a single row it may be any number.
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

/// Inputs of a dispatch's first half that the second half needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    /// Its `x` and `input_scale` become a shared expert's rows.
    input: DispatchInput,
}

impl Sent {
    /// The kernels' arguments without outputs. Without a shared expert, no input is read.
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

    /// Number of rows of `x`.
    pub(crate) const fn tokens(&self) -> usize {
        self.input.x.dims[0]
    }

    /// Whether the number of tokens is on the device.
    pub(crate) const fn is_counted(&self) -> bool {
        self.input.tokens_on_device.is_some()
    }
}

/// Arguments of a combine's first half, and of its dispatch, that the second half needs.
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

    /// Number of rows that fit in the outputs.
    pub(crate) const fn capacity(&self) -> usize {
        self.tokens.dims[0]
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

    /// A position in exact mode is also a row of the staging, which has [`Shape::max_rows`] rows: fewer than
    /// [`Plan::max_rows`] if that is rounded up.
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
        // SAFETY: `DevicePtr::new` is about accesses of a device, and none is made here.
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
