//! The arguments of dispatch and combine, and their checks.

pub(crate) mod arguments;
pub(crate) mod buffers;
pub(crate) mod combine;
pub(crate) mod dispatch;
pub(crate) mod encoded;
pub(crate) mod epilogue;
pub(crate) mod scales;
pub(crate) mod silu;
pub(crate) mod tensors;

mod apart;

use ferry_layout::OutputElement;

use crate::call::epilogue::CombineEpilogue;
use crate::call::scales::ScaleTensor;
use crate::error::TensorError;
use crate::tensor::Tensor;
use crate::tensor::data_type::DataType;

/// A call of a round with its inputs and outputs, by value, so that it can be kept and made again.
/// [`Communicator::enqueue`](crate::Communicator::enqueue) makes it on one rank,
/// [`Communicator::together`](crate::Communicator::together) on all ranks of a process. The functions of
/// [`Communicator`](crate::Communicator) with these names say what each does.
#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "tensors are kept by value: no call allocates"
)]
pub enum Call {
    /// [`dispatch`](crate::Communicator::dispatch).
    Dispatch(DispatchInput, DispatchOutput),
    /// [`dispatch_async`](crate::Communicator::dispatch_async).
    DispatchAsync(DispatchInput),
    /// [`dispatch_counts`](crate::Communicator::dispatch_counts).
    DispatchCounts,
    /// [`dispatch_wait`](crate::Communicator::dispatch_wait).
    DispatchWait(DispatchOutput),
    /// [`combine`](crate::Communicator::combine).
    Combine(CombineInput, CombineOutput),
    /// [`combine_async`](crate::Communicator::combine_async).
    CombineAsync(CombineInput, CombineOutput),
    /// [`combine_wait`](crate::Communicator::combine_wait).
    CombineWait,
    /// [`give_up`](crate::Communicator::give_up).
    GiveUp,
}

impl Call {
    /// Name of the function that makes it, as errors say it.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Dispatch(..) => "dispatch",
            Self::DispatchAsync(_) => "dispatch_async",
            Self::DispatchCounts => "dispatch_counts",
            Self::DispatchWait(_) => "dispatch_wait",
            Self::Combine(..) => "combine",
            Self::CombineAsync(..) => "combine_async",
            Self::CombineWait => "combine_wait",
            Self::GiveUp => "give_up",
        }
    }

    /// Whether it begins a split call, or asks for the counts of one: calls of which `skip_a2a` has none.
    pub(crate) const fn is_split(&self) -> bool {
        matches!(
            self,
            Self::DispatchAsync(_) | Self::DispatchCounts | Self::CombineAsync(..)
        )
    }
}

/// A rank's inputs of a dispatch. `tokens` is 0 to `max_tokens_per_rank` and may differ between ranks and
/// rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchInput {
    /// BF16 `[tokens, hidden]`, 16-byte aligned, which dispatch encodes in the plan's format; or with
    /// [`x_scales`](Self::x_scales) codes of that format, which travel as they are: e4m3 or e2m1 (two a byte,
    /// the even one in the low half) `[tokens, hidden]`, 16-byte aligned. Rows may have a stride
    /// ([`Tensor::with_row_stride`]). In a split dispatch with a
    /// [shared expert](crate::Config::shared_expert) the wait reads it again, and the `input_scale` or
    /// `x_scales`.
    pub x: Tensor<2>,
    /// i32 or i64 `[tokens, top_k]`: the experts of each token, or -1 for "not routed". An id outside
    /// `-1..experts` is not routed either, and reported as a fault. Each rank and call may choose the type;
    /// by expert, i64 needs [`Config::options`](crate::Config::options), which a shared expert and `skip_a2a`
    /// imply. An expert that is listed twice gets the
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
    /// the number on. Write it in stream order before the dispatch: each block of the kernel reads it once,
    /// by itself, so that a number that changes meanwhile makes rows of this round and of later ones wrong,
    /// on peers, too, or a kernel times out. Needs [`Config::options`](crate::Config::options), which a
    /// shared expert and `skip_a2a` imply.
    pub tokens_on_device: Option<Tensor<1>>,
    /// Scales of an `x` that is encoded already; `None`: `x` is BF16. Each rank and call may choose. Any
    /// codes and scales arrive, in the layout of the plan's outputs, with the bits that they have, but for
    /// two words of 32 bits, aligned: four e4m3 codes `0xff` arrive as `0x7f, 0xff, 0xff, 0xff` (all NaN),
    /// and a word of scales `0xfffffffe` as `0xffffffff` (all NaN), which is reported as
    /// [`FaultKind::LostScales`](crate::FaultKind).
    ///
    /// | format | type | shape | strides |
    /// |---|---|---|---|
    /// | blockwise FP8 | f32 | `[tokens, hidden / 128]` | any: row-major, transposed |
    /// | blockwise FP8 | i32 (or u32), packed UE8M0 | `[tokens, hidden / 512]` | any |
    /// | MXFP8, MXFP4 | e8m0 | `[tokens, hidden / 32]` | rows a multiple of 4 apart |
    /// | NVFP4 | e4m3 | `[tokens, hidden / 16]` | rows a multiple of 4 apart |
    ///
    /// 4-byte aligned. Packed are four powers of two, e8m0, the first in the lowest byte. They arrive as f32
    /// of the same values, in which every one is exact; `0xff` as NaN. Not with `input_scale`: the global
    /// scale of NVFP4 codes is the caller's, and rows do not carry it. By expert it needs
    /// [`Config::options`](crate::Config::options), which a shared expert and `skip_a2a` imply. Not in
    /// formats whose rows have scales of their own, nor in BF16.
    pub x_scales: Option<Tensor<2>>,
    /// i32 `[tokens, top_k]`, written: `topk_ids` as the round keeps them, with -1 for every id that is none
    /// of an expert. `None`: they stay in the communicator's memory. A later dispatch to the same ranks takes
    /// it as its `topk_ids`, also if the caller has overwritten its own. It overlaps no other tensor of the
    /// round. With `tokens_on_device` only that many rows are written.
    ///
    /// In use until the stream has passed the kernel that ends the round, as combine reads it. It must not
    /// change before that: combine then waits for other rows than come, so that the sums of this round and of
    /// all later ones are wrong, or a kernel times out. Not in exact mode, between nodes, nor with
    /// [`skip_a2a`](crate::Config::skip_a2a).
    pub kept_ids: Option<Tensor<2>>,
}

/// A rank's outputs of a dispatch. `capacity` is a number of rows:
///
/// - [by expert](crate::ReceiveLayout::ByExpert) any multiple of
///   [`Plan::row_alignment`](crate::Plan::row_alignment) (1, or 4 in blockwise FP8, or
///   [`alignment`](crate::ByExpert::alignment)), and
///   [`Plan::max_rows`](crate::Plan::max_rows) always suffice. If more rows arrive, the first ones are
///   written, and the others count as not routed here: see [`FaultKind::OutputTooSmall`](crate::FaultKind);
/// - for compact rows any number, likewise;
/// - for strided rows and views exactly [`Plan::max_rows`](crate::Plan::max_rows), `ranks *
///   max_tokens_per_rank`, and for padded blocks as many for each local expert.
///
/// [Padded blocks](crate::guide::receive) have the tensors of rows by expert, and below "by expert" means
/// them, too: local expert `e` has the rows from `e * ranks * max_tokens_per_rank` on.
///
/// [`DispatchBuffers`](crate::DispatchBuffers) allocates all tensors that the plan's format and
/// [layout](crate::Config::receive) have; the others are `None`. Each has memory of its own, which no
/// other output and no input of the same call overlaps.
///
/// # Rows that stay as they came
///
/// In the layouts `View`, `Strided` and `Compact` there is a row for each source rank and token that has an
/// expert here. In views and strided rows it is row `source * max_tokens_per_rank + token`, and all others
/// are rows without a token; compact rows follow each other by source rank, then token, and all after them
/// are rows without a token. [Which layout do I want](crate::guide::receive) has a picture of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchOutput {
    /// `[capacity, hidden]` in the plan's format (4-bit elements: two a byte, the even one in the low
    /// half), 16-byte aligned.
    ///
    /// By expert: rows by expert, then source rank, then token, then top-k slot, if a token names an expert
    /// twice. With a [shared expert](crate::Config::shared_expert) this rank's own tokens precede them, in
    /// their order: row `t` is token `t`; with [`skip_a2a`](crate::Config::skip_a2a) this rank's part of the
    /// tokens ([`Plan::shared_tokens`](crate::Plan::shared_tokens)): row `t` is token `start + t`. Rows from
    /// `row_offsets[groups]` on are not written, nor are those that pad a group, unless
    /// [`clear_padding`](crate::ByExpert::clear_padding) makes them zeros.
    ///
    /// Strided and compact: a row for each source rank and token. Rows without a token are not written, or
    /// zeros with [`clear_absent`](crate::StridedRows::clear_absent). View: `None`, as rows stay in the
    /// window ([`Communicator::view`](crate::Communicator::view)).
    pub tokens: Option<Tensor<2>>,
    /// The rows' scales, in the layout of the plan's format; `None` for BF16, and for a view, where they
    /// follow each row, unless they are [transposed](crate::KeptRows::transposed_scales).
    pub scales: Option<ScaleTensor>,
    /// BF16 `[capacity]`, [`TokenFormat::Nvfp4RowScaled`](crate::TokenFormat) only: the inverse of
    /// each row's own global scale. An element is its code times its scale times this. `None` for a view,
    /// where it lies in each row.
    pub row_scales: Option<Tensor<1>>,
    /// u32 `[groups + 1]` ([`Plan::groups`](crate::Plan::groups)), by expert only: the first row of each
    /// group, and the end of the last, with padding. Group `g` has the rows `row_offsets[g]..row_offsets[g +
    /// 1]`, of which the last ones may pad it: both are multiples of
    /// [`Plan::row_alignment`](crate::Plan::row_alignment). A group is a local expert; with a shared expert,
    /// that is the first group, and local expert `e` is group `e + 1`. Fused SiLU takes these offsets and
    /// computes padding rows, too. Never above `capacity`: if more rows arrive, groups end with the last row
    /// that fits, and the groups after it are empty.
    pub row_offsets: Option<Tensor<1>>,
    /// i32 `[groups]`, by expert only: `0, 1, ..`, the number of each group of rows, for grouped matrix
    /// multiplications that take one.
    pub expert_ids: Option<Tensor<1>>,
    /// i32 `[capacity, 2]`. By expert: each row's token on its source rank, and its top-k slot there. Not
    /// written for the shared expert's rows and for rows without a token. In other layouts: each row's source
    /// rank and token, -1 and -1 in rows without a token.
    ///
    /// By expert with [`row_sources`](crate::ByExpert::row_sources), i32 `[capacity, 3]`: each row's source
    /// rank, token and top-k slot. Of the shared expert's rows this rank, the token and -1; -1 three times in
    /// rows without a token: those that pad a group, and all from `row_offsets[groups]` on. With
    /// [`skip_a2a`](crate::Config::skip_a2a) the source rank is this one.
    pub src_info: Tensor<2>,
    /// `[capacity, top_k]` of the type of the call's `topk_ids`, not by expert: the local expert of each
    /// top-k slot, `0..local_experts`; -1 in slots of other ranks' experts, in slots that are not routed, and
    /// in all slots of rows without a token.
    pub ids: Option<Tensor<2>>,
    /// f32 `[capacity, top_k]`, not by expert: the router's weights of the slots of `ids` that are not -1,
    /// and +0 in all others. 1 if the source gave no `topk_weights`. A weight whose bits are all ones arrives
    /// as `0xfffffffe`, if it travels.
    ///
    /// By expert with [`row_sources`](crate::ByExpert::row_sources), f32 `[capacity, 1]`: the router's weight
    /// of each row, 1 for the shared expert's rows, and +0 in rows without a token.
    pub weights: Option<Tensor<2>>,
    /// i32 `[ranks]`, not by expert: the number of rows from each source rank in these outputs.
    pub source_counts: Option<Tensor<1>>,
    /// i32 `[local_experts]`, not by expert: the number of `ids` that name each local expert. A token that
    /// lists an expert twice counts twice.
    ///
    /// By expert with an [`alignment`](crate::ByExpert::alignment) above 1, and in padded blocks,
    /// i32 `[groups]`: the number of rows of each group in these outputs, without padding.
    pub expert_counts: Option<Tensor<1>>,
    /// u32 `[groups]`, where there are `expert_counts` of groups: the row after the last one of each group,
    /// without padding, `row_offsets[g] + expert_counts[g]`.
    pub row_ends: Option<Tensor<1>>,
    /// i32 `[capacity]`, with [`m_indices`](crate::ByExpert::m_indices): the group of each row, and -1 in
    /// rows without a token: those that pad a group, and all from `row_offsets[groups]` on. DeepGEMM's
    /// contiguous layout takes it, with an alignment of 128.
    pub m_indices: Option<Tensor<1>>,
    /// i64 `[local_experts, ranks]`, of padded blocks only: the rows of each source rank in each expert's
    /// block, in the lower 32 bits their number, in the upper ones the row of the block at which they begin.
    pub source_ranges: Option<Tensor<2>>,
}

/// A rank's inputs of a combine.
///
/// By expert, `row_weights` and `epilogue` need kernels with options
/// ([`Config::options`](crate::Config::options)). They may differ between ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CombineInput {
    /// BF16 `[capacity, hidden]`, 16-byte aligned: the experts' outputs in the order of the
    /// dispatch's `tokens`, with the same capacity. May be the same memory. In layouts that
    /// [keep rows as they came](crate::Config::receive), a row is the sum over this rank's experts of the
    /// token, with the router's weights applied; rows without a token are not read.
    pub expert_rows: Tensor<2>,
    /// f32 `[tokens, top_k]`, exact mode only: the weights of this rank's own tokens, with which this rank
    /// multiplies the rows that return, in f32. `None` keeps the rows of a token apart.
    pub topk_weights: Option<Tensor<2>>,
    /// f32 `[capacity]`, reduced mode by expert only: the weight of each of `expert_rows`, instead of
    /// the router's weight that came with its token. Not read for rows of no token.
    pub row_weights: Option<Tensor<1>>,
    /// BF16 `[tokens, hidden]` each, 16-byte aligned, not by expert: a token's sum begins with
    /// `+0 + initial[0] + initial[1]` in f32, without those that are `None`, and the ranks' rows follow. None
    /// of them may overlap `combined`.
    pub initial: [Option<Tensor<2>>; 2],
    /// f32 `[capacity, top_k]`, with [`KeptRows::combine_weights`](crate::KeptRows::combine_weights) and only
    /// then: weights that return with the rows, to [`CombineOutput::Weighted`].
    pub received_weights: Option<Tensor<2>>,
    /// Steps on the sums of this rank's own tokens. In layouts that keep rows as they came, those of
    /// [`CombineSteps`](crate::CombineSteps).
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
    /// combine has weights. BF16; f16 and f32 need by expert kernels with options
    /// ([`Config::options`](crate::Config::options)).
    ///
    /// Products and sums are rounded to f32 one by one, beginning with +0: rows of -0 alone, and no rows, sum
    /// to +0. The order is fixed. In exact mode this rank adds the rows by top-k slot. In reduced mode each
    /// rank adds its rows of the token by top-k slot and rounds the sum to BF16, and this rank adds these
    /// sums by rank. Then follow the [shared expert](crate::Config::shared_expert)'s row and the
    /// [epilogue](CombineInput::epilogue), if any, and one rounding to the tensor's elements.
    ///
    /// Of rows that [stay as they came](crate::Config::receive), the sum of
    /// [`initial`](CombineInput::initial) and one row for each rank with an expert of the token, by rank.
    Summed(Tensor<2>),
    /// The same sums, and weights that came back with the rows: with
    /// [`KeptRows::combine_weights`](crate::KeptRows::combine_weights) and only then.
    Weighted {
        /// The sums, as in [`Summed`](Self::Summed).
        combined: Tensor<2>,
        /// f32 `[tokens, top_k]`, written: for each slot the value of
        /// [`received_weights`](CombineInput::received_weights) on the rank of its expert, in the row of this
        /// token and the slot's column. +0 in slots that are not routed, and if the row did not fit in the
        /// rank's outputs. A weight whose bits are all ones arrives as `0xfffffffe`.
        weights: Tensor<2>,
    },
    /// BF16 `[tokens, top_k, hidden]`: each row by itself, bit for bit, +0 for slots that were not routed. In
    /// exact mode without weights.
    Apart(Tensor<3>),
}

impl CombineOutput {
    /// Returns the same elements as rows: `[tokens, hidden]` or `[tokens * top_k, hidden]`.
    pub const fn rows(&self) -> Tensor<2> {
        match *self {
            Self::Summed(tensor)
            | Self::Weighted {
                combined: tensor, ..
            } => tensor,
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
    /// The weights that come back, if there are any.
    pub const fn weights(&self) -> Option<Tensor<2>> {
        match *self {
            Self::Weighted { weights, .. } => Some(weights),
            Self::Summed(_) | Self::Apart(_) => None,
        }
    }

    /// Type of the result's elements. Rows that are kept apart are BF16, and so is [`DataType::U16`].
    pub(crate) fn element(&self) -> Result<OutputElement, TensorError> {
        let given = match self {
            Self::Apart(_) => return Ok(OutputElement::Bf16),
            Self::Summed(combined) | Self::Weighted { combined, .. } => combined.data_type,
        };
        if given == DataType::U16 {
            return Ok(OutputElement::Bf16);
        }
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
            x_scales: None,
            kept_ids: None,
        }
    }
}

pub(crate) fn address_or_none<const N: usize>(tensor: Option<Tensor<N>>) -> u64 {
    tensor.map_or(0, |tensor| tensor.at.address())
}
