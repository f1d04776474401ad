//! Compares what a timed round left with the oracle.

use anyhow::Result;
use ferry::{Config, TokenFormat};
use ferry_reference::Problem;

use super::round::Bench;
use ferry_rig::verify::{Compared, Groups, Oracle};

/// Up to so many tokens a rank, all are compared. Above: all places, and a sample's values.
const ALL: usize = 1024;
/// Up to so many where rows are encoded, which the oracle does slowly.
const ALL_ENCODED: usize = 256;
/// Tokens of each rank in a sample.
const SAMPLE: usize = 128;

/// The oracle's answers for the first set and a number of tokens, with experts that return what they get.
pub struct Answers<'a> {
    /// Problem, with more tokens than are looked at.
    problem: &'a Problem,
    scale: Vec<f32>,
    oracle: Oracle,
    format: TokenFormat,
}

impl<'a> Answers<'a> {
    /// Asks the oracle.
    pub fn new(problem: &'a Problem, config: &Config, tokens: usize) -> Self {
        let format = config.format;
        let most = match format {
            TokenFormat::Bf16 => ALL,
            _ => ALL_ENCODED,
        };
        let compared = Compared {
            tokens,
            step: if tokens <= most { 1 } else { tokens / SAMPLE },
            // The benchmark gives none.
            input_scale: 1.0,
            groups: Groups::of(config),
            ..Compared::ALL
        };
        let scale = vec![1.0; problem.experts];
        Self {
            oracle: Oracle::of(problem, &scale, format, compared),
            problem,
            scale,
            format,
        }
    }

    /// Extent of the comparison.
    pub const fn extent(&self) -> &'static str {
        if self.oracle.compares_all() {
            "all"
        } else {
            "sample"
        }
    }

    /// Puts the tokens themselves where combine takes the experts' rows, if those are not what
    /// dispatch wrote.
    pub fn fill_expert_rows(&self, bench: &mut Bench) -> Result<()> {
        if self.format == TokenFormat::Bf16 {
            return Ok(());
        }
        for (_, rank) in bench.session.each() {
            let placement = self.oracle.placement(rank.number());
            rank.answer(self.problem, &self.scale, placement)?;
        }
        Ok(())
    }

    /// Compares the outputs of this process's ranks.
    pub fn verify(&self, bench: &Bench) -> Result<()> {
        let (mode, outputs) = (bench.plan.config().combine, bench.session.outputs()?);
        Ok(self.oracle.verify(mode, true, &outputs)?)
    }
}
