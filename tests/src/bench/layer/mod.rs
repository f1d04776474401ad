//! A layer of a mixture of experts with random weights: router, top-k, dispatch, the experts' two products
//! with SiLU between them, combine; or the same with NCCL's collectives in the place of dispatch and combine.
//! Some tokens' results are compared with f64.

mod gemm;
mod kernels;
pub mod measure;
mod numbers;
mod rank;
mod settings;

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferry::{Communicator, Config, Group, Plan, Stream};
use libloading::Library;

use super::nccl::Comm;
use numbers::Sample;
use rank::Rank;
use settings::Stage;

pub use settings::Settings;

/// A layer on all ranks, which are this process's.
pub struct Layer {
    settings: Settings,
    ranks: Vec<Rank>,
}

impl Layer {
    /// Makes weights and tokens, and runs a first round. `streams` and `comms` are the ranks', in order.
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

    /// Runs a round, and waits for all ranks after each stage. cuBLASLt loads its kernels with the first
    /// products, for which the driver may wait until the GPU is idle: a kernel that waits for a peer whose
    /// products are still to be loaded would then wait until its deadline.
    fn first_round(&mut self) -> Result<()> {
        for (stage, _) in self.settings.stages() {
            if stage == Stage::GateUp {
                self.ranks.iter_mut().try_for_each(Rank::capture)?;
            }
            self.enqueue_stage(stage)?;
            self.wait()?;
        }
        Ok(())
    }

    /// Enqueues a round on all ranks, stage by stage: on a GPU of several ranks, a graph that waits for one
    /// rank's dispatch can hold up another rank's stream, whose dispatch must be in it by then.
    pub fn enqueue(&mut self) -> Result<()> {
        let mut stages = self.settings.stages().into_iter();
        stages.try_for_each(|(stage, _)| self.enqueue_stage(stage))
    }

    fn enqueue_stage(&mut self, stage: Stage) -> Result<()> {
        let comm = self.ranks[0].comm;
        let mut ranks = self.ranks.iter_mut();
        let mut enqueue = || ranks.try_for_each(|rank| rank.enqueue(stage));
        match comm {
            // One thread's calls for several ranks.
            Some(comm) => comm.grouped(enqueue),
            None => enqueue(),
        }
    }

    /// Fills results with NaN, so that a round which writes nothing shows. Synchronises.
    pub fn forget(&self) -> Result<()> {
        self.ranks.iter().try_for_each(Rank::forget)
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
            let of = |sample| scope.spawn(move || Sample::error(sample, settings));
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
