//! The word that says "not written yet", and how rows of dispatch avoid it.

/// What every word of a row with inline flags holds that has not come: in BF16 two NaNs that rounding does
/// not make (it makes `0x7fff` of every NaN: PTX ISA, "cvt"), and e4m3 likewise (`0x7f`).
pub const SENTINEL: u32 = u32::MAX;

/// What travels for `word` in a row of dispatch, with inline flags or flagged: never [`SENTINEL`], but one
/// less.
///
/// Two NaNs of BF16 stay NaNs, and so does a weight; [`NOT_ROUTED`](crate::NOT_ROUTED) stays an expert that
/// there is not. Of scales only four e8m0 NaNs make such a word, and [`restore_sentinel`] finds them again.
#[inline(always)]
pub const fn avoid_sentinel(word: u32) -> u32 {
    if word < SENTINEL { word } else { SENTINEL - 1 }
}

/// The word of scales that was [`avoid_sentinel`]. None is one less than [`SENTINEL`]: f32 scales are
/// positive, e4m3 is never made `0xff`, and e8m0 never 254.
#[inline(always)]
pub const fn restore_sentinel(word: u32) -> u32 {
    if word == SENTINEL - 1 { SENTINEL } else { word }
}
