//! Epilogues: changes to the sums of a combine before it stores them. Plain Rust, for every machine.

use bytemuck::{Pod, Zeroable};

/// Elements that an epilogue receives at a time.
pub const EPILOGUE_ELEMENTS: usize = 8;

/// Reads of device memory by an epilogue. `tensor` is the address of a tensor's first element, and `index`
/// counts elements from it. Without a tensor (address 0) every element is `otherwise`; no branch is taken, so
/// that loads from several tensors overlap.
pub trait Load {
    /// Elements `index..index + 8` of a BF16 tensor: exact. They begin at a multiple of 16 bytes.
    fn bf16x8(&self, tensor: u64, index: u64, otherwise: f32) -> [f32; EPILOGUE_ELEMENTS];
    /// Elements `index..index + 8` of an f32 tensor. They begin at a multiple of 16 bytes.
    fn f32x8(&self, tensor: u64, index: u64, otherwise: f32) -> [f32; EPILOGUE_ELEMENTS];
    /// Element `index` of an f32 tensor.
    fn f32(&self, tensor: u64, index: u64, otherwise: f32) -> f32;
}

/// Changes the sums of a combine before they are stored: plain data, which travels with a launch's arguments.
///
/// An `apply` may depend on nothing but its arguments: which warp calls it, how often and in which order is
/// unspecified, and it may be called once more for elements whose result is discarded.
pub trait Epilogue: Copy {
    /// Whether the epilogue never does anything, so that the compiler drops all code for it.
    const IS_NONE: bool = false;

    /// Whether this one does nothing. Sums then take a shorter path.
    #[inline(always)]
    fn is_none(&self) -> bool {
        Self::IS_NONE
    }

    /// Returns elements `column..column + 8` of a token from their sums, `values`. These are f32 and include
    /// the shared expert's row, if there is one; in exact mode they are rounded to BF16 before that row is
    /// added. The result is converted once, to the element type of `combined`. `column` is a multiple of 8.
    fn apply(
        &self,
        memory: &impl Load,
        token: u32,
        column: u32,
        values: [f32; EPILOGUE_ELEMENTS],
    ) -> [f32; EPILOGUE_ELEMENTS];
}

/// Leaves sums as they are.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct NoEpilogue;

impl Epilogue for NoEpilogue {
    const IS_NONE: bool = true;

    #[inline(always)]
    fn apply(
        &self,
        _memory: &impl Load,
        _token: u32,
        _column: u32,
        values: [f32; EPILOGUE_ELEMENTS],
    ) -> [f32; EPILOGUE_ELEMENTS] {
        values
    }
}

/// Steps of Ferry's own kernels, in the order of the fields. Each is rounded to f32 by itself. Address 0
/// skips a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Steps {
    /// f32 `[tokens]`: factors of the tokens' sums.
    pub row_scales: u64,
    /// BF16 `[hidden]`, twice: added to every token, one after the other.
    pub biases: [u64; 2],
    /// BF16 `[tokens, hidden]`: added to each token.
    pub residual: u64,
    /// Elements of a token.
    pub hidden: u64,
}

impl Epilogue for Steps {
    #[inline(always)]
    fn is_none(&self) -> bool {
        let Self {
            row_scales,
            biases: [first, second],
            residual,
            hidden: _,
        } = *self;
        row_scales | first | second | residual == 0
    }

    #[inline(always)]
    fn apply(
        &self,
        memory: &impl Load,
        token: u32,
        column: u32,
        values: [f32; EPILOGUE_ELEMENTS],
    ) -> [f32; EPILOGUE_ELEMENTS] {
        let (token, column) = (token as u64, column as u64);
        // Adding -0 changes no number, not even -0.
        let scale = memory.f32(self.row_scales, token, 1.0);
        let [first, second] = self.biases.map(|bias| memory.bf16x8(bias, column, -0.0));
        let residual = memory.bf16x8(self.residual, token * self.hidden + column, -0.0);
        core::array::from_fn(|index| {
            values[index] * scale + first[index] + second[index] + residual[index]
        })
    }
}

/// Element type of a combine's result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OutputElement {
    /// BF16. Every NaN is `0x7fff`.
    #[default]
    Bf16,
    /// IEEE half precision, to nearest even; infinity for numbers too large, `0x7fff` for every NaN.
    F16,
    /// f32, as computed. Every NaN of a sum or of Ferry's own steps is `0x7fff_ffff`; NaNs that your own
    /// epilogue makes are kept.
    F32,
}

impl OutputElement {
    /// Every element type.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::F32];

    /// Its number in [`CombineOptions::output`](crate::CombineOptions::output).
    #[inline(always)]
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// Element type with a number.
    #[inline(always)]
    pub const fn of_number(number: u32) -> Self {
        match number {
            0 => Self::Bf16,
            1 => Self::F16,
            _ => Self::F32,
        }
    }

    /// Bits of an element.
    #[inline(always)]
    pub const fn bits(self) -> u32 {
        match self {
            Self::Bf16 | Self::F16 => 16,
            Self::F32 => 32,
        }
    }
}
