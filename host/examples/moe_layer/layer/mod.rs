//! The layer: what its ranks do, and what their results are compared with.

mod clock;
mod experts;
mod gemm;
pub mod nccl;
mod rank;
pub mod reference;
mod router;
pub mod weights;

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use ferry::cuda::CudaDevice;
use ferry::{Communicator, Config, Group, Plan, TokenFormat};
use libloading::Library;

pub use rank::Outcome;

use nccl::Nccl;
use rank::Layer;
use weights::Tiles;

/// What rows and weights are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// BF16
    Bf16,
    /// e4m3; a scale for 128 values of a row, and for 128 × 128 weights
    Fp8,
}

impl Format {
    const fn token_format(self) -> TokenFormat {
        match self {
            Self::Bf16 => TokenFormat::Bf16,
            Self::Fp8 => TokenFormat::BlockwiseFp8,
        }
    }

    /// Bytes of a value.
    const fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::Fp8 => 1,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::Fp8 => "FP8",
        }
    }

    /// How the experts multiply, for the table.
    pub const fn gemm(self) -> &'static str {
        match self {
            Self::Bf16 => "cublasGemmGroupedBatchedEx, all experts in a call",
            Self::Fp8 => {
                "cublasLtMatmul, FP8 with 1x128 by 128x128 scales, a call and a copy of scales an expert"
            }
        }
    }

    /// The largest ‖y − reference‖ / ‖reference‖ of a token that passes.
    pub fn bar(self) -> f64 {
        match self {
            Self::Bf16 => 2.0_f64.powi(-7),
            Self::Fp8 => 2.0_f64.powf(-3.5),
        }
    }
}

/// What carries tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Dispatch and combine.
    Ferry,
    /// All-gather and reduce-scatter; each rank sorts and sums for itself, with Ferry's kernels.
    Nccl,
}

impl Way {
    pub const fn is_nccl(self) -> bool {
        matches!(self, Self::Nccl)
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Ferry => "Ferry",
            Self::Nccl => "NCCL",
        }
    }
}

/// Sizes.
#[derive(Clone, Copy)]
pub struct Shape {
    pub ranks: usize,
    pub tokens: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub experts: usize,
    pub top_k: usize,
}

/// What all ranks do together.
pub struct Job<'a> {
    pub shape: Shape,
    pub tiles: Arc<Tiles>,
    pub format: Format,
    pub way: Way,
    pub iterations: usize,
    pub warm_up: usize,
    pub samples: usize,
    pub meeting: &'a dyn Meeting,
}

impl Job<'_> {
    /// The stages' names, in order.
    pub fn stages(&self) -> &'static [&'static str] {
        match self.way {
            Way::Ferry => &[
                "router",
                "top-k, on the host",
                "dispatch",
                "counts to the host",
                "GEMM: gate and up",
                "fused SiLU",
                "GEMM: down",
                "combine",
            ],
            Way::Nccl => &[
                "router",
                "top-k, on the host",
                "all-gather",
                "sort by expert",
                "counts to the host",
                "GEMM: gate and up",
                "fused SiLU",
                "GEMM: down",
                "sum by token",
                "reduce-scatter",
            ],
        }
    }
}

/// Where the ranks' threads wait for each other.
pub trait Meeting: Sync {
    /// Waits for all.
    fn wait(&self) -> Result<()>;

    /// A rank has failed: nobody waits for it any more.
    fn fail(&self, text: &str);
}

/// That the experts' libraries can be loaded: cudarc panics where one cannot.
pub fn require_libraries() -> Result<()> {
    ["libcublas", "libcublasLt"]
        .into_iter()
        .try_for_each(require_library)
}

fn require_library(name: &str) -> Result<()> {
    let names = [
        format!("{name}.so.13"),
        format!("{name}.so.12"),
        format!("{name}.so"),
    ];
    // SAFETY: the constructors of CUDA's libraries touch nothing of this program.
    let found = names
        .iter()
        .any(|name| unsafe { Library::new(name) }.is_ok());
    if !found {
        bail!(
            "{} was not found: put the folder that has it in LD_LIBRARY_PATH",
            names[0]
        );
    }
    Ok(())
}

/// Runs a layer on all ranks, which are this process's, a thread each. The error is that of the first rank
/// that failed.
pub fn run(group: &Group, job: &Job<'_>, nccl: &mut [Nccl]) -> Result<Vec<Outcome>> {
    let mut nccl = nccl.iter_mut().filter(|_| job.way.is_nccl());
    let first = Mutex::new(None);
    let fail = |error: anyhow::Error| {
        let text = format!("{error:#}");
        let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(error);
        drop(first);
        job.meeting.fail(&text);
    };
    let ranks = ranks(group, job)?;
    let outcomes: Option<Vec<_>> = thread::scope(|scope| {
        let of_rank = |(communicator, device)| {
            let nccl = nccl.next();
            scope.spawn(move || {
                let _told = ToldOfPanic(job.meeting);
                run_rank(job, communicator, device, nccl).map_err(fail).ok()
            })
        };
        let threads: Vec<_> = ranks.into_iter().map(of_rank).collect();
        let ended = threads.into_iter().map(|thread| thread.join().ok());
        ended.map(Option::flatten).collect()
    });
    match first.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => outcomes.context("a rank's thread panicked"),
    }
}

/// Fails the meeting if its thread panics.
struct ToldOfPanic<'a>(&'a dyn Meeting);

impl Drop for ToldOfPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.fail("a rank's thread panicked");
        }
    }
}

/// A communicator for each rank, and its device.
fn ranks(group: &Group, job: &Job<'_>) -> Result<Vec<(Communicator, Arc<CudaDevice>)>> {
    let Shape {
        ranks,
        tokens,
        hidden,
        experts,
        top_k,
        ..
    } = job.shape;
    let is_nccl = job.way.is_nccl();
    let tokens = if is_nccl { ranks * tokens } else { tokens };
    let plan = Plan::new(
        group,
        Config {
            format: job.format.token_format(),
            // NCCL gave every rank all tokens: each sorts and sums those of its own experts.
            skip_a2a: is_nccl,
            deadline: Duration::from_secs(20),
            ..Config::new(experts, top_k, hidden, tokens)
        },
    )?;
    let with_device = |communicator: Communicator| {
        let device = group
            .cuda(communicator.rank())
            .context("this group has no CUDA devices")?;
        Ok((communicator, device))
    };
    let communicators = Communicator::new(group, &plan)?;
    communicators.into_iter().map(with_device).collect()
}

fn run_rank(
    job: &Job<'_>,
    communicator: Communicator,
    device: Arc<CudaDevice>,
    nccl: Option<&mut Nccl>,
) -> Result<Outcome> {
    let rank = communicator.rank();
    let run = || Layer::new(job, device, communicator, nccl)?.run();
    run().with_context(|| format!("rank {}", rank.0))
}
