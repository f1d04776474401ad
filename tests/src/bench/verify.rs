//! Compares what a timed round left with the oracle.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use ferry::cuda::CudaDevice;
use ferry::{CombineMode, Device, DevicePtr, ScaleTensor, TokenFormat};
use ferry_reference::{Dispatched, Problem, RankInput, bf16, combine, dispatch, fp8};

use crate::formats::{self, Capacity, Encoded, Place};

use super::inputs::{Inputs, Outputs, select, shape_of};
use super::rig::Rig;
use super::round::Bench;

/// What outputs hold before the round.
pub const POISON: u8 = 0xa5;
/// Up to so many tokens a rank, all are compared. Above: all places, and a sample's values.
const ALL: usize = 1024;
/// Tokens of each rank in a sample.
const SAMPLE: usize = 128;

/// Up to so many where rows are FP8, which the oracle rounds slowly.
const ALL_FP8: usize = 256;

/// What the oracle says of a rank's rows, whatever their payload: by row, padding left out.
struct Places {
    /// Where each row stands among the outputs.
    at: Vec<Place>,
    /// Padded.
    offsets: Vec<u32>,
    source: Vec<usize>,
    info: Vec<[i32; 2]>,
}

/// The oracle's answers for the first set and a number of tokens.
pub struct Oracle<'a> {
    /// With more tokens than are looked at.
    problem: &'a Problem,
    places: Vec<Places>,
    tokens: usize,
    /// Tokens of each rank whose values are compared.
    sample: Vec<usize>,
    format: TokenFormat,
    /// Unless it is BF16: those of the sample, by rank and token.
    encoded: Option<Vec<BTreeMap<usize, Encoded>>>,
}

impl<'a> Oracle<'a> {
    /// Asks the oracle where the first set's rows go.
    pub fn new(inputs: &'a Inputs, format: TokenFormat, tokens: usize) -> Self {
        let problem = &inputs.problems[0];
        let is_bf16 = format == TokenFormat::Bf16;
        let most = if is_bf16 { ALL } else { ALL_FP8 };
        let step = if tokens <= most { 1 } else { tokens / SAMPLE };
        let sample: Vec<usize> = (0..tokens).step_by(step).collect();
        let encoded = (!is_bf16).then(|| encode(problem, format, &sample));
        Self {
            problem,
            places: places(problem, format, tokens),
            tokens,
            sample,
            format,
            encoded,
        }
    }

    /// How much is compared.
    pub fn extent(&self) -> &'static str {
        if self.sample.len() == self.tokens {
            "all"
        } else {
            "sample"
        }
    }

    /// Puts the tokens themselves where combine takes the experts' rows, if those are not what
    /// dispatch wrote.
    pub fn fill_expert_rows(&self, rig: &Rig, bench: &Bench) -> Result<()> {
        if self.encoded.is_none() {
            return Ok(());
        }
        let hidden = self.problem.hidden;
        for (gpu, outputs) in rig.gpus.iter().zip(bench.outputs()) {
            let places = &self.places[gpu.rank];
            let mut rows = vec![bf16::ZERO; outputs.expert_rows.elements()];
            for ((place, &source), info) in places.at.iter().zip(&places.source).zip(&places.info) {
                let token = token(self.problem, source, info[0] as usize);
                let at = place.start + place.row;
                rows[at * hidden..][..hidden].copy_from_slice(token);
            }
            gpu.device
                .upload(outputs.expert_rows.at, bytemuck::cast_slice(&rows))?;
        }
        Ok(())
    }

    /// Compares the outputs of this process's ranks.
    pub fn verify(&self, rig: &Rig, bench: &Bench) -> Result<()> {
        let combined = self.combined(bench.plan.config().combine);
        std::thread::scope(|scope| {
            let ranks = rig.gpus.iter().zip(bench.outputs());
            let threads: Vec<_> = ranks
                .map(|(gpu, outputs)| {
                    let combined = &combined[gpu.rank];
                    scope.spawn(move || {
                        self.verify_dispatch(gpu.rank, &gpu.device, outputs)?;
                        self.verify_combined(gpu.rank, &gpu.device, outputs, combined)
                    })
                })
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().expect("no panic while comparing"))
        })
    }

    fn verify_dispatch(&self, rank: usize, device: &CudaDevice, outputs: &Outputs) -> Result<()> {
        let (places, output) = (&self.places[rank], &outputs.dispatch);
        let capacity = output.tokens.dims[0];
        let offsets: Vec<u32> =
            download(device, output.row_offsets.at, output.row_offsets.elements())?;
        let info: Vec<i32> = download(device, output.src_info.at, 2 * capacity)?;
        let hidden = self.problem.hidden;
        let space = Capacity {
            rows: capacity,
            blocks: match output.scales {
                Some(ScaleTensor::Tiled { scales, .. }) => scales.dims[0],
                _ => 0,
            },
        };
        let bytes = formats::scales_bytes(self.format, hidden, space);
        let scales: Vec<u8> = match output.scales {
            Some(ScaleTensor::Transposed(scales) | ScaleTensor::RowMajor(scales)) => {
                download(device, scales.at, bytes)?
            }
            Some(ScaleTensor::Tiled { scales, .. }) => download(device, scales.at, bytes)?,
            None => Vec::new(),
        };
        let row_scales: Vec<u16> = match output.row_scales {
            Some(scales) => download(device, scales.at, capacity)?,
            None => Vec::new(),
        };
        if offsets != places.offsets {
            bail!("rank {rank}: row_offsets differ from the oracle's");
        }
        let experts: Vec<i32> =
            download(device, output.expert_ids.at, output.expert_ids.elements())?;
        if !experts
            .into_iter()
            .eq(0..self.problem.local_experts() as i32)
        {
            bail!("rank {rank}: expert_ids differ from the oracle's");
        }
        let row_bytes = formats::row_bytes(self.format, hidden);
        let rows: Vec<u8> = download(device, output.tokens.at, capacity * row_bytes)?;
        for ((&place, &source), wanted) in places.at.iter().zip(&places.source).zip(&places.info) {
            let at = place.start + place.row;
            if info[2 * at..][..2] != *wanted {
                bail!("rank {rank}: src_info of row {at} differs from the oracle's");
            }
            let (row, index) = (&rows[at * row_bytes..][..row_bytes], wanted[0] as usize);
            let is_right = match &self.encoded {
                None => row == bytemuck::cast_slice::<bf16, u8>(token(self.problem, source, index)),
                Some(encoded) => encoded[source].get(&index).is_none_or(|encoded| {
                    let width = self.format.sizes().scale_bytes as usize;
                    let mut groups = encoded.scales.chunks(width).enumerate();
                    row == encoded.payload
                        && row_scales.get(at).copied() == encoded.row_scale
                        && groups.all(|(group, wanted)| {
                            let start =
                                formats::scale_at(self.format, hidden, space, (place, group));
                            scales[start..start + width] == *wanted
                        })
                }),
            };
            if !is_right {
                bail!(
                    "rank {rank}: row {at} differs from the oracle's (token {index} of rank {source})"
                );
            }
        }
        Ok(())
    }

    fn verify_combined(
        &self,
        rank: usize,
        device: &CudaDevice,
        outputs: &Outputs,
        wanted: &[bf16],
    ) -> Result<()> {
        let hidden = self.problem.hidden;
        let given: Vec<bf16> = download(device, outputs.combined.at, outputs.combined.elements())?;
        for (&token, wanted) in self.sample.iter().zip(wanted.chunks(hidden)) {
            let given = &given[token * hidden..][..hidden];
            if let Some(difference) = ferry_reference::first_difference(wanted, given, hidden) {
                bail!("rank {rank}: combined token {token}: {difference}");
            }
        }
        Ok(())
    }

    /// What combine gives for the sample, with experts that return what they get.
    fn combined(&self, mode: CombineMode) -> Vec<Vec<bf16>> {
        let mode = match mode {
            CombineMode::Reduced => ferry_reference::CombineMode::Reduced,
            CombineMode::Exact => ferry_reference::CombineMode::Exact,
        };
        let inputs = self.problem.inputs.iter();
        let inputs = inputs
            .map(|input| select(self.problem, input, &self.sample))
            .collect();
        let sample = Problem {
            inputs,
            ..shape_of(self.problem)
        };
        let rows: Vec<_> = dispatch(&sample)
            .into_iter()
            .map(|rank| rank.tokens)
            .collect();
        combine(&sample, &rows, mode)
    }
}

/// Where the rows of the first `tokens` tokens go: the oracle's dispatch of the same routing,
/// with tokens of one element, which is quick whatever the hidden size.
fn places(problem: &Problem, format: TokenFormat, tokens: usize) -> Vec<Places> {
    let thin = |input: &RankInput| RankInput {
        tokens,
        x: vec![bf16::ZERO; tokens],
        topk_ids: input.topk_ids[..tokens * problem.top_k].to_vec(),
        topk_weights: input.topk_weights[..tokens * problem.top_k].to_vec(),
    };
    let inputs = problem.inputs.iter().map(thin).collect();
    let thin = Problem {
        hidden: 1,
        inputs,
        ..shape_of(problem)
    };
    let of = |rank: Dispatched| {
        let offsets = fp8::padded_offsets(&rank.row_offsets, format.sizes().row_alignment);
        let blocks = formats::first_blocks(&offsets);
        let experts = rank.row_offsets.windows(2).zip(offsets.iter().zip(blocks));
        let at = experts.flat_map(|(pair, (&start, block))| {
            (0..(pair[1] - pair[0]) as usize).map(move |row| Place {
                start: start as usize,
                block,
                row,
            })
        });
        let at: Vec<Place> = at.collect();
        Places {
            at,
            offsets,
            source: rank.src_rank,
            info: rank.src_info,
        }
    };
    dispatch(&thin).into_iter().map(of).collect()
}

/// The oracle's encoding of some tokens of every rank, on all cores: it is slow.
fn encode(
    problem: &Problem,
    format: TokenFormat,
    sample: &[usize],
) -> Vec<BTreeMap<usize, Encoded>> {
    let threads = std::thread::available_parallelism().map_or(4, |count| count.get());
    let share = sample
        .len()
        .div_ceil(threads.div_ceil(problem.ranks))
        .max(1);
    std::thread::scope(|scope| {
        let ranks: Vec<Vec<_>> = (0..problem.ranks)
            .map(|rank| {
                // The benchmark gives no global scale.
                let encode = move |&index: &usize| {
                    let row = token(problem, rank, index);
                    (index, formats::encode_with(format, row, 1.0))
                };
                let shares = sample.chunks(share);
                shares
                    .map(|share| scope.spawn(move || share.iter().map(encode).collect::<Vec<_>>()))
                    .collect()
            })
            .collect();
        let join = |shares: Vec<std::thread::ScopedJoinHandle<'_, Vec<_>>>| {
            shares
                .into_iter()
                .flat_map(|share| share.join().expect("no panic while encoding"))
                .collect()
        };
        ranks.into_iter().map(join).collect()
    })
}

/// A token of a rank.
fn token(problem: &Problem, rank: usize, token: usize) -> &[bf16] {
    &problem.inputs[rank].x[token * problem.hidden..][..problem.hidden]
}

fn download<T: bytemuck::Pod>(device: &CudaDevice, at: DevicePtr, count: usize) -> Result<Vec<T>> {
    let mut values = vec![T::zeroed(); count];
    device.download(at, bytemuck::cast_slice_mut(&mut values))?;
    Ok(values)
}
