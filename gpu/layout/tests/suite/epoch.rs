//! Epochs, and words that carry them.

use ferry_layout::{Epoch, Tagged};
use proptest::prelude::*;

proptest! {
    #[test]
    fn a_tagged_word_belongs_to_one_epoch(
        epoch in 1..=u64::MAX / 2,
        value in any::<u32>(),
        apart in 1..=u64::from(u32::MAX),
    ) {
        let word = Tagged::new(Epoch(epoch), value);
        prop_assert_eq!(word.value(Epoch(epoch)), Some(value));
        prop_assert_eq!(word.value(Epoch(epoch + apart)), None);
    }
}

#[test]
fn a_tag_wraps() {
    for last in [u64::from(u32::MAX), (1 << 33) - 1] {
        let (before, after) = (Epoch(last), Epoch::after(last));
        assert_eq!(Tagged::new(before, 7).value(before), Some(7));
        assert_eq!(Tagged::new(before, 7).value(after), None);
        assert_eq!(Tagged::new(after, 8).value(after), Some(8));
        assert_eq!(Tagged::new(after, 8).value(before), None);
    }
}

/// Words are zero before the first round, and some are first written in a late one.
#[test]
fn a_cleared_word_belongs_to_no_round() {
    for high in [0, 1, 2, u64::from(u32::MAX) - 1] {
        let last = (high << 32) + u64::from(u32::MAX) - 2;
        let epochs: Vec<_> =
            std::iter::successors(Some(Epoch(last)), |epoch| Some(Epoch::after(epoch.0)))
                .take(5)
                .collect();
        for (index, pair) in epochs.windows(2).enumerate() {
            assert!(pair[0] < pair[1], "{pair:?}");
            assert_eq!(pair[0].rounds() + 1, pair[1].rounds(), "{pair:?}");
            assert_eq!(Tagged(0).value(pair[1]), None, "{pair:?}, {index}");
        }
    }
    assert_eq!(Epoch::after(0), Epoch(1));
    assert_eq!(Epoch(1).rounds(), 1);
}
