//! Places of the rows of a dispatch, by the oracle.

use ferry::{Capacity, Config, ScaleLayout, TokenFormat};
use ferry_reference::{
    AlignedRows, Dispatched, Problem, RankInput, Room, align, bf16, dispatch,
    dispatch_with_shared_part, fp8, round_to_bf16, share_of,
};

use super::compared::Compared;
use super::groups::Groups;
use crate::formats::{self, Place};

/// Places of a rank's rows, whatever their payload.
pub struct Placement {
    /// Rows in the order of the oracle: by expert, then source rank, then token.
    pub rows: Vec<PlacedRow>,
    /// The first row of each group, padding included, and the end of the last. A group is a local expert, or
    /// the shared expert.
    pub row_offsets: Vec<u32>,
    /// Factor of the shared expert, whose group is the first one, if there is one.
    shared: Option<f32>,
    /// The oracle's dispatch of tokens of one element.
    pub(super) dispatched: Dispatched,
}

/// A row.
#[derive(Clone)]
pub struct PlacedRow {
    /// Its place.
    pub place: Place,
    /// Its group's number on this rank.
    pub group: usize,
    /// The rank that sent it.
    pub source: usize,
    /// Its token there, and the slot; -1 for the shared expert, where nothing is written.
    pub info: [i32; 2],
}

impl PlacedRow {
    /// Its token on the source rank.
    pub const fn token(&self) -> usize {
        self.info[0] as usize
    }

    /// Whether it answers a slot of its token: not in the shared expert's group.
    pub const fn is_routed(&self) -> bool {
        self.info[1] >= 0
    }

    /// Its row among the outputs.
    pub const fn position(&self) -> usize {
        self.place.start + self.place.row
    }
}

impl Placement {
    /// Every rank's, where each brings the first `compared.tokens` tokens of a problem at most: the oracle's
    /// dispatch of tokens of one element, which is quick whatever the hidden size.
    pub fn of(problem: &Problem, format: TokenFormat, compared: Compared) -> Vec<Self> {
        let Compared { tokens, shared, .. } = compared;
        let (index, of) = compared.shared_part();
        let thin = thin(problem, tokens);
        let ranks = match shared {
            None => dispatch(&thin),
            Some(_) => dispatch_with_shared_part(&thin, index, of),
        };
        ranks
            .iter()
            .map(|rank| Self::of_rank(rank, format, compared, problem.ranks))
            .collect()
    }

    /// Every rank's in a round of a communicator with this configuration, whose shared expert multiplies by
    /// `factor`. Where nothing travels, all ranks bring the tokens of the first.
    pub fn of_config(problem: &Problem, config: &Config, factor: f32) -> Vec<Self> {
        let compared = Compared {
            shared: config.shared_expert.then_some(factor),
            groups: Groups::of(config),
            ..Compared::ALL
        };
        if !config.skip_a2a {
            return Self::of(problem, config.format, compared);
        }
        let ranks = problem.ranks;
        let all = Problem {
            ranks: 1,
            inputs: problem.inputs[..1].to_vec(),
            ..*problem
        };
        let of_rank = |rank| {
            let share = share_of(&all, ranks, rank);
            let part = Some((rank, ranks));
            Self::of(&share, config.format, Compared { part, ..compared })
        };
        (0..ranks).flat_map(of_rank).collect()
    }

    fn of_rank(rank: &Dispatched, format: TokenFormat, compared: Compared, ranks: usize) -> Self {
        let row_offsets = match compared.groups.block(ranks) {
            None => {
                let alignment = compared.groups.alignment_in(format) as u32;
                fp8::padded_offsets(&rank.row_offsets, alignment)
            }
            Some(block) => (0..rank.row_offsets.len())
                .map(|group| (group * block) as u32)
                .collect(),
        };
        let blocks = formats::first_blocks(&row_offsets);
        let mut rows = Vec::with_capacity(rank.src_info.len());
        for (group, pair) in rank.row_offsets.windows(2).enumerate() {
            for row in pair[0] as usize..pair[1] as usize {
                rows.push(PlacedRow {
                    place: Place {
                        start: row_offsets[group] as usize,
                        block: blocks[group],
                        row: row - pair[0] as usize,
                    },
                    group,
                    source: rank.src_rank[row],
                    info: rank.src_info[row],
                });
            }
        }
        Self {
            rows,
            row_offsets,
            shared: compared.shared,
            dispatched: rank.clone(),
        }
    }

    /// Capacity that the rank's outputs must have, padding included.
    pub fn capacity(&self) -> Capacity {
        let blocks = formats::first_blocks(&self.row_offsets);
        Capacity {
            rows: self.row_offsets.last().copied().unwrap_or(0) as usize,
            scale_blocks: blocks.last().copied().unwrap_or(0),
            ..Capacity::default()
        }
    }

    /// Cuts it to what outputs of this capacity hold: the first rows, and offsets that end where these end.
    #[must_use]
    pub fn cut(&self, format: TokenFormat, capacity: Capacity) -> Self {
        let is_tiled = format.scale_layout() == Some(ScaleLayout::Tiled);
        let mut end = self.row_offsets.last().map_or(0, |&end| end as usize);
        end = end.min(capacity.rows);
        if is_tiled {
            // Of rows that pad a group, too, the first one whose block does not fit.
            let blocks = formats::first_blocks(&self.row_offsets);
            for (pair, block) in self.row_offsets.windows(2).zip(blocks) {
                for row in 0..(pair[1] - pair[0]) as usize {
                    if block + row / 128 >= capacity.scale_blocks {
                        end = end.min(pair[0] as usize + row);
                    }
                }
            }
        }
        Self {
            rows: self
                .rows
                .iter()
                .filter(|row| row.position() < end)
                .cloned()
                .collect(),
            row_offsets: (self.row_offsets.iter())
                .map(|&offset| offset.min(end as u32))
                .collect(),
            shared: self.shared,
            dispatched: self.dispatched.clone(),
        }
    }

    /// Answers of the experts of rank `rank`, `[rows, hidden]` in the order of its outputs: each token times
    /// its expert's factor in `scale`, and NaN where no row stands.
    pub fn expert_rows(
        &self,
        problem: &Problem,
        scale: &[f32],
        rank: usize,
        rows: usize,
    ) -> Vec<bf16> {
        let (hidden, first) = (problem.hidden, rank * problem.local_experts());
        let factors: Vec<f32> = (self.shared.iter())
            .chain(&scale[first..first + problem.local_experts()])
            .copied()
            .collect();
        let mut answers = vec![bf16::NAN; rows * hidden];
        for row in &self.rows {
            let token = &problem.inputs[row.source].x[row.token() * hidden..][..hidden];
            let answer = &mut answers[row.position() * hidden..][..hidden];
            for (answer, x) in answer.iter_mut().zip(token) {
                *answer = round_to_bf16(x.to_f32() * factors[row.group]);
            }
        }
        answers
    }

    /// The router's weight of each of so many rows of the outputs, and NaN where it has none.
    pub fn row_weights(&self, problem: &Problem, rows: usize) -> Vec<f32> {
        let mut weights = vec![f32::NAN; rows];
        for row in self.rows.iter().filter(|row| row.is_routed()) {
            let slot = row.token() * problem.top_k + row.info[1] as usize;
            weights[row.position()] = problem.inputs[row.source].topk_weights[slot];
        }
        weights
    }
}

impl Placement {
    /// The oracle's aligned rows of this rank: `problem` has its tokens, whatever their elements.
    pub(super) fn aligned(
        &self,
        problem: &Problem,
        compared: Compared,
        format: TokenFormat,
        capacity: Capacity,
    ) -> AlignedRows {
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

/// The first `most` tokens of each rank, of one element each.
pub(super) fn thin(problem: &Problem, most: usize) -> Problem {
    let thin = |input: &RankInput| {
        let tokens = input.tokens.min(most);
        RankInput {
            tokens,
            x: vec![bf16::ZERO; tokens],
            topk_ids: input.topk_ids[..tokens * problem.top_k].to_vec(),
            topk_weights: input.topk_weights[..tokens * problem.top_k].to_vec(),
        }
    };
    Problem {
        hidden: 1,
        inputs: problem.inputs.iter().map(thin).collect(),
        ..*problem
    }
}

/// The problem without the assignments whose rows outputs of these capacities, by rank, do not hold.
pub fn without_overflow(
    problem: &Problem,
    format: TokenFormat,
    placements: &[Placement],
    capacities: &[Capacity],
) -> Problem {
    let mut held = problem.clone();
    for (placement, &capacity) in placements.iter().zip(capacities) {
        let rows = placement.cut(format, capacity).rows.len();
        for row in &placement.rows[rows..] {
            assert!(row.is_routed(), "the shared expert's rows come first");
            let slot = row.token() * problem.top_k + row.info[1] as usize;
            held.inputs[row.source].topk_ids[slot] = -1;
        }
    }
    held
}

/// Capacity of outputs for the busiest of these ranks.
pub fn largest(ranks: &[Placement]) -> Capacity {
    (ranks.iter())
        .map(Placement::capacity)
        .fold(Capacity::default(), formats::larger)
}
