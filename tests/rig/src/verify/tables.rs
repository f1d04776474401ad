//! Tables of rows by expert that a dispatch left, and the comparison.

use ferry_reference::AlignedRows;

use super::groups::Groups;
use super::mismatch::{Mismatch, Subject};

/// Tables that a dispatch left; empty those that the plan does not have.
#[derive(Default, PartialEq, Eq)]
pub struct Tables {
    /// Rows of each group.
    pub expert_counts: Vec<i32>,
    /// Ends of each group's rows.
    pub row_ends: Vec<u32>,
    /// Source rank, token and slot of each row.
    pub sources: Vec<[i32; 3]>,
    /// Weight of each row, as f32 bits.
    pub weights: Vec<u32>,
    /// Group of each row.
    pub m_indices: Vec<i32>,
    /// Rows of each source in each block.
    pub ranges: Vec<i64>,
}

impl Tables {
    /// Compares them with the oracle's.
    pub(super) fn verify(
        &self,
        rank: usize,
        wanted: &AlignedRows,
        groups: Groups,
    ) -> Result<(), Mismatch> {
        let subject = |tensor| Subject { rank, tensor };
        let counts_groups = groups.counts_groups();
        let counts = if counts_groups {
            &wanted.counts[..]
        } else {
            &[]
        };
        subject("expert_counts").numbers(counts, &self.expert_counts, 1)?;
        let ends = if counts_groups {
            &wanted.row_ends[..]
        } else {
            &[]
        };
        subject("row_ends").numbers(ends, &self.row_ends, 1)?;
        let numbers = if groups.m_indices {
            &wanted.m_indices[..]
        } else {
            &[]
        };
        subject("m_indices").numbers(numbers, &self.m_indices, 1)?;
        let (mut weights, mut sources) = (Vec::new(), &[][..]);
        if groups.row_sources {
            weights = wanted
                .weights
                .iter()
                .map(|weight| weight.to_bits())
                .collect();
            sources = wanted.src_info.as_flattened();
        }
        subject("weights").numbers(&weights, &self.weights, 1)?;
        subject("src_info").numbers(sources, self.sources.as_flattened(), 3)?;
        let ranges = if groups.padded > 0 {
            &wanted.ranges[..]
        } else {
            &[]
        };
        subject("source_ranges").numbers(ranges, &self.ranges, 1)
    }
}
