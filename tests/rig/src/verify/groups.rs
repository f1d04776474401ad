//! Padding and tables of rows by expert that a plan asks for.

use ferry::{ByExpert, Config, Padded, Receive, TokenFormat};
use ferry_reference::Problem;

/// Padding and tables of rows by expert that a plan asks for.
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

    /// Padding and tables of a configuration.
    pub const fn of(config: &Config) -> Self {
        let fields = config.receive.fields();
        Self {
            alignment: fields.expert_alignment,
            clears_padding: fields.clear_padding,
            row_sources: fields.row_sources,
            m_indices: fields.m_indices,
            padded: match config.receive {
                Receive::Padded(_) => config.max_tokens_per_rank,
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
        let alignment = config.format.sizes().row_alignment as usize;
        let receive = match config.receive {
            Receive::ByExpert(_) => Receive::ByExpert(ByExpert {
                alignment: self.alignment,
                clear_padding: self.clears_padding && self.alignment.max(alignment) > 1,
                row_sources: self.row_sources,
                m_indices: self.m_indices,
            }),
            Receive::Padded(padded) => Receive::Padded(Padded {
                clear_padding: self.clears_padding,
                row_sources: self.row_sources,
                m_indices: self.m_indices,
                ..padded
            }),
            kept => kept,
        };
        Config { receive, ..config }
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

/// A problem without the assignments that blocks of `block` rows do not hold, and for each rank the first
/// expert that has more, with the number of its rows.
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
