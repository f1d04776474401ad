//! Options of kernels, which follow the arguments of the kernels without options.

use bytemuck::{Pod, Zeroable};

use crate::launch::args::{Arguments, CombineArgs, Common, DispatchArgs, Tensor};
use crate::launch::encoded::EncodedInput;
use crate::launch::epilogue::OutputElement;
use crate::launch::group_tables::GroupTables;
use crate::memory::workspace::Table;
use crate::plan::receive::ReceiveLayout;
use crate::plan::shared_tokens::SharedTokens;

/// Options of dispatch; [`NONE`](Self::NONE): no option.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct DispatchOptions {
    /// u32 `[1]`, read when the launch begins: the number of tokens; address 0: it is [`Common::tokens`].
    pub tokens_on_device: u64,
    /// Ranks that share the shared expert's tokens; 0: there is no shared expert; 1: this rank has all of its
    /// own tokens.
    pub shared_of: u32,
    /// Index of this rank among them.
    pub shared_index: u32,
    /// First expert of this rank with `skip_a2a`. Else 0.
    pub first_expert: u32,
    /// Experts of the whole group with `skip_a2a`. Else 0.
    pub all_experts: u32,
    /// Not zero: `topk_ids` are i64, and so are the ids of [`ReceivedRows`].
    pub wide_ids: u32,
    /// Padding, zero.
    pub reserved: u32,
    /// Outputs of rows that stay as they came.
    pub rows: ReceivedRows,
    /// Tokens that the user has encoded.
    pub encoded: EncodedInput,
    /// Outputs of rows in expert order.
    pub groups: GroupTables,
}

/// Outputs of a dispatch whose rows stay as they came. All zero: rows are put in expert order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ReceivedRows {
    /// i32 or i64 `[row_capacity, top_k]`, written: local expert ids, -1 in slots of other ranks' experts and
    /// in rows without a token.
    pub ids: u64,
    /// f32 `[row_capacity, top_k]`, written: the router's weights, 0 where the id is -1.
    pub weights: u64,
    /// i32 `[ranks]`, written: rows of each source.
    pub of_source: u64,
    /// i32 `[local experts]`, written: assignments to each expert.
    pub of_expert: u64,
    /// Not zero: rows stay as they came. Only the host reads it; kernels are of either kind.
    pub is_on: u32,
    /// [`ReceiveLayout::number`].
    pub layout: u32,
    /// Not zero: rows without a token are zeros (payload and scales).
    pub clears_absent: u32,
    /// Not zero: scales of blockwise FP8 are `[hidden / 128, row_capacity]`.
    pub transposes_scales: u32,
}

impl ReceivedRows {
    /// Rows in expert order.
    pub const NONE: Self = Self {
        ids: 0,
        weights: 0,
        of_source: 0,
        of_expert: 0,
        is_on: 0,
        layout: 0,
        clears_absent: 0,
        transposes_scales: 0,
    };

    /// Layout of the rows, if they stay as they came.
    #[inline(always)]
    pub const fn layout(&self) -> ReceiveLayout {
        ReceiveLayout::of_number(self.layout)
    }
}

/// Options of combine. All zero: no option.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct CombineOptions {
    /// f32 `[row_capacity]`, the weight of each expert row; address 0: the weights of the rows' headers.
    pub row_weights: u64,
    /// Ranks that share the shared expert's tokens, as [`DispatchOptions::shared_of`]. The shared expert's
    /// rows are the first of the expert rows.
    pub shared_of: u32,
    /// Index of this rank among them.
    pub shared_index: u32,
    /// Not zero: this round's dispatch read the number of tokens on the device, and kept it.
    pub tokens_on_device: u32,
    /// Element type of `combined`: [`OutputElement::number`].
    pub output: u32,
    /// Not zero: there is an epilogue, even if all its bytes are zero. Only the host reads it.
    pub has_epilogue: u32,
    /// Padding, zero.
    pub reserved: u32,
    /// Inputs of a combine of rows that stayed as they came.
    pub rows: ReturnedRows,
}

/// Inputs and outputs of a combine after a dispatch whose rows stayed as they came: one expert row for each
/// of them. All zero: expert rows are in expert order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ReturnedRows {
    /// BF16 `[tokens, hidden]`, with which sums begin; 0 for none.
    pub initial: u64,
    /// BF16 `[tokens, hidden]`, which is added to it; 0 for none.
    pub second_initial: u64,
    /// f32 `[row_capacity, top_k]`: weights that travel back with the rows; 0 for none.
    pub weights: u64,
    /// f32 `[tokens, top_k]`, written: each slot's weight from the rank of its expert, 0 if it is not routed;
    /// 0 for none.
    pub combined_weights: u64,
    /// Not zero: rows stayed as they came. Only the host reads it; kernels are of either kind.
    pub is_on: u32,
    /// [`ReceiveLayout::number`] of the dispatch.
    pub layout: u32,
}

impl ReturnedRows {
    /// Expert rows in expert order.
    pub const NONE: Self = Self {
        initial: 0,
        second_initial: 0,
        weights: 0,
        combined_weights: 0,
        is_on: 0,
        layout: 0,
    };

    /// Whether sums begin with the user's tensors.
    #[inline(always)]
    pub const fn has_initial(&self) -> bool {
        self.initial != 0 || self.second_initial != 0
    }

    /// Layout of the dispatch's rows, if they stayed as they came.
    #[inline(always)]
    pub const fn layout(&self) -> ReceiveLayout {
        ReceiveLayout::of_number(self.layout)
    }
}

impl DispatchOptions {
    /// No option. Kernels without options use this constant, so that the compiler drops all code for options.
    pub const NONE: Self = Self {
        tokens_on_device: 0,
        shared_of: 0,
        shared_index: 0,
        first_expert: 0,
        all_experts: 0,
        wide_ids: 0,
        reserved: 0,
        rows: ReceivedRows::NONE,
        encoded: EncodedInput::NONE,
        groups: GroupTables::NONE,
    };

    /// Whether there is a shared expert.
    #[inline(always)]
    pub const fn has_shared_expert(&self) -> bool {
        self.shared_of != 0
    }

    /// This rank's tokens of the shared expert, of `tokens` tokens.
    #[inline(always)]
    pub const fn shared(&self, tokens: u32) -> SharedTokens {
        SharedTokens::of(tokens, self.shared_of, self.shared_index)
    }
}

impl DispatchWith {
    /// Arguments without options.
    pub const fn plain(args: DispatchArgs) -> Self {
        let options = DispatchOptions::NONE;
        Self { args, options }
    }

    /// Whether there is any option.
    pub fn has_options(&self) -> bool {
        self.options != DispatchOptions::NONE
    }
}

impl CombineWith<EpilogueWords> {
    /// Arguments without options and epilogue.
    pub const fn plain(args: CombineArgs) -> Self {
        Self {
            args,
            options: CombineOptions::NONE,
            epilogue: [0; MAX_EPILOGUE_BYTES / 8],
        }
    }

    /// Whether there is any option or epilogue.
    pub fn has_options(&self) -> bool {
        self.options != CombineOptions::NONE
    }
}

impl CombineOptions {
    /// This rank's tokens of the shared expert, of `tokens` tokens.
    #[inline(always)]
    pub const fn shared(&self, tokens: u32) -> SharedTokens {
        SharedTokens::of(tokens, self.shared_of, self.shared_index)
    }

    /// No option.
    pub const NONE: Self = Self {
        row_weights: 0,
        shared_of: 0,
        shared_index: 0,
        tokens_on_device: 0,
        output: 0,
        has_epilogue: 0,
        reserved: 0,
        rows: ReturnedRows::NONE,
    };

    /// Whether sums are only rounded to BF16, and no shared expert's row is added.
    #[inline(always)]
    pub const fn only_rounds(&self) -> bool {
        let begins_with_zero = self.rows.initial == 0 && self.rows.second_initial == 0;
        self.shared_of == 0 && begins_with_zero && matches!(self.element(), OutputElement::Bf16)
    }

    /// The same options if [`only_rounds`](Self::only_rounds) holds, in constants, so that the compiler drops
    /// the protocol's code for anything else.
    #[inline(always)]
    pub const fn only_rounding(&self) -> Self {
        Self {
            shared_of: Self::NONE.shared_of,
            shared_index: Self::NONE.shared_index,
            output: Self::NONE.output,
            ..*self
        }
    }

    /// Element type of `combined`.
    #[inline(always)]
    pub const fn element(&self) -> OutputElement {
        OutputElement::of_number(self.output)
    }

    /// Row of the shared expert that is added to a token of a rank with `tokens` tokens; `None` if there is
    /// none.
    #[inline(always)]
    pub const fn shared_row(&self, tokens: u32, token: u32) -> Option<u32> {
        if self.shared_of == 0 {
            return None;
        }
        let SharedTokens { start, count } = self.shared(tokens);
        // Wraps around below the start.
        let row = token.wrapping_sub(start);
        if row < count { Some(row) } else { None }
    }
}

/// Arguments of the dispatch kernels with options. Kernels without options take the same value's `args`,
/// which come first.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct DispatchWith {
    /// Arguments that kernels without options take.
    pub args: DispatchArgs,
    /// The options.
    pub options: DispatchOptions,
}

/// Arguments of the combine kernels with options. The epilogue is passed by value: plain data, at most
/// [`MAX_EPILOGUE_BYTES`], aligned to at most 8 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CombineWith<E> {
    /// Arguments that kernels without options take.
    pub args: CombineArgs,
    /// The options.
    pub options: CombineOptions,
    /// Epilogue, applied to each sum.
    pub epilogue: E,
}

/// Most bytes of an epilogue: together with the other arguments they fit in a kernel parameter.
pub const MAX_EPILOGUE_BYTES: usize = 256;

/// Room for any epilogue.
pub type EpilogueWords = [u64; MAX_EPILOGUE_BYTES / 8];

impl Arguments for DispatchWith {
    #[inline(always)]
    fn common(&self) -> &Common {
        self.args.common()
    }

    #[inline(always)]
    fn tensor(&self, tensor: Tensor) -> u64 {
        self.args.tensor(tensor)
    }

    #[inline(always)]
    fn last_word(&self) -> u64 {
        self.options.tokens_on_device
    }

    #[inline(always)]
    fn all_ones_of_input(&self) -> u32 {
        self.options.encoded.all_ones
    }

    #[inline(always)]
    fn row_stride(&self, tensor: Tensor) -> u32 {
        self.args.row_stride(tensor)
    }

    #[inline(always)]
    fn user_table(&self, table: Table) -> u64 {
        match table {
            Table::TokensOnDevice => self.options.tokens_on_device,
            Table::InputScales => self.options.encoded.scales,
            Table::ReceivedIds => self.options.rows.ids,
            Table::ReceivedWeights => self.options.rows.weights,
            Table::SourceRows => self.options.rows.of_source,
            Table::ExpertRows => self.options.rows.of_expert,
            Table::GroupCounts => self.options.groups.counts,
            Table::GroupEnds => self.options.groups.ends,
            Table::WeightsOfRows => self.options.groups.weights,
            Table::GroupsOfRows => self.options.groups.m_indices,
            Table::SourceRanges => self.options.groups.ranges,
            _ => self.args.user_table(table),
        }
    }
}

impl<E: Copy> Arguments for CombineWith<E> {
    #[inline(always)]
    fn common(&self) -> &Common {
        self.args.common()
    }

    #[inline(always)]
    fn tensor(&self, tensor: Tensor) -> u64 {
        match tensor {
            Tensor::Initial => self.options.rows.initial,
            Tensor::SecondInitial => self.options.rows.second_initial,
            _ => self.args.tensor(tensor),
        }
    }

    #[inline(always)]
    fn last_word(&self) -> u64 {
        self.options.row_weights
    }

    #[inline(always)]
    fn row_bytes(&self, tensor: Tensor) -> u32 {
        match tensor {
            Tensor::Combined => self.args.row_bytes(tensor) / 16 * self.options.element().bits(),
            _ => self.args.row_bytes(tensor),
        }
    }

    #[inline(always)]
    fn user_table(&self, table: Table) -> u64 {
        match table {
            Table::RowWeights => self.options.row_weights,
            Table::ReturnedWeights => self.options.rows.weights,
            Table::CombinedWeights => self.options.rows.combined_weights,
            _ => self.args.user_table(table),
        }
    }
}

/// Arguments of kernels that keep received rows as they came.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsTheyCame<A>(pub A);

impl<A: Arguments> Arguments for AsTheyCame<A> {
    const KEEPS_ROWS: bool = true;

    #[inline(always)]
    fn common(&self) -> &Common {
        self.0.common()
    }

    #[inline(always)]
    fn tensor(&self, tensor: Tensor) -> u64 {
        self.0.tensor(tensor)
    }

    #[inline(always)]
    fn last_word(&self) -> u64 {
        self.0.last_word()
    }

    #[inline(always)]
    fn all_ones_of_input(&self) -> u32 {
        self.0.all_ones_of_input()
    }

    #[inline(always)]
    fn row_bytes(&self, tensor: Tensor) -> u32 {
        self.0.row_bytes(tensor)
    }

    #[inline(always)]
    fn row_stride(&self, tensor: Tensor) -> u32 {
        self.0.row_stride(tensor)
    }

    #[inline(always)]
    fn user_table(&self, table: Table) -> u64 {
        self.0.user_table(table)
    }
}

/// A kernel parameter is at most 4 KiB.
const _: () = assert!(
    size_of::<DispatchWith>() <= 4096
        && size_of::<CombineWith<EpilogueWords>>() <= 4096
        && size_of::<CombineArgs>().is_multiple_of(8)
);

#[cfg(test)]
mod tests {
    use super::*;

    /// Each token of the shared expert belongs to one rank, and rank `r` of `w` has
    /// `(tokens + w - r - 1) / w`.
    #[test]
    fn ranks_share_all_tokens_one_after_another() {
        for of in 1..=9 {
            for tokens in 0..=40 {
                let mut next = 0;
                for index in 0..of {
                    let SharedTokens { start, count } = SharedTokens::of(tokens, of, index);
                    assert_eq!(start, next, "rank {index} of {of}, {tokens} tokens");
                    assert_eq!(count, (tokens + of - index - 1) / of);
                    assert_eq!(start, index * (tokens / of) + index.min(tokens % of));
                    next = start + count;
                }
                assert_eq!(next, tokens, "{of} ranks");
            }
        }
        let none = SharedTokens { start: 0, count: 0 };
        assert_eq!(SharedTokens::of(7, 0, 0), none);
    }

    #[test]
    fn sums_are_only_rounded_on_every_rank_without_a_shared_expert_or_another_element() {
        // With `skip_a2a` each rank's launch has the rank's index.
        let options = CombineOptions {
            shared_index: 3,
            row_weights: 64,
            tokens_on_device: 1,
            ..CombineOptions::NONE
        };
        assert!(options.only_rounds());
        let plain = CombineOptions {
            shared_index: 0,
            ..options
        };
        assert_eq!(options.only_rounding(), plain);
        let shared_of = 2;
        assert!(!CombineOptions { shared_of, ..plain }.only_rounds());
        for element in [OutputElement::F16, OutputElement::F32] {
            let output = element.number();
            assert!(!CombineOptions { output, ..plain }.only_rounds());
        }
    }
}
