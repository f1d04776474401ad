//! Compares a round with the oracle, bit for bit.

use ferry::{CombineMode, Config, ScaleLayout, TokenFormat};
use ferry_reference::{
    Difference, Dispatched, Problem, apply_expert_scale, bf16, combine, dispatch, first_difference,
    fp8,
};

use crate::formats::{self, Capacity, Encoded, Images, Place};
use crate::session::{POISON, RankOutputs, Settings};

/// Where Ferry and the oracle differ.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Mismatch {
    /// In its length.
    #[error("rank {rank}: {tensor} has {given} elements, the oracle's {wanted}")]
    Length {
        /// On which rank.
        rank: usize,
        /// Its name.
        tensor: &'static str,
        /// Elements in the oracle's.
        wanted: usize,
        /// Elements found.
        given: usize,
    },
    /// In a number.
    #[error("rank {rank}: {tensor}, row {row}, column {column}: expected {wanted}, found {given}")]
    Number {
        /// On which rank.
        rank: usize,
        /// Its name.
        tensor: &'static str,
        /// Which row.
        row: usize,
        /// Which column.
        column: usize,
        /// The oracle's.
        wanted: String,
        /// What stands there.
        given: String,
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
    /// A row that holds nothing was written.
    #[error("rank {rank}: row {row} of {tensor} holds nothing, but was written")]
    Stray {
        /// On which rank.
        rank: usize,
        /// Its name.
        tensor: &'static str,
        /// Which row.
        row: usize,
    },
}

/// Compares rows of numbers, those of `given` starting at row `first`.
fn compare_numbers<T: PartialEq + std::fmt::Display>(
    (rank, tensor): (usize, &'static str),
    first: usize,
    wanted: &[T],
    given: &[T],
    columns: usize,
) -> Result<(), Mismatch> {
    if wanted.len() != given.len() {
        let (wanted, given) = (wanted.len(), given.len());
        return Err(Mismatch::Length {
            rank,
            tensor,
            wanted,
            given,
        });
    }
    let mut pairs = wanted.iter().zip(given);
    match pairs.position(|(wanted, given)| wanted != given) {
        Some(index) => Err(Mismatch::Number {
            rank,
            tensor,
            row: first + index / columns,
            column: index % columns,
            wanted: wanted[index].to_string(),
            given: given[index].to_string(),
        }),
        None => Ok(()),
    }
}

/// What the oracle says of a problem: made once, compared with many rounds.
pub struct Oracle {
    dispatched: Vec<Dispatched>,
    expert_rows: Vec<Vec<bf16>>,
    /// Every token of every rank as the format has it.
    encoded: Vec<Vec<Encoded>>,
}

/// Tokens that a thread encodes.
const ENCODED_TOGETHER: usize = 256;

/// Every token in the format.
fn encode(problem: &Problem, format: TokenFormat) -> Vec<Vec<Encoded>> {
    let hidden = problem.hidden;
    let encode = move |x: &[bf16]| -> Vec<Encoded> {
        let rows = x.chunks(hidden);
        rows.map(|row| formats::encode(format, row)).collect()
    };
    std::thread::scope(|scope| {
        let spawn = |x| scope.spawn(move || encode(x));
        let inputs = problem.inputs.iter();
        let threads: Vec<Vec<_>> = inputs
            .map(|input| {
                input
                    .x
                    .chunks(hidden * ENCODED_TOGETHER)
                    .map(spawn)
                    .collect()
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Vec<Encoded>>| {
            thread.join().expect("no panic while encoding")
        };
        threads
            .into_iter()
            .map(|threads| threads.into_iter().flat_map(join).collect())
            .collect()
    })
}

/// What outputs must hold for the busiest rank, padding included.
pub fn capacity_for(problem: &Problem, format: TokenFormat) -> Capacity {
    let alignment = format.sizes().row_alignment;
    let offsets = dispatch(problem)
        .into_iter()
        .map(|rank| fp8::padded_offsets(&rank.row_offsets, alignment));
    let of = |offsets: Vec<u32>| Capacity {
        rows: offsets.last().copied().unwrap_or(0) as usize,
        blocks: formats::first_blocks(&offsets).last().copied().unwrap_or(0),
    };
    offsets.map(of).fold(Capacity::default(), Capacity::max)
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
            )?;
            match output.beyond.iter().all(|&byte| byte == POISON) {
                true => Ok(()),
                false => Err(Mismatch::Stray {
                    rank,
                    tensor: "combined",
                    row: output.combined.len() / problem.hidden,
                }),
            }
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
        let (wanted, given) = (wanted.len(), given.len());
        return Err(Mismatch::Length {
            rank,
            tensor,
            wanted,
            given,
        });
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
            config: Config { format, hidden, .. },
            capacity,
            ..
        } = *settings;
        let rank = given.rank;
        let offsets = fp8::padded_offsets(&wanted.row_offsets, format.sizes().row_alignment);
        let at = &given.row_offsets;
        compare_numbers((rank, "row_offsets"), 0, &offsets, at, 1)?;
        let ids = (&wanted.expert_ids, &given.expert_ids);
        compare_numbers((rank, "expert_ids"), 0, ids.0, ids.1, 1)?;
        let blocks = formats::first_blocks(&offsets);
        let mut images = Images::poisoned(format, hidden, capacity, POISON);
        images.clear_unused(format, hidden, capacity, &offsets);
        let mut info = vec![[i32::from_le_bytes([POISON; 4]); 2]; capacity.rows];
        for (expert, pair) in wanted.row_offsets.windows(2).enumerate() {
            for row in pair[0]..pair[1] {
                let place = Place {
                    start: offsets[expert] as usize,
                    block: blocks[expert],
                    row: (row - pair[0]) as usize,
                };
                let source = wanted.src_info[row as usize];
                info[place.start + place.row] = source;
                let rank = &self.encoded[wanted.src_rank[row as usize]];
                images.put(format, hidden, capacity, (place, &rank[source[0] as usize]));
            }
        }
        let (wanted, found) = (info.as_flattened(), given.src_info.as_flattened());
        compare_numbers((rank, "src_info"), 0, wanted, found, 2)?;
        let bytes = formats::row_bytes(format, hidden);
        compare_numbers((rank, "tokens"), 0, &images.tokens, &given.tokens, bytes)?;
        let scales = (&images.scales, &given.scales);
        let column = match format.scale_layout() {
            None => 4 * capacity.rows.max(1),
            Some(_) => formats::groups(format, hidden).max(1),
        };
        compare_numbers((rank, "scales"), 0, scales.0, scales.1, column)?;
        let scales = (&images.row_scales, &given.row_scales);
        compare_numbers((rank, "row_scales"), 0, scales.0, scales.1, 1)?;
        if format.scale_layout() == Some(ScaleLayout::Tiled) {
            let wanted = formats::scales_offsets(&offsets);
            compare_numbers(
                (rank, "scales_offsets"),
                0,
                &wanted,
                &given.scales_offsets,
                1,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ferry::{Config, Group};
    use ferry_reference::workload::{Routing, WorkloadSpec, generate};

    use super::*;
    use crate::session::Session;

    const SCALE: [f32; 4] = [0.5, 1.5, 2.0, 3.0];

    /// A good round of rank 0's, and what is wrong with it after a change.
    fn told(format: TokenFormat, change: impl FnOnce(&mut RankOutputs)) -> String {
        let problem = generate(WorkloadSpec {
            ranks: 2,
            experts: 4,
            top_k: 2,
            hidden: 128,
            tokens: vec![3, 2],
            routing: Routing::Uniform,
            seed: 5,
        });
        let config = Config {
            experts: 4,
            top_k: 2,
            hidden: 128,
            max_tokens_per_rank: 4,
            p2p_world_size: None,
            format,
            combine: CombineMode::Reduced,
            deadline: Duration::from_secs(5),
            debug_checks: true,
            max_sms: None,
            specialise: false,
        };
        let settings = Settings {
            config,
            capacity: capacity_for(&problem, format).with_spare_rows(format, 2),
            split: false,
        };
        let mut session = Session::new(&Group::simulated(2, 7).unwrap(), &settings).unwrap();
        let mut outputs = session.round(&problem, &SCALE, true).unwrap();
        session.close().unwrap();
        change(&mut outputs[0]);
        let result = verify(&problem, &SCALE, &settings, true, &outputs);
        result.err().map(|e| e.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_good_round_passes() {
        for format in TokenFormat::ALL {
            assert_eq!(told(format, |_| ()), "");
        }
    }

    #[test]
    fn one_bit_of_any_output_is_found_and_named() {
        let told = |change: fn(&mut RankOutputs)| told(TokenFormat::Bf16, change);
        let text = told(|rank| rank.tokens[256 + 2 * 9] ^= 1);
        assert!(
            text.starts_with("rank 0: tokens, row 1, column 18: expected"),
            "{text}"
        );
        let text = told(|rank| rank.row_offsets[1] += 1);
        assert!(
            text.starts_with("rank 0: row_offsets, row 1, column 0: expected"),
            "{text}"
        );
        let text = told(|rank| rank.expert_ids[1] = 7);
        assert!(
            text.starts_with("rank 0: expert_ids, row 1, column 0: expected"),
            "{text}"
        );
        let text = told(|rank| rank.src_info[0][1] ^= 1);
        assert!(
            text.starts_with("rank 0: src_info, row 0, column 1: expected"),
            "{text}"
        );
        let text = told(|rank| {
            let x = &mut rank.combined[128 + 5];
            *x = bf16::from_bits(x.to_bits() ^ 1);
        });
        assert!(
            text.contains("rank 0: combined: One value differs, at row 1, column 5"),
            "{text}"
        );
    }

    #[test]
    fn a_stray_write_is_found_and_named() {
        let told = |change: fn(&mut RankOutputs)| told(TokenFormat::BlockwiseFp8, change);
        let stray = |text: String, tensor: &str| {
            let start = format!("rank 0: {tensor}, row");
            assert!(
                text.starts_with(&start) && text.contains("expected"),
                "{text}"
            );
        };
        stray(told(|rank| *rank.tokens.last_mut().unwrap() ^= 1), "tokens");
        stray(
            told(|rank| rank.src_info.last_mut().unwrap()[0] ^= 1),
            "src_info",
        );
        stray(told(|rank| *rank.scales.last_mut().unwrap() ^= 1), "scales");
        let text = told(|rank| rank.beyond[3] = 0);
        assert!(text.contains(" of combined holds nothing"), "{text}");
    }

    #[test]
    fn a_wrong_scale_is_found_and_named() {
        for format in TokenFormat::ALL.into_iter().skip(1) {
            let text = told(format, |rank| rank.scales[0] ^= 1);
            assert!(
                text.starts_with("rank 0: scales, row 0, column 0"),
                "{format:?}: {text}"
            );
        }
        let format = TokenFormat::Nvfp4RowScaled(ScaleLayout::Tiled);
        let text = told(format, |rank| rank.row_scales[0] ^= 1);
        assert!(text.starts_with("rank 0: row_scales, row 0"), "{text}");
        let text = told(format, |rank| rank.scales_offsets[1] += 1);
        assert!(text.starts_with("rank 0: scales_offsets, row 1"), "{text}");
    }
}
