//! The test program: GPU tests, the demo, and replays of given tensors.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ferry_tests::group::GroupKind;
use ferry_tests::{bench, damaged, demo, explain, gpu, replay, rows, sharing, soak};

/// Runs Ferry's dispatch and combine and compares them with a sequential oracle.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Carry a text's words to their experts and back, and show what happens
    Demo(demo::DemoArgs),
    /// Explain what a launch does with a number of tokens, and why, without a GPU
    Explain(explain::ExplainArgs),
    /// Run given tensors through dispatch, a stand-in for the experts, and combine
    Replay(replay::ReplayArgs),
    /// Run the acceptance tests on GPUs (or, to try them out, in the simulator)
    Gpu(gpu::GpuArgs),
    /// Start one process per GPU and kill one of them, repeatedly
    Killed(gpu::killed::KilledArgs),
    /// Run the acceptance tests on one GPU under the tools of compute-sanitizer
    Sanitize(gpu::sanitize::SanitizeArgs),
    /// Measure dispatch and combine on GPUs, beside the limits of the machine
    Bench(bench::BenchArgs),
    /// Run rounds with fresh seeds until the time is up, each compared with the oracle
    Soak(soak::SoakArgs),
    /// Run every layout of rows that stay as they came in every format, all else drawn, in the simulator
    Rows(rows::RowsArgs),
    /// Damage windows of simulated ranks: each must end and touch no memory that is not its own
    Damaged(damaged::sweep::DamagedArgs),
}

impl Command {
    /// Whether this process drives several ranks that share GPUs. A process with one rank needs no more than
    /// the driver's default number of queues: with 32 each, not all of 4 processes got a context under MPS.
    fn shares_gpus(&self) -> bool {
        match self {
            Self::Demo(args) => args.group_args.share_gpus,
            Self::Replay(args) => args.group_args.share_gpus && !args.group.has_processes(),
            Self::Gpu(args) => args.group_args.share_gpus && !args.group.has_processes(),
            Self::Bench(args) => {
                args.group_args.share_gpus && args.group == bench::options::GroupChoice::Local
            }
            Self::Soak(args) => {
                args.group_args.share_gpus && !args.group.is_some_and(GroupKind::has_processes)
            }
            Self::Killed(_)
            | Self::Explain(_)
            | Self::Sanitize(_)
            | Self::Rows(_)
            | Self::Damaged(_) => false,
        }
    }
}

fn main() -> ExitCode {
    let command = Arguments::parse().command;
    if command.shares_gpus() {
        // SAFETY: no other thread runs: this one has only read the command line.
        unsafe { sharing::ask_for_queues() };
    }
    let result = match command {
        Command::Demo(args) => demo::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Gpu(args) => gpu::run(&args),
        Command::Killed(args) => gpu::killed::run(&args),
        Command::Sanitize(args) => gpu::sanitize::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Soak(args) => soak::run(&args),
        Command::Rows(args) => rows::run(&args),
        Command::Damaged(args) => damaged::sweep::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
