//! A mixture-of-experts layer on GPUs: router, dispatch, grouped GEMM, fused SiLU, grouped GEMM, combine.
//!
//! ```sh
//! cargo run --release -p ferry-ep --example moe_layer --features cudarc -- --help
//! ```
//!
//! The shape is DeepSeek-V3's unless flags say otherwise, the weights are random, and some tokens'
//! results are compared with f64. Each stage is timed with events, beside the same layer with
//! NCCL's all-gather and reduce-scatter in the place of dispatch and combine.

mod layer;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Barrier};
use std::{panic, process};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use ferry::{Group, GroupOptions, Rank};

use layer::nccl::{self, Nccl};
use layer::weights::{BLOCK, Tiles};
use layer::{Format, Job, Meeting, Shape, Way};
use report::Record;

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
    let group =
        Group::local(&devices, &GroupOptions::default()).context("this example runs on GPUs")?;
    layer::require_libraries()?;
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
                meeting: &OrExit(Barrier::new(shape.ranks)),
            };
            let outcomes = layer::run(&group, &job, &mut nccl)?;
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

/// Where the ranks' threads wait for each other. A rank that fails ends the process, as in NCCL's kernels the
/// others wait for ever.
struct OrExit(Barrier);

impl Meeting for OrExit {
    fn wait(&self) -> Result<()> {
        self.0.wait();
        Ok(())
    }

    fn fail(&self, text: &str) {
        eprintln!("error: {text}");
        process::exit(1)
    }
}
