//! The word for "not written yet", and how rows of dispatch avoid it.

/// Contents of every word of a row with inline flags until it is written: in BF16 two NaNs that rounding
/// never produces (it makes every NaN `0x7fff`: PTX ISA, "cvt"; in e4m3 `0x7f`).
pub const SENTINEL: u32 = u32::MAX;

/// Word that a row of dispatch carries for `word`, with inline flags or flagged: one less for [`SENTINEL`],
/// else the word itself.
///
/// Two NaNs of BF16 stay NaNs, and so does a weight; [`NOT_ROUTED`](crate::NOT_ROUTED) stays an expert that
/// does not exist. Among scales only four e8m0 NaNs make such a word, and [`restore_sentinel`] recovers them.
#[inline(always)]
pub const fn avoid_sentinel(word: u32) -> u32 {
    if word < SENTINEL { word } else { SENTINEL - 1 }
}

/// Word that no row carries among its scales: [`restore_sentinel`] takes it for [`SENTINEL`]. Only a user who
/// encodes tokens can give it: no encoder makes f32 scales that are NaN, e4m3 scales of `0xff`, or e8m0
/// scales of 254.
pub const LOST_SCALES: u32 = SENTINEL - 1;

/// Word of scales from its [`avoid_sentinel`]. No word of scales is [`LOST_SCALES`].
#[inline(always)]
pub const fn restore_sentinel(word: u32) -> u32 {
    if word == SENTINEL - 1 { SENTINEL } else { word }
}
