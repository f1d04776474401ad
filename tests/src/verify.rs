//! Compares a round with the oracle, bit for bit.

use ferry::{CombineMode, TokenFormat};
use ferry_reference::{
    Difference, Dispatched, Problem, apply_expert_scale, bf16, combine, dispatch, first_difference,
    fp8,
};

use crate::session::{POISON, RankOutputs, Settings, row_bytes};

/// Where Ferry and the oracle differ.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Mismatch {
    /// In a tensor that is compared as a whole.
    #[error("rank {rank}: {tensor} differs from the oracle's")]
    Tensor {
        /// On which rank.
        rank: usize,
        /// Its name.
        tensor: &'static str,
    },
    /// In a row.
    #[error("rank {rank}: row {row} of {tensor} differs from the oracle's")]
    Row {
        /// On which rank.
        rank: usize,
        /// Its name.
        tensor: &'static str,
        /// Which row.
        row: usize,
    },
    /// In an element.
    #[error("rank {rank}: {tensor}: {difference}")]
    Element {
        /// On which rank.
        rank: usize,
        /// Its name.
        tensor: &'static str,
        /// Where, and what stands there.
        difference: Difference,
    },
    /// A row that holds no token was written.
    #[error("rank {rank}: row {row} of the dispatch's outputs holds no token, but was written")]
    Stray {
        /// On which rank.
        rank: usize,
        /// Which row.
        row: usize,
    },
}

/// What the oracle says of a problem: made once, compared with many rounds.
pub struct Oracle {
    dispatched: Vec<Dispatched>,
    expert_rows: Vec<Vec<bf16>>,
    /// Codes and scales of every token of every rank, in FP8.
    encoded: Option<Vec<Vec<Encoded>>>,
}

/// Codes and scales of a token.
type Encoded = (Vec<u8>, Vec<f32>);

/// Every token in the format, if that has to be worked out; a thread a rank.
fn encode(problem: &Problem, format: TokenFormat) -> Option<Vec<Vec<Encoded>>> {
    if format == TokenFormat::Bf16 {
        return None;
    }
    let hidden = problem.hidden;
    Some(std::thread::scope(|scope| {
        let encode = |x: &[bf16]| x.chunks(hidden).map(fp8::blockwise).collect();
        let inputs = problem.inputs.iter();
        let threads: Vec<_> = inputs
            .map(|input| scope.spawn(move || encode(&input.x)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic while encoding"))
            .collect()
    }))
}

/// Rows that an expert's are padded to a multiple of.
const fn alignment(format: TokenFormat) -> u32 {
    match format {
        TokenFormat::Bf16 => 1,
        TokenFormat::BlockwiseFp8 => 4,
    }
}

/// Most rows that any rank receives, padding included.
pub fn capacity_for(problem: &Problem, format: TokenFormat) -> usize {
    let last = |rank: &Dispatched| {
        fp8::padded_offsets(&rank.row_offsets, alignment(format))
            .last()
            .copied()
            .unwrap_or(0) as usize
    };
    dispatch(problem).iter().map(last).max().unwrap_or(0)
}

/// Compares all that a round left on the local ranks. See [`Oracle`] for many rounds of one
/// problem.
pub fn verify(
    problem: &Problem,
    scale: &[f32],
    settings: &Settings,
    weights: bool,
    outputs: &[RankOutputs],
) -> Result<(), Mismatch> {
    Oracle::new(problem, scale, settings.config.format).verify(problem, settings, weights, outputs)
}

impl Oracle {
    /// Works out a problem whose experts multiply by `scale`.
    pub fn new(problem: &Problem, scale: &[f32], format: TokenFormat) -> Self {
        let dispatched = dispatch(problem);
        let expert_rows = apply_expert_scale(problem, &dispatched, scale);
        Self {
            dispatched,
            expert_rows,
            encoded: encode(problem, format),
        }
    }

    /// Compares.
    pub fn verify(
        &self,
        problem: &Problem,
        settings: &Settings,
        weights: bool,
        outputs: &[RankOutputs],
    ) -> Result<(), Mismatch> {
        let combined = self.combined(problem, settings.config.combine, weights);
        let verify = |output: &RankOutputs| {
            let rank = output.rank;
            self.verify_dispatch(settings, output)?;
            compare_rows(
                rank,
                "combined",
                &combined[rank],
                &output.combined,
                problem.hidden,
            )
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = outputs
                .iter()
                .map(|output| scope.spawn(|| verify(output)))
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().expect("no panic while comparing"))
        })
    }

    /// What combine must give on every rank.
    pub fn combined(&self, problem: &Problem, mode: CombineMode, weights: bool) -> Vec<Vec<bf16>> {
        let mode = match (mode, weights) {
            (CombineMode::Reduced, _) => ferry_reference::CombineMode::Reduced,
            (CombineMode::Exact, true) => ferry_reference::CombineMode::Exact,
            (CombineMode::Exact, false) => ferry_reference::CombineMode::Unreduced,
        };
        combine(problem, &self.expert_rows, mode)
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
    if wanted.len() != given.len() {
        return Err(Mismatch::Tensor { rank, tensor });
    }
    match first_difference(wanted, given, hidden) {
        Some(difference) => Err(Mismatch::Element {
            rank,
            tensor,
            difference,
        }),
        None => Ok(()),
    }
}

impl Oracle {
    fn verify_dispatch(&self, settings: &Settings, given: &RankOutputs) -> Result<(), Mismatch> {
        let wanted = &self.dispatched[given.rank];
        let Settings {
            config, capacity, ..
        } = *settings;
        let rank = given.rank;
        let offsets = fp8::padded_offsets(&wanted.row_offsets, alignment(config.format));
        if given.row_offsets != offsets {
            return Err(Mismatch::Tensor {
                rank,
                tensor: "row_offsets",
            });
        }
        if given.expert_ids != wanted.expert_ids {
            return Err(Mismatch::Tensor {
                rank,
                tensor: "expert_ids",
            });
        }
        let bytes = row_bytes(&config);
        let mut used = vec![false; capacity];
        for (expert, pair) in wanted.row_offsets.windows(2).enumerate() {
            for (row, at) in (pair[0]..pair[1]).zip(offsets[expert]..) {
                let (row, at) = (row as usize, at as usize);
                used[at] = true;
                if given.src_info[at] != wanted.src_info[row] {
                    return Err(Mismatch::Row {
                        rank,
                        tensor: "src_info",
                        row: at,
                    });
                }
                let token = &wanted.tokens[row * config.hidden..][..config.hidden];
                let source = (wanted.src_rank[row], wanted.src_info[row][0] as usize);
                let encoded = self
                    .encoded
                    .as_ref()
                    .map(|ranks| &ranks[source.0][source.1]);
                verify_row(token, encoded, at, settings, given)?;
            }
        }
        let stray = |&at: &usize| {
            !used[at]
                && given.tokens[at * bytes..][..bytes]
                    .iter()
                    .any(|&byte| byte != POISON)
                || !used[at] && given.src_info[at] != [i32::from_le_bytes([POISON; 4]); 2]
        };
        match (0..capacity).find(stray) {
            Some(row) => Err(Mismatch::Stray { rank, row }),
            None => Ok(()),
        }
    }
}

fn verify_row(
    token: &[bf16],
    encoded: Option<&Encoded>,
    at: usize,
    settings: &Settings,
    given: &RankOutputs,
) -> Result<(), Mismatch> {
    let Settings {
        config, capacity, ..
    } = *settings;
    let (rank, bytes) = (given.rank, row_bytes(&config));
    let row = &given.tokens[at * bytes..][..bytes];
    let (Some(scales), Some((codes, wanted))) = (&given.scales, encoded) else {
        let same = row
            .as_chunks()
            .0
            .iter()
            .zip(token)
            .all(|(&bits, x)| bits == x.to_le_bytes());
        return if same {
            Ok(())
        } else {
            Err(Mismatch::Row {
                rank,
                tensor: "tokens",
                row: at,
            })
        };
    };
    if row != codes {
        return Err(Mismatch::Row {
            rank,
            tensor: "tokens",
            row: at,
        });
    }
    let same = scales
        .iter()
        .skip(at)
        .step_by(capacity)
        .zip(wanted)
        .all(|(a, b)| a.to_bits() == b.to_bits());
    if same {
        Ok(())
    } else {
        Err(Mismatch::Row {
            rank,
            tensor: "scales",
            row: at,
        })
    }
}
