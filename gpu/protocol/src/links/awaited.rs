//! Flags of a half, and what a flag that was read says.

/// Bit of a flag of the second half whose sender gave up the first one.
pub(super) const GAVE_UP: u64 = 1 << 63;

/// Flags that a warp awaits, and those that it sends.
#[derive(Clone, Copy)]
pub(super) struct Awaited {
    /// Value of the flags.
    pub(super) flag: u64,
    /// Value of the last ones of this half.
    pub(super) last: u64,
    /// Value of the last ones of the launch.
    pub(super) end: u64,
    /// [`GAVE_UP`] if this warp gave up the first half, else 0: added to the flags that it sends.
    pub(super) gave_up: u64,
    /// Time at which the wait ends.
    pub(super) until: u64,
}

/// A flag, beside the awaited one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Earlier,
    Awaited,
    /// The peer has given up this half.
    NextHalf,
    /// Nobody sends this one.
    Wrong,
}

impl Awaited {
    /// The next flags of the same wait.
    #[inline(always)]
    pub(super) fn next(self) -> Self {
        Self {
            flag: self.flag + 1,
            ..self
        }
    }

    /// Compares a flag with the awaited one.
    #[inline(always)]
    pub(super) fn seen(self, word: u64) -> Seen {
        let flag = word & !GAVE_UP;
        // A peer that has answered the last one may have sent the first one of the other half.
        let may_be_next = self.flag == self.last && word == self.last + 1;
        if flag < self.flag {
            Seen::Earlier
        } else if flag > self.end {
            Seen::Wrong
        } else if flag == self.flag || may_be_next {
            Seen::Awaited
        } else if flag > self.last {
            Seen::NextHalf
        } else {
            Seen::Wrong
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_awaited_or_of_a_peer_that_is_ahead_or_wrong() {
        use Seen::{Awaited as Now, Earlier, NextHalf, Wrong};
        let seen = |flag, last| {
            let (end, gave_up, until) = (16, 0, 0);
            let awaited = Awaited {
                flag,
                last,
                end,
                gave_up,
                until,
            };
            [10, 11, 12, 13, 14, 16, 17].map(|flag| awaited.seen(flag))
        };
        // Flags 11 to 13 are of the first half of a launch, 14 to 16 of the second one.
        let ahead = [Earlier, Now, Wrong, Wrong, NextHalf, NextHalf, Wrong];
        assert_eq!(seen(11, 13), ahead);
        let last = [Earlier, Earlier, Earlier, Now, Now, NextHalf, Wrong];
        assert_eq!(seen(13, 13), last);
        let end = [Earlier, Earlier, Earlier, Earlier, Earlier, Now, Wrong];
        assert_eq!(seen(16, 16), end);
        // Of a peer that has not answered the last one.
        let until = Awaited {
            flag: 13,
            last: 13,
            end: 16,
            gave_up: 0,
            until: 0,
        };
        assert_eq!(until.seen(14 | GAVE_UP), NextHalf);
        let first = until.next();
        assert_eq!(Awaited { last: 16, ..first }.seen(14 | GAVE_UP), Now);
    }
}
