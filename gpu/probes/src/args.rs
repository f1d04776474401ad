//! Arguments of the kernels that measure the machine, with the places of their words; and those of the
//! kernels that convert numbers and write tensors.

use bytemuck::{Pod, Zeroable};

use ferry_layout::MAX_RANKS;
use ferry_layout::silu::Activation;

/// Arguments of every probe, passed by value. Each probe reads the fields that it needs.
///
/// Every rank has *probe memory*, which all others map. It begins with 64-bit words, at the byte offsets that
/// the constants give; rows follow from [`offset`](Self::offset) on. Addresses are device addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ProbeArgs {
    /// `[u64; ranks]`: each rank's probe memory.
    pub peers: u64,
    /// The rows to copy, `rows` of them.
    pub source: u64,
    /// Start of the rows in each rank's probe memory, in bytes.
    pub offset: u64,
    /// A word to wait for before anything else, or 0.
    pub start_flag: u64,
    /// Least value of the word at `start_flag` that ends the wait.
    pub start_value: u64,
    /// Longest wait, in nanoseconds from the kernel's start.
    pub deadline_ns: u64,
    /// Bytes of a row, a multiple of 16.
    pub row_bytes: u32,
    /// Rows for each peer; all get the same.
    pub rows: u32,
    /// Parts in which a row is copied, each by a warp (or block) of its own.
    pub parts: u32,
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub ranks: u32,
    /// Offset of the first peer: peers are ranks `rank + first_peer` and up; 0 includes the own one.
    pub first_peer: u32,
    /// Number of peers.
    pub peer_count: u32,
    /// Round trips of the ping.
    pub repeats: u32,
}

impl ProbeArgs {
    /// Bytes of the words at the start of probe memory.
    pub const WORDS_BYTES: u64 = 1024;
    /// Barriers that this rank has passed.
    pub const COUNT: u64 = 8 * MAX_RANKS as u64;
    /// Byte offset, in probe memory, of the word that a peer's ping sets.
    pub const PING: u64 = Self::COUNT + 128;
    /// Round trips so far.
    pub const PINGS: u64 = Self::COUNT + 256;
    /// Not zero: a wait timed out.
    pub const TIMED_OUT: u64 = Self::COUNT + 384;
    /// Largest part of a row, in bytes, that the bulk copy takes. [`parts`](Self::parts) must be large
    /// enough.
    pub const BULK_BYTES: u32 = 15_360;

    /// Bytes of a part of a row.
    pub const fn part_bytes(&self) -> u32 {
        self.row_bytes.div_ceil(self.parts).next_multiple_of(16)
    }

    /// Byte offset, in probe memory, of the word in which rank `rank` reports its arrival at the barrier.
    pub const fn arrival(rank: u32) -> u64 {
        8 * rank as u64
    }
}

const _: () = assert!(ProbeArgs::TIMED_OUT + 8 <= ProbeArgs::WORDS_BYTES);

/// Results of the converting kernel for a pair of f32, `a` and `b`, as one 32-bit word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Conversion {
    /// BF16: `a` in the low half, `b` in the high.
    Bf16,
    /// e4m3: `a`, `b`, `b`, `a` from the lowest byte up, so that each takes every place of an instruction.
    E4m3,
    /// e2m1: `a`, `b`, `a`, `b`, `b`, `a`, `b`, `a` from the lowest four bits up, for the same reason.
    E2m1,
    /// The same by the function for multipliers that are powers of two.
    ScaledE2m1,
    /// The larger magnitude of `a`, which is no NaN, and `b`, as [`larger`](ferry_layout::fp8::larger).
    Larger,
    /// `a / b` by [`Divisor`](ferry_layout::fp8::Divisor).
    Quotient,
    /// One over `a`, which is at least 1 and finite.
    Reciprocal,
    /// Multiplier of NVFP4 for a scale, whose code is the lowest byte of `a`, and the inverse `b` of a global
    /// scale.
    Multiplier,
    /// [`Activation::apply`] for gate `a` and up `b`.
    Silu,
    /// The same, clamped.
    ClampedSilu,
    /// The places of the clamped activation's sigmoids:
    /// [`GateRange::offsets`](ferry_layout::sigmoids::GateRange::offsets) of the BF16s in the halves of `a`.
    Sigmoids,
    /// Number of set bits of a 64-bit word with `a` as its low half.
    CountedBits,
    /// The number of that word's lowest set bit, 64 if there is none.
    LowestBit,
}

impl Conversion {
    /// Its number in [`ConvertArgs`].
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// The conversion with a number.
    #[inline(always)]
    pub const fn of_number(number: u32) -> Self {
        match number {
            0 => Self::Bf16,
            1 => Self::E4m3,
            2 => Self::E2m1,
            3 => Self::ScaledE2m1,
            4 => Self::Larger,
            5 => Self::Quotient,
            6 => Self::Reciprocal,
            7 => Self::Multiplier,
            8 => Self::Silu,
            9 => Self::ClampedSilu,
            10 => Self::Sigmoids,
            11 => Self::CountedBits,
            _ => Self::LowestBit,
        }
    }
}

/// Arguments of the converting kernel, by value. Addresses are device addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct ConvertArgs {
    /// `[u32; 2 * count]`: the bits of each pair.
    pub input: u64,
    /// `[u32; count]`, written.
    pub output: u64,
    /// Number of pairs.
    pub count: u32,
    /// [`Conversion::number`].
    pub conversion: u32,
    /// See [`Activation`].
    pub alpha: f32,
    /// See [`Activation`].
    pub limit: f32,
}

impl ConvertArgs {
    /// The clamped activation.
    #[inline(always)]
    pub const fn clamped(&self) -> Activation {
        Activation::Clamped {
            alpha: self.alpha,
            limit: self.limit,
        }
    }
}

/// A tensor that the writing kernel copies. Addresses are device addresses, multiples of 4.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct TensorCopy {
    /// `[u32; words]`.
    pub from: u64,
    /// `[u32; words]`, written.
    pub to: u64,
    /// 32-bit words; 0 for no tensor.
    pub words: u64,
}

/// Arguments of the writing kernel, by value: tensors that it copies one after the other.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct WriteArgs {
    /// Copies in their order.
    pub copies: [TensorCopy; 4],
}

/// Arguments of the clearing kernel, by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ClearArgs {
    /// `[u32; 4 * vectors]`, written. A device address, a multiple of 16.
    pub at: u64,
    /// Number of vectors of 16 bytes.
    pub vectors: u64,
}

/// Checks that [`Conversion::of_number`] undoes [`Conversion::number`] for every conversion.
const _: () = {
    let mut number = 0;
    while number <= Conversion::LowestBit.number() {
        assert!(Conversion::of_number(number).number() == number);
        number += 1;
    }
};
