//! The test program: GPU tests, the demo, and replays of given tensors.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ferry_tests::group::GroupKind;
use ferry_tests::{
    all, bench, damaged, demo, doctor, explain, gpu, network, replay, rows, sharing, soak,
};

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
    All(all::AllArgs),
    Killed(gpu::killed::KilledArgs),
    Sanitize(gpu::sanitize::SanitizeArgs),
    Bench(bench::BenchArgs),
    Soak(soak::SoakArgs),
    Rows(rows::RowsArgs),
    Damaged(damaged::sweep::DamagedArgs),
    Doctor(doctor::DoctorArgs),
}

impl Command {
    /// Whether its ranks are to be started with a network between them. An error if they cannot: their plans
    /// are for one node. `killed` starts its ranks itself.
    fn has_network(&self) -> anyhow::Result<bool> {
        let (args, can) = match self {
            Self::Replay(args) => (&args.group_args, true),
            Self::Gpu(args) => (&args.group_args, true),
            Self::Bench(args) => (&args.group_args, true),
            Self::Soak(args) => (&args.group_args, true),
            Self::Demo(args) => (&args.group_args, false),
            Self::Doctor(args) => (&args.group_args, false),
            _ => return Ok(false),
        };
        let has = args.network.is_some();
        let names = "is for gpu, replay, soak and bench";
        anyhow::ensure!(can || !has, "--network: {names}");
        anyhow::ensure!(can || args.node.is_none(), "--node: {names}");
        Ok(has)
    }

    /// Whether this process drives several ranks that share GPUs. A process with one rank needs no more than
    /// the driver's default number of queues: with 32 each, not all of 4 processes got a context under MPS.
    fn shares_gpus(&self) -> bool {
        match self {
            Self::Demo(args) => args.group_args.share_gpus,
            Self::Replay(args) => args.group_args.share_gpus && !args.group.has_processes(),
            Self::Gpu(args) => args.group_args.share_gpus && !args.group.has_processes(),
            Self::Bench(args) => args.group_args.share_gpus && !args.group.has_processes(),
            Self::Soak(args) => {
                args.group_args.share_gpus && !args.group.is_some_and(GroupKind::has_processes)
            }
            Self::Doctor(args) => args.group_args.share_gpus && !args.group.has_processes(),
            Self::All(_)
            | Self::Killed(_)
            | Self::Explain(_)
            | Self::Sanitize(_)
            | Self::Rows(_)
            | Self::Damaged(_) => false,
        }
    }
}

fn main() -> ExitCode {
    let command = Arguments::parse().command;
    match command.has_network() {
        Ok(true) => return end(network::run()),
        Ok(false) => {}
        Err(error) => return end(Err(error)),
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
        Command::All(args) => all::run(&args),
        Command::Killed(args) => gpu::killed::run(&args),
        Command::Sanitize(args) => gpu::sanitize::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Soak(args) => soak::run(&args),
        Command::Rows(args) => rows::run(&args),
        Command::Damaged(args) => damaged::sweep::run(&args),
        Command::Doctor(args) => doctor::run(&args),
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
