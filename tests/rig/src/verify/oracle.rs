//! Oracle's outcome of a problem, and the comparison.

use ferry::{CombineMode, TokenFormat};
use ferry_reference::{
    AlignedRows, Finish, Problem, RankInput, SharedRows, apply_expert_scale, bf16, combine,
    combine_with, dispatch, threads,
};

use super::compared::Compared;
use super::mismatch::{Mismatch, Subject};
use super::placement::{Placement, thin};
use super::received::{Contents, RankOutputs, Received};
use super::values::POISON;
use crate::formats::{self, Encoded, Images, Place};

/// Oracle's outcome of a problem: made once, compared with many rounds.
pub struct Oracle {
    format: TokenFormat,
    compared: Compared,
    /// The tokens whose values are compared.
    sample: Problem,
    /// Answers of the experts to these, by rank, in the order of the oracle.
    expert_rows: Vec<Vec<bf16>>,
    /// Answers of the shared expert to these, by source rank, if there is one.
    shared: Option<Vec<SharedRows>>,
    /// These in the format, by source rank.
    encoded: Vec<Vec<Encoded>>,
    /// Places of the rows, by rank.
    placements: Vec<Placement>,
    /// All tokens, of one element each.
    routing: Problem,
}

impl Oracle {
    /// Works out a problem whose experts multiply by `scale`.
    pub fn new(problem: &Problem, scale: &[f32], format: TokenFormat) -> Self {
        Self::of(problem, scale, format, Compared::ALL)
    }

    /// The same for a part.
    pub fn of(problem: &Problem, scale: &[f32], format: TokenFormat, compared: Compared) -> Self {
        let inputs = problem.inputs.iter();
        let tokens: Vec<_> = inputs
            .map(|input| input.tokens.min(compared.tokens))
            .collect();
        let select = |(input, &tokens): (&RankInput, &usize)| {
            let tokens: Vec<_> = (0..tokens).step_by(compared.step).collect();
            select(problem, input, &tokens)
        };
        let sample = Problem {
            inputs: problem.inputs.iter().zip(&tokens).map(select).collect(),
            ..*problem
        };
        let expert_rows = apply_expert_scale(&sample, &dispatch(&sample), scale);
        Self {
            shared: (0..problem.ranks)
                .map(|rank| compared.shared_rows(problem, rank))
                .collect(),
            encoded: encode(&sample, format, compared),
            placements: Placement::of(problem, format, compared),
            routing: thin(problem, compared.tokens),
            format,
            compared,
            sample,
            expert_rows,
        }
    }

    /// Whether every value is compared.
    pub const fn compares_all(&self) -> bool {
        self.compared.step == 1
    }

    /// Extent of the comparison.
    pub const fn compared(&self) -> Compared {
        self.compared
    }

    /// The tokens that are compared, of one element each: quick to route, whatever the hidden size.
    pub(super) const fn routing(&self) -> &Problem {
        &self.routing
    }

    /// Places of all ranks' rows.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// Places of a rank's rows.
    pub fn placement(&self, rank: usize) -> &Placement {
        &self.placements[rank]
    }

    /// Results of combine on every rank, for the tokens that are compared. `weights`: in exact mode,
    /// whether the router's weights sum the rows of a token, or they stay apart.
    pub fn combined(&self, mode: CombineMode, weights: bool) -> Vec<Vec<bf16>> {
        let how = match (mode, weights) {
            // Where nothing travels there are no sums of other ranks to be rounded.
            (CombineMode::Reduced, _) if self.compared.part.is_some() => {
                ferry_reference::CombineMode::Exact
            }
            (CombineMode::Reduced, _) => ferry_reference::CombineMode::Reduced,
            (CombineMode::Exact, true) => ferry_reference::CombineMode::Exact,
            (CombineMode::Exact, false) => ferry_reference::CombineMode::Unreduced,
        };
        let Some(shared) = &self.shared else {
            return combine(&self.sample, &self.expert_rows, how);
        };
        let finish = |rows: &SharedRows| Finish {
            shared: Some(SharedRows {
                after_rounding: mode == CombineMode::Exact,
                ..rows.clone()
            }),
            ..Finish::NONE
        };
        let finish: Vec<_> = shared.iter().map(finish).collect();
        let combined = combine_with(&self.sample, &self.expert_rows, None, how, &finish);
        let elements = combined.iter().map(|bytes| bytes.as_chunks().0.iter());
        elements
            .map(|all| all.map(|&bytes| bf16::from_ne_bytes(bytes)).collect())
            .collect()
    }

    /// Compares all that a round left on ranks, one thread each.
    pub fn verify(
        &self,
        mode: CombineMode,
        weights: bool,
        outputs: &[RankOutputs],
    ) -> Result<(), Mismatch> {
        let combined = self.combined(mode, weights);
        let verify = |output: &RankOutputs| {
            let rank = output.rank;
            match &output.received {
                Contents::ByExpert(received) => self.verify_dispatch(rank, received)?,
                Contents::Rows(rows) => {
                    self.verify_rows(rank, rows)?;
                    self.verify_returned(rank, &rows.layout, &output.combined_weights)?;
                }
            }
            self.verify_combined(rank, &combined[rank], &output.combined)?;
            if output.beyond.iter().all(|&byte| byte == POISON) {
                Ok(())
            } else {
                Err(Mismatch::Stray {
                    rank,
                    tensor: "combined",
                    row: output.combined.len() / self.sample.hidden,
                })
            }
        };
        threads::each(outputs, self.sample.elements(), verify)
    }

    /// Compares what a dispatch left on a rank in outputs that were full of [`POISON`]: as much as they hold.
    pub fn verify_dispatch(&self, rank: usize, given: &Received) -> Result<(), Mismatch> {
        let subject = |tensor| Subject { rank, tensor };
        let placement = &self.placements[rank].cut(self.format, given.layout.capacity);
        let offsets = &placement.row_offsets;
        subject("row_offsets").numbers(offsets, &given.row_offsets, 1)?;
        let ids: Vec<i32> = (0..offsets.len() as i32 - 1).collect();
        subject("expert_ids").numbers(&ids, &given.expert_ids, 1)?;

        let (layout, capacity) = (given.layout, given.layout.capacity);
        let mut info = vec![[i32::from_le_bytes([POISON; 4]); 2]; capacity.rows];
        let mut wanted = Images::poisoned(layout, POISON);
        wanted.clear_unused(offsets);
        let full = &self.placements[rank];
        let aligned = full.aligned(
            &self.routing,
            self.compared,
            self.format,
            given.layout.capacity,
        );
        if self.compared.groups.clears_padding {
            clear_padding(
                &mut wanted,
                &aligned,
                &formats::first_blocks(offsets),
                &layout.zeros(),
            );
        }
        for row in &placement.rows {
            if row.is_routed() {
                info[row.position()] = row.info;
            }
            match self.encoded(row.source, row.token()) {
                Some(encoded) => wanted.put(row.place, encoded),
                None => given.copy_row(row.place, &mut wanted),
            }
        }
        if self.compared.groups.row_sources {
            info.clear();
        }
        let found = given.src_info.as_flattened();
        subject("src_info").numbers(info.as_flattened(), found, 2)?;
        given.tables.verify(rank, &aligned, self.compared.groups)?;
        subject("tokens").numbers(&wanted.tokens, &given.tokens, layout.row_bytes())?;
        let columns = match self.format.scale_layout() {
            None => 4 * capacity.rows.max(1),
            Some(_) => layout.groups(),
        };
        subject("scales").numbers(&wanted.scales, &given.scales, columns)?;
        subject("row_scales").numbers(&wanted.row_scales, &given.row_scales, 1)?;
        let starts = match self.format.scale_layout() {
            Some(ferry::ScaleLayout::Tiled) => formats::scales_offsets(offsets),
            _ => Vec::new(),
        };
        subject("scales_offsets").numbers(&starts, &given.scales_offsets, 1)
    }

    /// Compares what a combine left on a rank: `wanted` is of [`combined`](Self::combined), `given` of all
    /// tokens.
    pub fn verify_combined(
        &self,
        rank: usize,
        wanted: &[bf16],
        given: &[bf16],
    ) -> Result<(), Mismatch> {
        let (tensor, hidden) = ("combined", self.sample.hidden);
        let subject = Subject { rank, tensor };
        if self.compares_all() {
            return subject.rows(wanted, given, hidden);
        }
        let width = wanted.len() / self.sample.inputs[rank].tokens.max(1);
        subject.length(self.routing.inputs[rank].tokens * width, given.len())?;
        let found = given.chunks(width.max(1)).step_by(self.compared.step);
        subject.rows(
            wanted,
            &found.flatten().copied().collect::<Vec<_>>(),
            hidden,
        )
    }

    /// Returns a token of rank `source`, encoded in the format; `None` if its values are not compared.
    pub(super) fn encoded(&self, source: usize, token: usize) -> Option<&Encoded> {
        let step = self.compared.step;
        token
            .is_multiple_of(step)
            .then(|| &self.encoded[source][token / step])
    }

    /// Expects a token of rank `source` to arrive like this. All values are compared.
    pub fn expect_arrival(&mut self, source: usize, token: usize, encoded: Encoded) {
        self.encoded[source][token] = encoded;
    }
}

/// Clears the rows that pad groups, of outputs whose groups begin at `row_offsets`.
fn clear_padding(images: &mut Images, aligned: &AlignedRows, blocks: &[usize], zeros: &Encoded) {
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

/// Some tokens of a rank.
fn select(problem: &Problem, input: &RankInput, tokens: &[usize]) -> RankInput {
    fn pick<T: Copy>(values: &[T], width: usize, tokens: &[usize]) -> Vec<T> {
        let mut picked = Vec::with_capacity(tokens.len() * width);
        for token in tokens {
            picked.extend_from_slice(&values[token * width..(token + 1) * width]);
        }
        picked
    }
    RankInput {
        tokens: tokens.len(),
        x: pick(&input.x, problem.hidden, tokens),
        topk_ids: pick(&input.topk_ids, problem.top_k, tokens),
        topk_weights: pick(&input.topk_weights, problem.top_k, tokens),
    }
}

/// Every token in the format as it arrives, on all cores: some formats are slow.
fn encode(problem: &Problem, format: TokenFormat, compared: Compared) -> Vec<Vec<Encoded>> {
    let hidden = problem.hidden;
    let given = compared.given.in_format(format, hidden);
    let cores = std::thread::available_parallelism().map_or(4, |count| count.get());
    let of_rank = |input: &RankInput| -> Vec<Encoded> {
        let share = input.tokens.div_ceil(cores.div_ceil(problem.ranks));
        let shares = input.x.chunks(hidden * share.max(1));
        let encoded: Vec<Vec<_>> = threads::each(shares, input.x.len(), |x| {
            let rows = x.chunks(hidden);
            rows.map(|row| given.arrives(format, row, compared.input_scale))
                .collect()
        });
        encoded.into_iter().flatten().collect()
    };
    threads::each(&problem.inputs, problem.elements(), of_rank)
}
