//! Oracle's outcome of a round of a case.

use ferry::{Capacity, ScaleLayout, layout::Region};
use ferry_reference::{
    CombineMode, Finish, Problem, apply_expert_scale, combine_with, dispatch, share_of,
};

use super::case::Case;
use super::dice::Dice;
use super::expected_rows::ExpectedRows;
use super::inputs::{Return, factors};
use super::options::{Options, Subject};
use super::specials;
use crate::formats::Encoded;
use crate::verify::{Compared, Groups, Oracle, Placement, within_blocks, without_overflow};

/// Outcome that a round must have, on the ranks that are compared.
pub struct Expected {
    case: Case,
    /// One for all ranks; if nothing travels, one for each.
    shares: Vec<Option<Share>>,
    /// Capacities of the outputs, by rank.
    pub capacities: Vec<Capacity>,
    /// Bytes of the results, by rank.
    pub wanted: Vec<Vec<u8>>,
    /// Everything else, if rows stay as they came.
    pub rows: Option<ExpectedRows>,
    /// First expert of each rank whose block does not hold all of its rows, and their number.
    pub above_blocks: Vec<Option<(usize, usize)>>,
}

/// Tokens of which each has a result, and the experts that they go to.
struct Share {
    problem: Problem,
    /// Factor of each expert.
    scale: Vec<f32>,
    oracle: Oracle,
}

impl Share {
    fn new(case: &Case, problem: Problem, scale: Vec<f32>, compared: Compared) -> Self {
        Self {
            oracle: Oracle::of(&problem, &scale, case.format, compared),
            problem,
            scale,
        }
    }

    /// The results of each of its ranks, if outputs have these capacities.
    fn combined(&self, case: &Case, capacities: &[Capacity]) -> Vec<Vec<u8>> {
        let (mode, is_summed) = (case.how.mode(), case.how != Return::Apart);
        let bytes = |oracle: &Oracle| -> Vec<Vec<u8>> {
            let ranks = oracle.combined(mode, is_summed);
            let bytes = ranks.iter().map(|rows| bytemuck::cast_slice(rows).to_vec());
            bytes.collect()
        };
        if !case.short {
            return bytes(&self.oracle);
        }
        let placements = self.oracle.placements();
        let held = without_overflow(&self.problem, case.format, placements, capacities);
        bytes(&Oracle::of(
            &held,
            &self.scale,
            case.format,
            self.oracle.compared(),
        ))
    }

    /// The same of combines with options; rank 0 of this share is rank `first`.
    fn finished(&self, case: &Case, options: &Options, round: usize, first: usize) -> Vec<Vec<u8>> {
        let rows = apply_expert_scale(&self.problem, &dispatch(&self.problem), &self.scale);
        let given = (0..self.problem.ranks).map(|rank| {
            let subject = self.subject(case, round, rank, first + rank);
            let given = options.draw(&subject);
            (given.finish, given.row_weights)
        });
        let (finish, weights): (Vec<_>, Vec<_>) = given.unzip();
        let weights: Option<Vec<_>> = weights.into_iter().collect();
        let mode = match case.how {
            // If nothing travels there are no sums of other ranks to be rounded.
            Return::Reduced if !case.skip_a2a => CombineMode::Reduced,
            _ => CombineMode::Exact,
        };
        combine_with(&self.problem, &rows, weights.as_deref(), mode, &finish)
    }

    /// A rank of this share, `number` in the group.
    fn subject(&self, case: &Case, round: usize, rank: usize, number: usize) -> Subject<'_> {
        Subject {
            seed: case.seed ^ (round * 64 + number) as u64,
            problem: &self.problem,
            rank,
            compared: self.oracle.compared(),
            format: case.format,
            mode: case.how.mode(),
            rows: case.rows(self.problem.inputs[rank].tokens),
        }
    }
}

impl Expected {
    /// Works out a round of a case with these inputs, at least for `ranks`.
    pub fn of(case: &Case, problem: &Problem, round: usize, ranks: &[usize]) -> Self {
        let problem = &match case.specials {
            true => specials::arrived(problem),
            false => problem.clone(),
        };
        let config = case.config();
        let (problem, above_blocks) = match Groups::of(&config).block(case.ranks) {
            None => (problem.clone(), vec![None; case.ranks]),
            Some(block) => within_blocks(problem, block),
        };
        let problem = &problem;
        let scale = factors(case.experts, round);
        let compared = Compared {
            // In exact mode combine's weights count.
            is_unweighted: case.skip_a2a && case.how != Return::Reduced,
            ..case.compared()
        };
        let here = case.experts / case.ranks;
        let share = |rank: usize| {
            let all = Problem {
                ranks: 1,
                inputs: problem.inputs[..1].to_vec(),
                ..*problem
            };
            let compared = Compared {
                part: Some((rank, case.ranks)),
                ..compared
            };
            let scale = scale[rank * here..(rank + 1) * here].to_vec();
            Share::new(case, share_of(&all, case.ranks, rank), scale, compared)
        };
        let shares: Vec<_> = if case.skip_a2a {
            let all = 0..case.ranks;
            all.map(|rank| ranks.contains(&rank).then(|| share(rank)))
                .collect()
        } else {
            vec![Some(Share::new(
                case,
                problem.clone(),
                scale.clone(),
                compared,
            ))]
        };
        let mut expected = Self {
            case: case.clone(),
            shares,
            capacities: vec![Capacity::default(); case.ranks],
            wanted: vec![Vec::new(); case.ranks],
            rows: None,
            above_blocks,
        };
        if case.receive.keeps_rows() {
            expected.work_out_rows(problem, round, &scale);
        } else {
            expected.draw_capacities(round);
            expected.work_out(round);
        }
        expected
    }

    fn work_out_rows(&mut self, problem: &Problem, round: usize, scale: &[f32]) {
        let finish = |rank| match &self.case.finish {
            Some(options) => options.draw(&self.subject(round, rank)).finish,
            None => Finish::NONE,
        };
        let finish: Vec<_> = (0..self.case.ranks).map(finish).collect();
        let (rows, combined) = ExpectedRows::of(&self.case, problem, round, scale, &finish);
        let capacities = rows.capacities.iter().enumerate();
        self.capacities = capacities
            .map(|(rank, &rows)| Capacity {
                rows,
                wide_ids: self.case.has_wide_ids(rank),
                ..Capacity::default()
            })
            .collect();
        self.wanted = combined;
        self.rows = Some(rows);
    }

    fn draw_capacities(&mut self, round: usize) {
        let seed = self.case.seed ^ (round as u64) << 32;
        let mut dice = Dice::new(seed);
        for rank in 0..self.case.ranks {
            let Some((share, index)) = self.share(rank) else {
                continue;
            };
            if self.case.skip_a2a {
                dice = Dice::new(seed ^ (rank as u64) << 16);
            }
            let needed = share.oracle.placement(index).capacity();
            let tokens = share.problem.inputs[index].tokens;
            self.capacities[rank] = self.case.capacity(needed, rank, tokens, &mut dice);
        }
    }

    fn work_out(&mut self, round: usize) {
        for (first, share) in self.shares.iter().enumerate() {
            let Some(share) = share else { continue };
            let ranks = first..first + share.problem.ranks;
            let combined = match &self.case.finish {
                Some(options) => share.finished(&self.case, options, round, first),
                None => share.combined(&self.case, &self.capacities[ranks.clone()]),
            };
            self.wanted[ranks].clone_from_slice(&combined);
        }
    }

    /// The share that a rank belongs to, and its number there.
    fn share(&self, rank: usize) -> Option<(&Share, usize)> {
        let (share, index) = if self.case.skip_a2a {
            (rank, 0)
        } else {
            (0, rank)
        };
        Some((self.shares[share].as_ref()?, index))
    }

    /// The oracle of a rank, and the rank's number there.
    ///
    /// # Panics
    /// If the rank is not compared.
    pub fn oracle(&self, rank: usize) -> (&Oracle, usize) {
        let (share, index) = self.share(rank).expect("a rank that is compared");
        (&share.oracle, index)
    }

    /// Number of tokens of a rank.
    ///
    /// # Panics
    /// If the rank is not compared.
    pub fn tokens(&self, rank: usize) -> usize {
        let (share, index) = self.share(rank).expect("a rank that is compared");
        share.problem.inputs[index].tokens
    }

    /// Rank whose combine is given options.
    pub(super) fn subject(&self, round: usize, rank: usize) -> Subject<'_> {
        let (share, index) = self.share(rank).expect("a rank that is compared");
        share.subject(&self.case, round, index, rank)
    }

    /// Expects a token of rank `source` to arrive like this.
    pub fn expect_arrival(&mut self, source: usize, token: usize, encoded: &Encoded) {
        let shares = self.shares.iter_mut().flatten();
        shares.for_each(|share| share.oracle.expect_arrival(source, token, encoded.clone()));
    }

    /// Answers of a rank's experts, as far as its outputs hold rows.
    pub fn answers(&self, rank: usize) -> Vec<ferry_reference::bf16> {
        if let Some(rows) = &self.rows {
            return rows.answers[rank].clone();
        }
        let (share, index) = self.share(rank).expect("a rank that is compared");
        let capacity = self.capacities[rank];
        let held: Placement = share
            .oracle
            .placement(index)
            .cut(self.case.format, capacity);
        held.expert_rows(&share.problem, &share.scale, index, capacity.rows)
    }

    /// Returns what a rank's outputs lack, if anything: rows, or else blocks of scales; how many come, and
    /// how many they hold.
    pub fn lacks(&self, rank: usize) -> Option<(Region, usize, usize)> {
        if let Some(rows) = &self.rows {
            let (sent, held) = rows.lacks(rank)?;
            return Some((Region::Output, sent, held));
        }
        if let Some((_, rows)) = self.above_blocks[rank] {
            let block = Groups::of(&self.case.config()).block(self.case.ranks);
            return Some((Region::ExpertBlock, rows, block.unwrap_or(0)));
        }
        let (oracle, index) = self.oracle(rank);
        let (needed, given) = (oracle.placement(index).capacity(), self.capacities[rank]);
        if needed.rows > given.rows {
            return Some((Region::Output, needed.rows, given.rows));
        }
        let is_tiled = self.case.format.scale_layout() == Some(ScaleLayout::Tiled);
        let blocks = (needed.scale_blocks, given.scale_blocks);
        (is_tiled && blocks.0 > blocks.1).then_some((Region::ScaleBlocks, blocks.0, blocks.1))
    }
}
