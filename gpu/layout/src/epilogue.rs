//! What a combine does with the sums of a token's rows before it stores them: plain Rust, for every machine.

use bytemuck::{Pod, Zeroable};

/// Elements that an epilogue is given at a time.
pub const EPILOGUE_ELEMENTS: usize = 8;

/// What an epilogue reads of device memory. `tensor` is the address of a tensor's first element,
/// `index` counts elements from there. No tensor, that is address 0, gives `otherwise` everywhere,
/// and takes no branch: what is read of several tensors is on its way at once.
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
/// open, and it may be called once more for elements whose result nobody uses.
pub trait Epilogue: Copy {
    /// Whether nothing is done, so that the compiler drops all code for it.
    const IS_NONE: bool = false;

    /// Whether this one does nothing. Then sums go a shorter way.
    #[inline(always)]
    fn is_none(&self) -> bool {
        Self::IS_NONE
    }

    /// The values of elements `column..column + 8` of a token, of which `values` are the sums: in f32, in
    /// reduced mode after the shared expert's row, if there is one, was added; in exact mode with a shared
    /// expert that row plus the sum rounded to BF16. What is returned is converted once, to what `combined`
    /// is made of. `column` is a multiple of 8.
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

/// The steps that Ferry's own kernels have, in the order of the fields. Each is rounded to f32 by
/// itself. Address 0 leaves a step out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Steps {
    /// f32 `[tokens]`: what a token's sums are multiplied with.
    pub row_scales: u64,
    /// BF16 `[hidden]`, twice: what is added to every token, one after the other.
    pub biases: [u64; 2],
    /// BF16 `[tokens, hidden]`: what is added to each token.
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
            ..
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
        // Of what is added, -0 leaves all numbers as they are, -0 too.
        let scale = memory.f32(self.row_scales, token, 1.0);
        let [first, second] = self.biases.map(|bias| memory.bf16x8(bias, column, -0.0));
        let residual = memory.bf16x8(self.residual, token * self.hidden + column, -0.0);
        core::array::from_fn(|index| {
            values[index] * scale + first[index] + second[index] + residual[index]
        })
    }
}

/// What a combine's result is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OutputElement {
    /// BF16. Every NaN is `0x7fff`.
    #[default]
    Bf16,
    /// IEEE half precision, to nearest even; what is too large becomes infinity, every NaN `0x7fff`.
    F16,
    /// f32, as computed. Every NaN of a sum or of Ferry's own steps is `0x7fff_ffff`; one that an epilogue of
    /// yours makes is as that makes it.
    F32,
}

impl OutputElement {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::F32];

    /// Its number in [`CombineOptions::output`](crate::CombineOptions::output).
    #[inline(always)]
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// The one of a number.
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
