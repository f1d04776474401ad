//! Options of kernels, which follow the arguments of the kernels without options.

use bytemuck::{Pod, Zeroable};

use crate::args::{Arguments, CombineArgs, Common, DispatchArgs, Tensor};
use crate::epilogue::OutputElement;
use crate::workspace::Table;

/// Options of dispatch. All zero: no option.
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
}

impl DispatchOptions {
    /// No option. Kernels without options use this constant, so that the compiler drops all code for options.
    pub const NONE: Self = Self {
        tokens_on_device: 0,
        shared_of: 0,
        shared_index: 0,
        first_expert: 0,
        all_experts: 0,
    };
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

/// Tokens of the shared expert that one rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedTokens {
    /// The first token.
    pub start: u32,
    /// Number of tokens. Theirs are the first rows of dispatch's outputs, and of the experts' outputs.
    pub count: u32,
}

impl SharedTokens {
    /// Tokens of rank `index` of the `of` ranks that share `tokens` tokens; none if `of` is 0. If the tokens
    /// cannot be divided evenly, the first ranks have one more each.
    #[inline(always)]
    pub const fn of(tokens: u32, of: u32, index: u32) -> Self {
        match of {
            0 => Self { start: 0, count: 0 },
            1 => Self {
                start: 0,
                count: tokens,
            },
            _ => {
                let (each, more) = (tokens / of, tokens % of);
                let before = if index < more { index } else { more };
                Self {
                    start: index * each + before,
                    count: each + (index < more) as u32,
                }
            }
        }
    }
}

impl DispatchOptions {
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
    };

    /// Whether sums are only rounded to BF16, and no shared expert's row is added.
    #[inline(always)]
    pub const fn only_rounds(&self) -> bool {
        self.shared_of == 0 && matches!(self.element(), OutputElement::Bf16)
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
    fn row_stride(&self, tensor: Tensor) -> u32 {
        self.args.row_stride(tensor)
    }

    #[inline(always)]
    fn user_table(&self, table: Table) -> u64 {
        match table {
            Table::TokensOnDevice => self.options.tokens_on_device,
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
        self.args.tensor(tensor)
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
            _ => self.args.user_table(table),
        }
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
