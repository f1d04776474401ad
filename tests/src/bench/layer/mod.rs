//! A layer of a mixture of experts with random weights: router, top-k, dispatch, the experts' two products
//! with SiLU between them, combine; or the same with NCCL's collectives in the place of dispatch and combine.
//! Some tokens' results are compared with f64.

mod gemm;
mod measure;
mod numbers;
mod rank;

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferry::{Communicator, Config, Group, Plan, Stream, TokenFormat};
use libloading::Library;

use super::nccl::Comm;
use numbers::BLOCK;
use rank::Rank;

pub use measure::measure;

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

    fn check(&self) -> Result<()> {
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

/// A layer on all ranks, which are this process's.
pub struct Layer {
    settings: Settings,
    ranks: Vec<Rank>,
}

impl Layer {
    /// Makes weights and tokens, and runs a first round. `streams` and `comms` are the ranks', in their order.
    pub fn new(
        group: &Group,
        settings: Settings,
        streams: &[Stream],
        comms: &[Comm],
    ) -> Result<Self> {
        settings.check()?;
        let Settings {
            ranks,
            tokens,
            hidden,
            experts,
            top_k,
            nccl,
            ..
        } = settings;
        let config = Config {
            format: settings.format,
            skip_a2a: nccl,
            deadline: Duration::from_secs(20),
            ..Config::new(
                experts,
                top_k,
                hidden,
                if nccl { ranks * tokens } else { tokens },
            )
        };
        let plan = Plan::new(group, config)?;
        let mut ranks = Vec::new();
        for (communicator, &stream) in Communicator::new(group, &plan)?.into_iter().zip(streams) {
            let device = group
                .cuda(communicator.rank())
                .context("not a CUDA device")?;
            let comm = comms.get(ranks.len()).copied();
            ranks.push(Rank::new(settings, device, stream, communicator, comm)?);
        }
        let mut layer = Self { settings, ranks };
        layer.first_round()?;
        Ok(layer)
    }

    /// Runs each stage on all ranks before the next one. cuBLASLt loads its kernels with the first products,
    /// and the driver may wait for an idle GPU to do so: a kernel that waits for a peer whose products are
    /// still to be loaded would then wait until its deadline.
    fn first_round(&mut self) -> Result<()> {
        let comm = self.ranks[0].comm;
        for (stage, _) in self.settings.stages() {
            if stage == Stage::GateUp {
                self.ranks.iter_mut().try_for_each(Rank::capture)?;
            }
            let mut enqueue = || {
                self.ranks
                    .iter_mut()
                    .try_for_each(|rank| rank.enqueue(stage))
            };
            match comm {
                // One thread's calls for several ranks.
                Some(comm) => comm.grouped(enqueue)?,
                None => enqueue()?,
            }
            self.wait()?;
        }
        Ok(())
    }

    /// Enqueues a round on all ranks.
    pub fn enqueue(&mut self) -> Result<()> {
        self.ranks.iter_mut().try_for_each(Rank::enqueue_all)
    }

    /// Waits for all ranks.
    pub fn wait(&self) -> Result<()> {
        self.ranks.iter().try_for_each(Rank::wait)
    }

    /// Largest `|y - f64| / |f64|` of `samples` tokens of each rank; NaN if one is.
    ///
    /// # Errors
    /// A token has other experts or weights than its logits say.
    pub fn error(&self, samples: usize) -> Result<f64> {
        let mut all = Vec::new();
        for rank in &self.ranks {
            all.extend(rank.samples(samples)?);
        }
        for sample in &all {
            let token = sample.token;
            ensure!(
                sample.is_routed(),
                "token {token} has other experts than its logits say"
            );
        }
        let settings = &self.settings;
        let errors: Vec<f64> = thread::scope(|scope| {
            let of = |sample| scope.spawn(move || numbers::Sample::error(sample, settings));
            let threads: Vec<_> = all.iter().map(of).collect();
            let ended = threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or(f64::NAN));
            ended.collect()
        });
        let larger = |a: f64, b: f64| if a > b || a.is_nan() { a } else { b };
        Ok(errors.into_iter().fold(0.0, larger))
    }

    /// Closes and frees everything.
    pub fn close(self) -> Result<()> {
        self.wait()?;
        self.ranks.into_iter().try_for_each(Rank::close)
    }
}

/// Fails unless the libraries can be loaded, as cudarc panics if one cannot.
pub fn require_libraries() -> Result<()> {
    for name in ["libcublasLt", "libnvrtc"] {
        let names = [".so.13", ".so.12", ".so"].map(|end| format!("{name}{end}"));
        // SAFETY: the constructors of CUDA's libraries touch nothing of this program.
        let found = names
            .iter()
            .any(|name| unsafe { Library::new(name) }.is_ok());
        ensure!(
            found,
            "{} was not found: put its folder in LD_LIBRARY_PATH",
            names[0]
        );
    }
    Ok(())
}
