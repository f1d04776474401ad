//! The test program: GPU tests, the demo, and replays of given tensors.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ferry_tests::group::{GroupArgs, GroupKind};
use ferry_tests::{bench, damaged, demo, explain, gpu, network, replay, rows, sharing, soak};

/// Runs Ferry's dispatch and combine and compares them with a sequential oracle.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// Commands. Their arguments have the texts of `--help`: a comment here would replace these.
#[derive(Subcommand)]
enum Command {
    Demo(demo::DemoArgs),
    Explain(explain::ExplainArgs),
    Replay(replay::ReplayArgs),
    Gpu(gpu::GpuArgs),
    Killed(gpu::killed::KilledArgs),
    Sanitize(gpu::sanitize::SanitizeArgs),
    Bench(bench::BenchArgs),
    Soak(soak::SoakArgs),
    Rows(rows::RowsArgs),
    Damaged(damaged::sweep::DamagedArgs),
}

impl Command {
    /// The way its ranks meet, if it opens a group whose processes can have a network between them.
    const fn group_args(&self) -> Option<&GroupArgs> {
        match self {
            Self::Replay(args) => Some(&args.group_args),
            Self::Gpu(args) => Some(&args.group_args),
            Self::Bench(args) => Some(&args.group_args),
            Self::Soak(args) => Some(&args.group_args),
            _ => None,
        }
    }

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
    if command
        .group_args()
        .is_some_and(|args| args.network.is_some())
    {
        return end(network::run());
    }
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
    end(result)
}

/// The program's code, after a line for an error.
fn end(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
