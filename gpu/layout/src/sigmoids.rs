//! A table of the sigmoids of all BF16s: to look one up takes a GPU fewer instructions than to compute
//! it. What stands in it is [`silu::sigmoid`](crate::silu::sigmoid), so that the bits are the same.
//!
//! BF16s of one sign below [`FIRST`] have one sigmoid, 1/2, and so have those above [`LAST`], 1 or 0; a
//! NaN's is multiplied with the NaN.

/// The magnitude, as bits of a BF16, that the table begins with for either sign: about 2^-24.5.
pub const FIRST: u32 = 0x3331;
/// The last one: 98.5.
pub const LAST: u32 = 0x42c5;
/// The place of the first negative one: a power of two, so that the sign is a bit of the place.
pub const NEGATIVE: u32 = 1 << 12;
/// Places, of an f32 each; those between the last positive and the first negative one are not used.
pub const PLACES: u32 = NEGATIVE + LAST - FIRST + 1;

const _: () = assert!(LAST - FIRST < NEGATIVE && 4 * PLACES <= 1 << 16);

/// Bytes from the start of the table to the sigmoids of two BF16s, in the halves that they are in.
/// `clamp` brings both halves of magnitudes between [`FIRST`] and [`LAST`] and takes the former away
/// from them.
#[inline(always)]
pub fn offsets(pair: u32, clamp: impl Fn(u32) -> u32) -> u32 {
    // Half of where signs are in a BF16.
    const SIGNS: u32 = 4 * NEGATIVE * 0x1_0001;
    const _: () = assert!(4 * NEGATIVE == 0x8000 / 2);
    clamp(pair & 0x7fff_7fff) << 2 | pair >> 1 & SIGNS
}

/// What [`offsets`] needs, where there is no instruction for it.
#[inline(always)]
pub fn clamped(magnitudes: u32) -> u32 {
    let clamped = |magnitude: u32| magnitude.clamp(FIRST, LAST) - FIRST;
    clamped(magnitudes & 0xffff) | clamped(magnitudes >> 16) << 16
}

/// The BF16, as f32, whose sigmoid stands at a place.
#[inline(always)]
pub fn argument(place: u32) -> f32 {
    let (magnitude, sign) = (FIRST + place % NEGATIVE, place / NEGATIVE);
    f32::from_bits(magnitude << 16 | sign << 31)
}
