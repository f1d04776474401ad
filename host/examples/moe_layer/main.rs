//! A mixture-of-experts layer on GPUs: router, dispatch, grouped GEMM, fused SiLU, grouped GEMM, combine.
//!
//! ```sh
//! cargo run --release -p ferry-ep --example moe_layer --features cudarc -- --help
//! ```
//!
//! The shape is DeepSeek-V3's unless flags say otherwise, the weights are random, and some tokens'
//! results are compared with f64. Each stage is timed with events, beside the same layer with
//! NCCL's all-gather and reduce-scatter in the place of dispatch and combine.

mod clock;
mod experts;
mod gemm;
mod layer;
mod nccl;
mod reference;
mod report;
mod router;
mod weights;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Barrier};
use std::time::Duration;
use std::{panic, process, thread};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use ferry::cuda::CudaDevice;
use ferry::{Config, ExpertParallel, Group, Plan, Rank, TokenFormat};
use libloading::Library;

use layer::{Layer, Outcome};
use nccl::Nccl;
use report::Record;
use weights::{BLOCK, Tiles};

/// A mixture-of-experts layer over several GPUs of this machine, compared with f64 and timed stage by stage.
#[derive(Parser)]
struct Args {
    /// GPUs, a rank each
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Tokens of each rank
    #[arg(long, default_value_t = 4096)]
    tokens: usize,
    /// Values of a token
    #[arg(long, default_value_t = 7168)]
    hidden: usize,
    /// Values between an expert's two multiplications
    #[arg(long, default_value_t = 2048)]
    intermediate: usize,
    /// Experts of all ranks
    #[arg(long, default_value_t = 256)]
    experts: usize,
    /// Experts of a token
    #[arg(long, default_value_t = 8)]
    top_k: usize,
    /// What rows and weights are made of [default: both]
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Steps that are timed
    #[arg(long, default_value_t = 20)]
    iterations: usize,
    /// Steps before these
    #[arg(long, default_value_t = 5)]
    warm_up: usize,
    /// Tokens of each rank that are compared
    #[arg(long, default_value_t = 4)]
    samples: usize,
    /// Of weights and tokens
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// NCCL's library [default: libnccl.so.2, or that of Python's package]
    #[arg(long, value_name = "FILE")]
    nccl: Option<PathBuf>,
    /// Write a JSON object for each layer, one a line
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a chart of the stages, SVG
    #[arg(long, value_name = "FILE")]
    chart: Option<PathBuf>,
}

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

    const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::Fp8 => "FP8",
        }
    }

    /// How the experts multiply, for the table.
    const fn gemm(self) -> &'static str {
        match self {
            Self::Bf16 => "cublasGemmGroupedBatchedEx, all experts in a call",
            Self::Fp8 => {
                "cublasLtMatmul, FP8 with 1x128 by 128x128 scales, a call and a copy of scales an expert"
            }
        }
    }

    /// The largest ‖y − reference‖ / ‖reference‖ of a token that passes.
    fn bar(self) -> f64 {
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
    const fn is_nccl(self) -> bool {
        matches!(self, Self::Nccl)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Ferry => "Ferry",
            Self::Nccl => "NCCL",
        }
    }
}

/// Sizes.
#[derive(Clone, Copy)]
pub struct Shape {
    ranks: usize,
    tokens: usize,
    hidden: usize,
    intermediate: usize,
    experts: usize,
    top_k: usize,
}

/// What all ranks do together.
pub struct Job {
    shape: Shape,
    tiles: Arc<Tiles>,
    format: Format,
    way: Way,
    iterations: usize,
    warm_up: usize,
    samples: usize,
    barrier: Barrier,
}

impl Job {
    /// The stages' names, in order.
    fn stages(&self) -> &'static [&'static str] {
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

fn main() -> ExitCode {
    let report = panic::take_hook();
    // Also cudarc's panics: the other ranks' threads would wait for this one.
    panic::set_hook(Box::new(move |info| {
        report(info);
        process::exit(101)
    }));
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all results are as near to the reference as they must be.
fn run(args: &Args) -> Result<bool> {
    let shape = shape(args)?;
    let devices: Vec<_> = (0..shape.ranks).collect();
    let group = Group::local(&devices).context("this example runs on GPUs")?;
    for library in ["libcublas", "libcublasLt"] {
        require_library(library)?;
    }
    let mut nccl = match nccl::load(args.nccl.as_deref()) {
        Ok(library) => Nccl::all(library, shape.ranks)?,
        Err(error) => {
            println!("NCCL: not found ({error})");
            Vec::new()
        }
    };
    println!(
        "{} x {}, {} tokens each, hidden {}, intermediate {}, top {} of {} experts",
        shape.ranks,
        group.device(Rank(0))?.name(),
        shape.tokens,
        shape.hidden,
        shape.intermediate,
        shape.top_k,
        shape.experts
    );
    let tiles = Arc::new(Tiles::new(args.seed));
    let mut records = Vec::new();
    for format in [Format::Bf16, Format::Fp8] {
        if args.format.is_some_and(|wanted| wanted != format) {
            continue;
        }
        for way in [Way::Ferry, Way::Nccl] {
            if way.is_nccl() && nccl.is_empty() {
                continue;
            }
            let job = Job {
                shape,
                tiles: tiles.clone(),
                format,
                way,
                iterations: args.iterations,
                warm_up: args.warm_up,
                samples: args.samples,
                barrier: Barrier::new(shape.ranks),
            };
            let outcomes = measure(&group, &job, &mut nccl)?;
            let record = Record::new(&job, &outcomes);
            record.print();
            records.push(record);
        }
    }
    if let Some(path) = &args.json {
        report::write_json(path, &records)?;
    }
    if let Some(path) = &args.chart {
        report::draw(path, &records)?;
    }
    Ok(records.iter().all(Record::passes))
}

fn shape(args: &Args) -> Result<Shape> {
    let blocks = args.format != Some(Format::Bf16);
    for (flag, value) in [("hidden", args.hidden), ("intermediate", args.intermediate)] {
        let multiple = if blocks { BLOCK } else { 16 };
        ensure!(
            value > 0 && value.is_multiple_of(multiple),
            "--{flag} {value}: wanted a multiple of {multiple}"
        );
    }
    ensure!(
        args.ranks > 0 && args.experts > 0 && args.experts.is_multiple_of(args.ranks),
        "--experts {}: wanted a multiple of --ranks {}",
        args.experts,
        args.ranks
    );
    ensure!(
        (1..=args.experts).contains(&args.top_k),
        "--top-k {}: wanted 1 to --experts {}",
        args.top_k,
        args.experts
    );
    for (flag, value) in [
        ("tokens", args.tokens),
        ("iterations", args.iterations),
        ("samples", args.samples),
    ] {
        ensure!(value > 0, "--{flag} 0: wanted at least 1");
    }
    Ok(Shape {
        ranks: args.ranks,
        tokens: args.tokens,
        hidden: args.hidden,
        intermediate: args.intermediate,
        experts: args.experts,
        top_k: args.top_k,
    })
}

/// That a library of CUDA's can be loaded: cudarc panics where it cannot.
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

/// Runs a layer on all ranks, a thread each. A rank that fails ends the process, as the others wait for it.
fn measure(group: &Group, job: &Job, nccl: &mut [Nccl]) -> Result<Vec<Outcome>> {
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
    let communicators = ExpertParallel::new(group, &plan)?;
    let mut nccl = nccl.iter_mut();
    let mut ranks = Vec::new();
    for communicator in communicators {
        let device = group
            .cuda(communicator.rank())
            .context("a local group has CUDA devices")?;
        ranks.push((communicator, device, nccl.next().filter(|_| is_nccl)));
    }
    thread::scope(|scope| {
        let of_rank = |(communicator, device, nccl)| {
            scope.spawn(|| or_exit(run_rank(job, communicator, device, nccl)))
        };
        let threads: Vec<_> = ranks.into_iter().map(of_rank).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Outcome>| thread.join().ok();
        threads
            .into_iter()
            .map(join)
            .collect::<Option<_>>()
            .context("a rank's thread panicked")
    })
}

fn run_rank(
    job: &Job,
    communicator: ExpertParallel,
    device: Arc<CudaDevice>,
    nccl: Option<&mut Nccl>,
) -> Result<Outcome> {
    let rank = communicator.rank();
    let run = || Layer::new(job, device, communicator, nccl)?.run();
    run().with_context(|| format!("rank {}", rank.0))
}

fn or_exit<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        process::exit(1)
    })
}
