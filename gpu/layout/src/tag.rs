//! Epochs, and words that carry their epoch with them.

/// The number of a dispatch-combine round, from 1. It only grows and is never reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Epoch(pub u64);

impl Epoch {
    /// What words of the round carry: 1 to 2^32 - 1 in turn, never the 0 of a word that was not written yet.
    #[inline(always)]
    const fn tag(self) -> u32 {
        // The remainder of the division by 2^32 - 1, with that number for 0: the halves' sum, its carry added.
        let (sum, carry) = (self.0 as u32).overflowing_add((self.0 >> 32) as u32);
        sum.wrapping_add(carry as u32)
    }
}

/// A signal word that carries a 32-bit value and the tag of its epoch, so that it needs no second word and no
/// fence: whoever sees the tag sees the value.
///
/// A word of `epoch` stays until its reader has finished `epoch`, so the tag is compared for
/// equality. A word that is not written in every round keeps an old tag, which could be taken
/// for a new one only if it was last written exactly 2^32 - 1 rounds ago.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tagged(pub u64);

impl Tagged {
    /// `value`, marked with `epoch`.
    #[inline(always)]
    pub const fn new(epoch: Epoch, value: u32) -> Self {
        Self((epoch.tag() as u64) << 32 | value as u64)
    }

    /// The value, if the word was written in `epoch`.
    #[inline(always)]
    pub const fn value(self, epoch: Epoch) -> Option<u32> {
        if (self.0 >> 32) as u32 == epoch.tag() {
            Some(self.0 as u32)
        } else {
            None
        }
    }
}
