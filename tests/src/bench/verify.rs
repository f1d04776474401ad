//! Compares what a timed round left with the oracle.

use anyhow::Result;
use ferry::{Device, TokenFormat};
use ferry_reference::{Problem, bf16};

use super::inputs::{Inputs, Outputs};
use super::rig::{Gpu, Rig};
use super::round::Bench;
use crate::verify::{Compared, Oracle, RankOutputs, Received};

/// Up to so many tokens a rank, all are compared. Above: all places, and a sample's values.
const ALL: usize = 1024;
/// Up to so many where rows are encoded, which the oracle does slowly.
const ALL_ENCODED: usize = 256;
/// Tokens of each rank in a sample.
const SAMPLE: usize = 128;

/// The oracle's answers for the first set and a number of tokens, with experts that return what they get.
pub struct Answers<'a> {
    /// With more tokens than are looked at.
    problem: &'a Problem,
    scale: Vec<f32>,
    oracle: Oracle,
    tokens: usize,
    format: TokenFormat,
}

impl<'a> Answers<'a> {
    /// Asks the oracle.
    pub fn new(inputs: &'a Inputs, format: TokenFormat, tokens: usize) -> Self {
        let problem = &inputs.problems[0];
        let most = match format {
            TokenFormat::Bf16 => ALL,
            _ => ALL_ENCODED,
        };
        let compared = Compared {
            tokens,
            step: if tokens <= most { 1 } else { tokens / SAMPLE },
            // The benchmark gives none.
            input_scale: 1.0,
            ..Compared::ALL
        };
        let scale = vec![1.0; problem.experts];
        Self {
            oracle: Oracle::of(problem, &scale, format, compared),
            problem,
            scale,
            tokens,
            format,
        }
    }

    /// How much is compared.
    pub const fn extent(&self) -> &'static str {
        match self.oracle.compares_all() {
            true => "all",
            false => "sample",
        }
    }

    /// Puts the tokens themselves where combine takes the experts' rows, if those are not what
    /// dispatch wrote.
    pub fn fill_expert_rows(&self, rig: &Rig, bench: &Bench) -> Result<()> {
        if self.format == TokenFormat::Bf16 {
            return Ok(());
        }
        for (gpu, outputs) in rig.gpus.iter().zip(bench.outputs()) {
            let (placement, to) = (self.oracle.placement(gpu.rank), outputs.expert_rows);
            let rows = placement.expert_rows(self.problem, &self.scale, gpu.rank, to.dims[0]);
            gpu.device.upload(to.at, bytemuck::cast_slice(&rows))?;
        }
        Ok(())
    }

    /// Compares the outputs of this process's ranks.
    pub fn verify(&self, rig: &Rig, bench: &Bench) -> Result<()> {
        let download = |(gpu, outputs)| self.download(gpu, outputs);
        let outputs = std::thread::scope(|scope| {
            let ranks = rig.gpus.iter().zip(bench.outputs());
            let threads: Vec<_> = ranks.map(|of| scope.spawn(move || download(of))).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().expect("no panic while downloading")
            };
            threads.into_iter().map(join).collect::<Result<Vec<_>>>()
        })?;
        let mode = bench.plan.config().combine;
        Ok(self.oracle.verify(mode, true, &outputs)?)
    }

    fn download(&self, gpu: &Gpu, outputs: &Outputs) -> Result<RankOutputs> {
        let device: &dyn Device = &*gpu.device;
        let combined = outputs.combined.output(self.tokens)?.rows();
        let combined: Vec<bf16> = device.download_tensor(&combined)?;
        Ok(RankOutputs {
            rank: gpu.rank,
            received: Received::download(device, outputs.dispatch.output(), self.format)?,
            combined,
            beyond: Vec::new(),
        })
    }
}
