//! The word by which a rank that has aborted names the rank at fault.

use crate::plan::shape::Rank;

/// The upper half of a word that names a rank. No round has this epoch, nor the 0 of a word that was never
/// written.
const NAMES_RANK: u64 = u32::MAX as u64;

/// Word at [`Window::culprit`](crate::Window::culprit).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CulpritWord(pub u64);

impl CulpritWord {
    /// Names `culprit`.
    #[inline(always)]
    pub const fn of(culprit: Rank) -> Self {
        Self(NAMES_RANK << 32 | culprit.0 as u64)
    }

    /// The rank that the word names, one of `ranks`; `None` if nobody has aborted.
    #[inline(always)]
    pub const fn rank(self, ranks: u32) -> Option<Rank> {
        match self.0 >> 32 == NAMES_RANK && (self.0 as u32) < ranks {
            true => Some(Rank(self.0 as u32)),
            false => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_names_a_rank_of_the_group_or_none() {
        assert_eq!(CulpritWord::of(Rank(3)).rank(4), Some(Rank(3)));
        assert_eq!(CulpritWord::of(Rank(4)).rank(4), None);
        for word in [0, 7, u64::MAX, (NAMES_RANK - 1) << 32] {
            assert_eq!(CulpritWord(word).rank(4), None, "{word:#x}");
        }
    }
}
