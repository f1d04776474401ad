//! Padding and tables of rows by expert: what a plan asks for, what a dispatch left, and the comparison.

use ferry::{Config, Device, DispatchOutput, Error, ReceiveLayout, TokenFormat};
use ferry_reference::{AlignedRows, Problem, Room, align};

use super::compared::Compared;
use super::mismatch::{Mismatch, Subject};
use super::placement::Placement;
use super::received::{Received, download};
use crate::formats::{Encoded, Images, Place};

/// What a plan asks for about padding and rows by expert.
#[derive(Clone, Copy, Debug)]
pub struct Groups {
    /// Alignment of experts.
    pub alignment: usize,
    /// Whether rows that pad a group are zeros.
    pub clears_padding: bool,
    /// Whether rows have a source rank and a weight.
    pub row_sources: bool,
    /// Whether rows have the number of their group.
    pub m_indices: bool,
    /// Most tokens of a rank, of which each expert's block has room for those of all ranks; 0 if there are no
    /// blocks.
    pub padded: usize,
}

impl Groups {
    /// Nothing.
    pub const NONE: Self = Self {
        alignment: 1,
        clears_padding: false,
        row_sources: false,
        m_indices: false,
        padded: 0,
    };

    /// That of a configuration.
    pub const fn of(config: &Config) -> Self {
        Self {
            alignment: config.expert_alignment,
            clears_padding: config.clear_padding,
            row_sources: config.row_sources,
            m_indices: config.m_indices,
            padded: match config.receive {
                ReceiveLayout::Padded => config.max_tokens_per_rank,
                _ => 0,
            },
        }
    }

    /// Whether groups are counted.
    pub const fn counts_groups(&self) -> bool {
        self.alignment > 1 || self.padded > 0
    }

    /// Rows of each expert's block, if there are blocks.
    pub fn block(&self, ranks: usize) -> Option<usize> {
        (self.padded > 0).then_some(self.padded * ranks)
    }

    /// The configuration with it, if rows are by expert.
    #[must_use]
    pub fn put(self, config: Config) -> Config {
        if config.receive.keeps_rows() {
            return config;
        }
        let padded = config.receive == ReceiveLayout::Padded;
        let alignment = config.format.sizes().row_alignment as usize;
        Config {
            expert_alignment: if padded { 1 } else { self.alignment },
            clear_padding: self.clears_padding && (padded || self.alignment.max(alignment) > 1),
            row_sources: self.row_sources,
            m_indices: self.m_indices,
            ..config
        }
    }

    /// Number of which the first row of each group is a multiple.
    pub const fn alignment_in(&self, format: TokenFormat) -> usize {
        let of_format = format.sizes().row_alignment as usize;
        if self.alignment > of_format {
            self.alignment
        } else {
            of_format
        }
    }
}

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
    /// Downloads them. Synchronises, but not with other streams.
    pub fn download(device: &dyn Device, output: &DispatchOutput) -> Result<Self, Error> {
        let mut tables = Self::default();
        if let Some(of) = output.expert_counts {
            tables.expert_counts = download(device, of.at, of.elements())?;
        }
        if let Some(of) = output.row_ends {
            tables.row_ends = download(device, of.at, of.elements())?;
        }
        if let Some(of) = output.weights {
            tables.weights = download(device, of.at, of.elements())?;
        }
        if let Some(of) = output.m_indices {
            tables.m_indices = download(device, of.at, of.elements())?;
        }
        if let Some(of) = output.source_ranges {
            tables.ranges = download(device, of.at, of.elements())?;
        }
        if let [rows, 3] = output.src_info.dims {
            tables.sources = download(device, output.src_info.at, rows)?;
        }
        Ok(tables)
    }

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

impl Placement {
    /// The oracle's aligned rows of this rank: `problem` has its tokens, whatever their elements.
    pub(super) fn aligned(
        &self,
        problem: &Problem,
        compared: Compared,
        format: TokenFormat,
        given: &Received,
    ) -> AlignedRows {
        let capacity = given.layout.capacity;
        let end = self.cut(format, capacity).row_offsets.last().copied();
        let room = Room {
            alignment: compared.groups.alignment_in(format),
            capacity: capacity.rows,
            end: end.unwrap_or(0) as usize,
            block: compared.groups.block(problem.ranks),
            local: compared.part.map(|(index, _)| index),
        };
        let mut aligned = align(problem, &self.dispatched, room);
        if compared.is_unweighted {
            for (weight, group) in aligned.weights.iter_mut().zip(&aligned.m_indices) {
                *weight = f32::from(*group >= 0);
            }
        }
        aligned
    }
}

/// Clears the rows that pad groups, of outputs whose groups begin at `row_offsets`.
pub(super) fn clear_padding(
    images: &mut Images,
    aligned: &AlignedRows,
    blocks: &[usize],
    zeros: &Encoded,
) {
    for &row in &aligned.padding {
        let after = aligned.row_offsets.iter().skip(1);
        let group = after.take_while(|&&end| end as usize <= row).count();
        let start = aligned.row_offsets[group] as usize;
        let place = Place {
            start,
            block: blocks[group],
            row: row - start,
        };
        images.put(place, zeros);
    }
}

/// A problem without the assignments that blocks of `block` rows do not hold, and for each rank the first expert
/// that has more, with the number of its rows.
pub fn within_blocks(problem: &Problem, block: usize) -> (Problem, Vec<Option<(usize, usize)>>) {
    let mut held = problem.clone();
    let mut rows = vec![0; problem.experts];
    for input in &mut held.inputs {
        for id in &mut input.topk_ids {
            let Ok(expert) = usize::try_from(*id) else {
                continue;
            };
            rows[expert] += 1;
            if rows[expert] > block {
                *id = -1;
            }
        }
    }
    let first = |experts: &[usize]| experts.iter().position(|&rows| rows > block);
    let here = problem.local_experts();
    let above = rows.chunks(here).enumerate().map(|(rank, rows)| {
        let expert = first(rows)?;
        Some((rank * here + expert, rows[expert]))
    });
    let above = above.collect();
    (held, above)
}
