//! Epochs, and words that carry their epoch with them.

/// The number of a dispatch-combine round, from 1. It only grows and is never reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The epoch after `finished`, 0 before the first. Skips epochs whose low half is 0, which is that of a
    /// [`Tagged`] word that was never written.
    #[inline(always)]
    pub const fn after(finished: u64) -> Self {
        let next = finished + 1;
        Self(next + (next as u32 == 0) as u64)
    }

    /// Number of rounds up to this one: of each 2^32 epochs one is skipped.
    #[inline(always)]
    pub const fn rounds(self) -> u64 {
        self.0 - (self.0 >> 32)
    }
}

/// A signal word that carries a 32-bit value and the low 32 bits of its epoch, so that it needs no second
/// word and no fence: a reader that sees the tag sees the value.
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
        Self((epoch.0 & 0xffff_ffff) << 32 | value as u64)
    }

    /// The value, if the word was written in `epoch`.
    #[inline(always)]
    pub const fn value(self, epoch: Epoch) -> Option<u32> {
        if (self.0 >> 32) as u32 == epoch.0 as u32 {
            Some(self.0 as u32)
        } else {
            None
        }
    }
}
