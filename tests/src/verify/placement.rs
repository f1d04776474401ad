//! Where the rows of a dispatch stand, by the oracle.

use ferry::{Capacity, TokenFormat};
use ferry_reference::{Dispatched, Problem, RankInput, bf16, dispatch, fp8, round_to_bf16};

use crate::formats::{self, Place};

/// Where a rank's rows stand, whatever their payload.
pub struct Placement {
    /// In the order of the oracle: by expert, then source rank, then token.
    pub rows: Vec<PlacedRow>,
    /// The first row of each local expert, padding included, and the end of the last.
    pub row_offsets: Vec<u32>,
}

/// A row.
pub struct PlacedRow {
    /// Where it stands.
    pub place: Place,
    /// Its expert's number on this rank.
    pub expert: usize,
    /// The rank that sent it.
    pub source: usize,
    /// Its token there, and the slot.
    pub info: [i32; 2],
}

impl PlacedRow {
    /// Its token on the source rank.
    pub const fn token(&self) -> usize {
        self.info[0] as usize
    }

    /// Its row among the outputs.
    pub const fn position(&self) -> usize {
        self.place.start + self.place.row
    }
}

impl Placement {
    /// Every rank's, where each brings the first `tokens` tokens of a problem at most: the oracle's dispatch
    /// of tokens of one element, which is quick whatever the hidden size.
    pub fn of(problem: &Problem, format: TokenFormat, tokens: usize) -> Vec<Self> {
        let thin = |input: &RankInput| {
            let tokens = input.tokens.min(tokens);
            RankInput {
                tokens,
                x: vec![bf16::ZERO; tokens],
                topk_ids: input.topk_ids[..tokens * problem.top_k].to_vec(),
                topk_weights: input.topk_weights[..tokens * problem.top_k].to_vec(),
            }
        };
        let thin = Problem {
            hidden: 1,
            inputs: problem.inputs.iter().map(thin).collect(),
            ..*problem
        };
        let ranks = dispatch(&thin).into_iter();
        ranks.map(|rank| Self::of_rank(&rank, format)).collect()
    }

    fn of_rank(rank: &Dispatched, format: TokenFormat) -> Self {
        let row_offsets = fp8::padded_offsets(&rank.row_offsets, format.sizes().row_alignment);
        let blocks = formats::first_blocks(&row_offsets);
        let mut rows = Vec::with_capacity(rank.src_info.len());
        for (expert, pair) in rank.row_offsets.windows(2).enumerate() {
            for row in pair[0] as usize..pair[1] as usize {
                rows.push(PlacedRow {
                    place: Place {
                        start: row_offsets[expert] as usize,
                        block: blocks[expert],
                        row: row - pair[0] as usize,
                    },
                    expert,
                    source: rank.src_rank[row],
                    info: rank.src_info[row],
                });
            }
        }
        Self { rows, row_offsets }
    }

    /// What the rank's outputs must hold, padding included.
    pub fn capacity(&self) -> Capacity {
        let blocks = formats::first_blocks(&self.row_offsets);
        Capacity {
            rows: self.row_offsets.last().copied().unwrap_or(0) as usize,
            scale_blocks: blocks.last().copied().unwrap_or(0),
        }
    }

    /// What the experts of rank `rank` answer, `[rows, hidden]` in the order of its outputs: each token times
    /// its expert's factor in `scale`, and NaN where no row stands.
    pub fn expert_rows(
        &self,
        problem: &Problem,
        scale: &[f32],
        rank: usize,
        rows: usize,
    ) -> Vec<bf16> {
        let (hidden, first) = (problem.hidden, rank * problem.local_experts());
        let mut answers = vec![bf16::NAN; rows * hidden];
        for row in &self.rows {
            let token = &problem.inputs[row.source].x[row.token() * hidden..][..hidden];
            let answer = &mut answers[row.position() * hidden..][..hidden];
            for (answer, x) in answer.iter_mut().zip(token) {
                *answer = round_to_bf16(x.to_f32() * scale[first + row.expert]);
            }
        }
        answers
    }
}

/// What outputs must hold for the busiest rank, padding included.
pub fn capacity_for(problem: &Problem, format: TokenFormat) -> Capacity {
    let ranks = Placement::of(problem, format, usize::MAX).into_iter();
    ranks
        .map(|rank| rank.capacity())
        .fold(Capacity::default(), formats::larger)
}
