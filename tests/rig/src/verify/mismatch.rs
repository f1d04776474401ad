//! Difference of two tensors.

use ferry_reference::{Difference, bf16, first_difference};

/// Difference between Ferry and the oracle.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Mismatch {
    /// Another length.
    #[error("rank {rank}: {tensor} has {given} elements, the oracle's {wanted}")]
    Length {
        /// Rank that has it.
        rank: usize,
        /// Its name.
        tensor: &'static str,
        /// Elements in the oracle's.
        wanted: usize,
        /// Elements found.
        given: usize,
    },
    /// Another number.
    #[error("rank {rank}: {tensor}, row {row}, column {column}: expected {wanted}, found {given}")]
    Number {
        /// Rank that has it.
        rank: usize,
        /// Its name.
        tensor: &'static str,
        /// Row in the tensor.
        row: usize,
        /// Column in the tensor.
        column: usize,
        /// The oracle's.
        wanted: String,
        /// Number found.
        given: String,
    },
    /// Another element.
    #[error("rank {rank}: {tensor}: {difference}")]
    Element {
        /// Rank that has it.
        rank: usize,
        /// Its name.
        tensor: &'static str,
        /// Place of the element, and what it is.
        difference: Difference,
    },
    /// A row that holds nothing was written.
    #[error("rank {rank}: row {row} of {tensor} holds nothing, but was written")]
    Stray {
        /// Rank that has it.
        rank: usize,
        /// Its name.
        tensor: &'static str,
        /// Row in the tensor.
        row: usize,
    },
}

/// A rank's tensor that is compared.
#[derive(Clone, Copy)]
pub(super) struct Subject {
    pub(super) rank: usize,
    pub(super) tensor: &'static str,
}

impl Subject {
    /// Compares numbers of elements.
    pub(super) fn length(self, wanted: usize, given: usize) -> Result<(), Mismatch> {
        let Self { rank, tensor } = self;
        if wanted == given {
            Ok(())
        } else {
            Err(Mismatch::Length {
                rank,
                tensor,
                wanted,
                given,
            })
        }
    }

    /// Compares rows of `columns` numbers.
    pub(super) fn numbers<T: PartialEq + std::fmt::Display>(
        self,
        wanted: &[T],
        given: &[T],
        columns: usize,
    ) -> Result<(), Mismatch> {
        self.length(wanted.len(), given.len())?;
        // Slices are compared many numbers at a time.
        if wanted == given {
            return Ok(());
        }
        let mut pairs = wanted.iter().zip(given);
        match pairs.position(|(wanted, given)| wanted != given) {
            Some(index) => Err(Mismatch::Number {
                rank: self.rank,
                tensor: self.tensor,
                row: index / columns,
                column: index % columns,
                wanted: wanted[index].to_string(),
                given: given[index].to_string(),
            }),
            None => Ok(()),
        }
    }

    /// Compares rows of `hidden` elements.
    pub(super) fn rows(
        self,
        wanted: &[bf16],
        given: &[bf16],
        hidden: usize,
    ) -> Result<(), Mismatch> {
        self.length(wanted.len(), given.len())?;
        match first_difference(wanted, given, hidden) {
            Some(difference) => Err(Mismatch::Element {
                rank: self.rank,
                tensor: self.tensor,
                difference,
            }),
            None => Ok(()),
        }
    }
}

/// Compares rows, bit for bit.
pub fn compare_rows(
    rank: usize,
    tensor: &'static str,
    wanted: &[bf16],
    given: &[bf16],
    hidden: usize,
) -> Result<(), Mismatch> {
    Subject { rank, tensor }.rows(wanted, given, hidden)
}
