//! What kernels with options take behind the arguments of those without.

use bytemuck::{Pod, Zeroable};

use crate::{Arguments, CombineArgs, Common, DispatchArgs, Table, Tensor};

/// Options of dispatch. All zero: none.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct DispatchOptions {
    /// u32 `[1]`, read when the launch begins: how many of the tokens there are; 0: all of them.
    pub tokens_on_device: u64,
    /// Ranks that share the shared expert's tokens; 0: there is no shared expert; 1: this rank has all of
    /// its own tokens.
    pub shared_of: u32,
    /// Which of those ranks this one is.
    pub shared_index: u32,
    /// Where nothing travels: the first expert of this rank. Else 0.
    pub first_expert: u32,
    /// Where nothing travels: the experts of the whole group. Else 0.
    pub all_experts: u32,
}

/// Options of combine. All zero: none.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct CombineOptions {
    /// f32 `[row_capacity]`, what each expert row is weighted with; 0: what the row's header says.
    pub row_weights: u64,
    /// As [`DispatchOptions::shared_of`]: the shared expert's rows are the first of the expert rows.
    pub shared_of: u32,
    /// As [`DispatchOptions::shared_index`].
    pub shared_index: u32,
    /// Not zero: this round's dispatch read how many tokens there are, and kept the number.
    pub tokens_on_device: u32,
    /// What `combined` is made of: 0 BF16, 1 f16, 2 f32.
    pub output: u32,
}

impl DispatchOptions {
    /// No option: what kernels without options are given, so that the compiler drops all code for them.
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
        self.options != CombineOptions::NONE || self.epilogue != [0; MAX_EPILOGUE_BYTES / 8]
    }
}

impl CombineOptions {
    /// No option.
    pub const NONE: Self = Self {
        row_weights: 0,
        shared_of: 0,
        shared_index: 0,
        tokens_on_device: 0,
        output: 0,
    };
}

/// Arguments of the dispatch kernels with options. Those without options take what comes first, the same
/// value's `args`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct DispatchWith {
    /// As without options.
    pub args: DispatchArgs,
    /// The options.
    pub options: DispatchOptions,
}

/// Arguments of the combine kernels with options. The epilogue travels as it is: plain data, at most
/// [`MAX_EPILOGUE_BYTES`], aligned to at most 8 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CombineWith<E> {
    /// As without options.
    pub args: CombineArgs,
    /// The options.
    pub options: CombineOptions,
    /// What is done with each sum.
    pub epilogue: E,
}

/// Most bytes of an epilogue: with the other arguments less than a kernel parameter may take.
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
    fn user_table(&self, table: Table) -> u64 {
        self.args.user_table(table)
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
    fn user_table(&self, table: Table) -> u64 {
        self.args.user_table(table)
    }
}

/// As for the arguments without options: a kernel parameter is at most 4 KiB.
const _: () = assert!(
    size_of::<DispatchWith>() <= 4096
        && size_of::<CombineWith<EpilogueWords>>() <= 4096
        && size_of::<CombineArgs>().is_multiple_of(8)
);
