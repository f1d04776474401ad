//! Formats on a GPU: how a lane's 16 elements become payload and scales. The arithmetic is
//! `ferry-layout`'s; conversions are instructions where the target has them.

use ferry_layout::fp8::{self, Divisor};
use ferry_layout::{mxfp4, mxfp8, nvfp4};

use crate::ptx::memory::Vector;
use crate::ptx::{number, thread};

/// Elements that a lane encodes at a time.
pub const LANE_ELEMENTS: u32 = 16;

/// What a lane's elements became.
pub struct Encoded {
    /// Its payload: 16 bytes, or 8 in the first half.
    pub payload: Vector,
    /// On every lane whose number is a multiple of [`Encoder::WORD_LANES`], a word of scales.
    pub scales: u32,
}

/// A format with scales.
pub trait Encoder {
    /// Bytes that a lane's elements become.
    const PAYLOAD_BYTES: u32;
    /// Lanes whose scales fill a word.
    const WORD_LANES: u32;

    /// Encodes the lane's elements. All lanes.
    fn encode(&self, values: &[f32; 16]) -> Encoded;
}

/// Blockwise FP8.
pub struct BlockwiseFp8;
/// MXFP8.
pub struct Mxfp8;
/// MXFP4.
pub struct Mxfp4;
/// NVFP4 under a global scale.
pub struct Nvfp4 {
    /// What scales are multiplied with.
    pub global: f32,
    /// `1.0 / global`.
    pub inverse: f32,
}

impl Nvfp4 {
    /// Under `global`.
    #[inline(always)]
    pub fn new(global: f32) -> Self {
        Self {
            global,
            inverse: 1.0 / global,
        }
    }
}

/// The largest magnitude of a lane's elements; a NaN does not count.
#[inline(always)]
pub fn largest(values: &[f32; 16]) -> f32 {
    let mut amax = 0.0;
    core::array::from_fn::<(), 16, _>(|index| amax = fp8::larger(amax, values[index]));
    amax
}

/// The largest magnitude of this lane and the one whose number differs in the bits of `lanes`.
#[inline(always)]
pub fn larger_of_partner(amax: f32, lanes: u32) -> f32 {
    fp8::larger(
        amax,
        f32::from_bits(thread::from_partner(amax.to_bits(), lanes)),
    )
}

/// Sixteen elements as e4m3, after `divide`.
#[inline(always)]
fn e4m3(values: &[f32; 16], divide: impl Fn(f32) -> f32) -> Vector {
    core::array::from_fn(|quad| {
        let value = |index: usize| divide(values[4 * quad + index]);
        number::e4m3_quad(value(0), value(1), value(2), value(3))
    })
}

/// Sixteen elements as e2m1 after multiplication with `multiplier`, in the first two words.
#[inline(always)]
fn e2m1(values: &[f32; 16], multiplier: f32) -> Vector {
    let word = |half: usize| {
        number::e2m1_eight(core::array::from_fn(|index| {
            values[8 * half + index] * multiplier
        }))
    };
    [word(0), word(1), 0, 0]
}

/// The codes of lanes `4 * step` apart in one word, on lanes that are multiples of `4 * step`.
#[inline(always)]
fn gather_codes(code: u8, step: u32) -> u32 {
    let pair = code as u32 | thread::from_partner(code as u32, step) << 8;
    pair | thread::from_partner(pair, 2 * step) << 16
}

impl Encoder for BlockwiseFp8 {
    const PAYLOAD_BYTES: u32 = 16;
    const WORD_LANES: u32 = 8;

    #[inline(always)]
    fn encode(&self, values: &[f32; 16]) -> Encoded {
        let amax = larger_of_partner(largest(values), 1);
        let amax = larger_of_partner(larger_of_partner(amax, 2), 4);
        let scale = fp8::scale(amax);
        let divisor = Divisor::new(scale);
        Encoded {
            payload: e4m3(values, |value| divisor.divide(value, number::multiply_add)),
            scales: scale.to_bits(),
        }
    }
}

impl Encoder for Mxfp8 {
    const PAYLOAD_BYTES: u32 = 16;
    const WORD_LANES: u32 = 8;

    #[inline(always)]
    fn encode(&self, values: &[f32; 16]) -> Encoded {
        let amax = larger_of_partner(largest(values), 1);
        let scale = mxfp8::scale_bits(amax);
        let multiplier = mxfp8::multiplier(amax, scale);
        Encoded {
            payload: e4m3(values, |value| value * multiplier),
            scales: gather_codes(scale, 2),
        }
    }
}

impl Encoder for Mxfp4 {
    const PAYLOAD_BYTES: u32 = 8;
    const WORD_LANES: u32 = 8;

    #[inline(always)]
    fn encode(&self, values: &[f32; 16]) -> Encoded {
        let amax = larger_of_partner(largest(values), 1);
        let scale = mxfp4::scale_bits(amax);
        Encoded {
            payload: e2m1(values, mxfp4::multiplier(scale)),
            scales: gather_codes(scale, 2),
        }
    }
}

impl Encoder for Nvfp4 {
    const PAYLOAD_BYTES: u32 = 8;
    const WORD_LANES: u32 = 4;

    #[inline(always)]
    fn encode(&self, values: &[f32; 16]) -> Encoded {
        let scale = nvfp4::scale_bits(largest(values), self.global);
        Encoded {
            payload: e2m1(values, nvfp4::multiplier(scale, self.inverse)),
            scales: gather_codes(scale, 1),
        }
    }
}
