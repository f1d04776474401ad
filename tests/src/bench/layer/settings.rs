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
    /// Whether NCCL carries tokens: every rank encodes its own as dispatch would, gets all of them, and sorts
    /// and sums those of its experts.
    pub nccl: bool,
    pub seed: u64,
}

/// A stage of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Router,
    TopK,
    Encode,
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
            (Stage::Encode, "encode"),
            (Stage::AllGather, "all-gather"),
            (Stage::Dispatch, dispatch),
            (Stage::GateUp, "GEMM: gate and up"),
            (Stage::Silu, "fused SiLU"),
            (Stage::Down, "GEMM: down"),
            (Stage::Combine, combine),
            (Stage::ReduceScatter, "reduce-scatter"),
        ];
        stages.retain(|&(stage, _)| match stage {
            Stage::Encode => self.encodes(),
            Stage::AllGather | Stage::ReduceScatter => self.nccl,
            _ => true,
        });
        stages
    }

    /// Whether rows are encoded before NCCL carries them: dispatch encodes on the way.
    pub fn encodes(&self) -> bool {
        self.nccl && self.format != TokenFormat::Bf16
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

#[cfg(test)]
mod tests {
    use super::*;

    /// NCCL is to carry what dispatch carries: codes where rows are encoded.
    #[test]
    fn rows_are_encoded_before_nccl_carries_them() {
        let of = |format, nccl| {
            let settings = Settings {
                format,
                ranks: 2,
                tokens: 1,
                hidden: BLOCK,
                intermediate: BLOCK,
                experts: 2,
                top_k: 1,
                nccl,
                seed: 1,
            };
            let stages = settings.stages().into_iter();
            let carrying = stages.filter(|(_, name)| !name.contains("GEMM"));
            carrying.map(|(stage, _)| stage).collect::<Vec<_>>()
        };
        use Stage::{AllGather, Combine, Dispatch, Encode, ReduceScatter, Router, Silu, TopK};
        let ferry = [Router, TopK, Dispatch, Silu, Combine];
        let bf16 = [
            Router,
            TopK,
            AllGather,
            Dispatch,
            Silu,
            Combine,
            ReduceScatter,
        ];
        let fp8 = [
            Router,
            TopK,
            Encode,
            AllGather,
            Dispatch,
            Silu,
            Combine,
            ReduceScatter,
        ];
        assert_eq!(of(TokenFormat::BlockwiseFp8, false), ferry);
        assert_eq!(of(TokenFormat::Bf16, false), ferry);
        assert_eq!(of(TokenFormat::Bf16, true), bf16);
        assert_eq!(of(TokenFormat::BlockwiseFp8, true), fp8);
    }
}
