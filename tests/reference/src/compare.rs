//! Bit-exact comparison that locates the first difference.

use std::fmt;

use half::bf16;

/// The first value that differs, and how many do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Row of the first difference.
    pub row: usize,
    /// Column of the first difference, in elements.
    pub column: usize,
    /// The bits expected there.
    pub expected_bits: u16,
    /// The bits found there.
    pub actual_bits: u16,
    /// Number of values that differ, this one included.
    pub count: usize,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.count == 1 {
            write!(f, "One value differs, at")?;
        } else {
            write!(f, "{} values differ, the first at", self.count)?;
        }
        write!(
            f,
            " row {}, column {}: expected {} ({:#06X}), found {} ({:#06X}).",
            self.row,
            self.column,
            bf16::from_bits(self.expected_bits),
            self.expected_bits,
            bf16::from_bits(self.actual_bits),
            self.actual_bits,
        )
    }
}

/// Compares two tensors `[rows, row_len]` bit for bit: 0 and -0 differ, and so
/// do NaNs with different bits. `None` if they are the same.
///
/// # Panics
///
/// If the tensors differ in length, or are not a whole number of rows.
pub fn first_difference(expected: &[bf16], actual: &[bf16], row_len: usize) -> Option<Difference> {
    assert_eq!(
        expected.len(),
        actual.len(),
        "expected (left) and actual (right) differ in length"
    );
    assert!(
        expected.is_empty() || (row_len > 0 && expected.len().is_multiple_of(row_len)),
        "{} elements are not a whole number of rows of {row_len}",
        expected.len()
    );
    let mut first: Option<Difference> = None;
    for (index, (expected, actual)) in expected.iter().zip(actual).enumerate() {
        if expected.to_bits() == actual.to_bits() {
            continue;
        }
        match &mut first {
            Some(first) => first.count += 1,
            None => {
                first = Some(Difference {
                    row: index / row_len,
                    column: index % row_len,
                    expected_bits: expected.to_bits(),
                    actual_bits: actual.to_bits(),
                    count: 1,
                });
            }
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(bits: &[u16]) -> Vec<bf16> {
        bits.iter().copied().map(bf16::from_bits).collect()
    }

    #[test]
    fn the_first_difference_is_named() {
        let expected = bits(&[0x3F80, 0x0000, 0x4000, 0x7FC0, 0x0000, 0x0000]);
        let mut actual = expected.clone();
        assert_eq!(first_difference(&expected, &actual, 3), None);
        actual[4] = bf16::from_bits(0x8000);
        let difference = first_difference(&expected, &actual, 3).unwrap();
        assert_eq!(
            difference.to_string(),
            "One value differs, at row 1, column 1: expected 0 (0x0000), found -0 (0x8000)."
        );
        actual[2] = bf16::from_bits(0x4040);
        let difference = first_difference(&expected, &actual, 3).unwrap();
        assert_eq!(
            difference.to_string(),
            "2 values differ, the first at row 0, column 2: \
             expected 2 (0x4000), found 3 (0x4040)."
        );
    }

    #[test]
    fn empty_tensors_are_equal() {
        assert_eq!(first_difference(&[], &[], 0), None);
    }

    #[test]
    #[should_panic(expected = "differ in length")]
    fn lengths_must_agree() {
        first_difference(&bits(&[0]), &[], 1);
    }
}
