//! Sizes and stages of a layer.

use anyhow::{Result, ensure};
use ferry::TokenFormat;

/// Rows and columns of weights that share a scale, and values of a row that do.
pub const BLOCK: usize = 128;

/// A layer, and its numbers.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// BF16, or blockwise FP8 of rows and of weights.
    pub format: TokenFormat,
    pub ranks: usize,
    /// Tokens of each rank.
    pub tokens: usize,
    pub hidden: usize,
    pub intermediate: usize,
    /// Experts of all ranks.
    pub experts: usize,
    pub top_k: usize,
    /// Whether NCCL carries tokens: every rank gets all of them, and sorts and sums those of its experts.
    pub nccl: bool,
    pub seed: u64,
}

/// A stage of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Router,
    TopK,
    AllGather,
    Dispatch,
    GateUp,
    Silu,
    Down,
    Combine,
    ReduceScatter,
}

impl Settings {
    /// Stages in order, with their names.
    pub fn stages(&self) -> Vec<(Stage, &'static str)> {
        let [dispatch, combine] = if self.nccl {
            ["sort by expert", "sum by token"]
        } else {
            ["dispatch", "combine"]
        };
        let mut stages = vec![
            (Stage::Router, "router"),
            (Stage::TopK, "top-k"),
            (Stage::AllGather, "all-gather"),
            (Stage::Dispatch, dispatch),
            (Stage::GateUp, "GEMM: gate and up"),
            (Stage::Silu, "fused SiLU"),
            (Stage::Down, "GEMM: down"),
            (Stage::Combine, combine),
            (Stage::ReduceScatter, "reduce-scatter"),
        ];
        let is_of_nccl = |stage| matches!(stage, Stage::AllGather | Stage::ReduceScatter);
        stages.retain(|&(stage, _)| self.nccl || !is_of_nccl(stage));
        stages
    }

    /// Largest `|y - f64| / |f64|` of a token that passes.
    pub fn bar(&self) -> f64 {
        2.0_f64.powf(if self.format == TokenFormat::Bf16 {
            -7.0
        } else {
            -3.5
        })
    }

    /// Fails if a size cannot be.
    pub fn check(&self) -> Result<()> {
        let (experts, ranks, top_k) = (self.experts, self.ranks, self.top_k);
        ensure!(
            experts.is_multiple_of(ranks),
            "--experts {experts}: the layer needs a multiple of {ranks} ranks"
        );
        ensure!(
            (1..=experts.min(32)).contains(&top_k),
            "--top-k {top_k}: the layer takes 1 to 32 of {experts} experts"
        );
        for (flag, value) in [("hidden", self.hidden), ("intermediate", self.intermediate)] {
            ensure!(
                value > 0 && value.is_multiple_of(BLOCK),
                "--{flag} {value}: the layer needs a multiple of {BLOCK}"
            );
        }
        Ok(())
    }
}
