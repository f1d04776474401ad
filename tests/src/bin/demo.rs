//! The demo as a program of its own, without the suites' dependencies: `cargo xtask demo`.

use std::process::ExitCode;

use clap::Parser;
use ferry_tests::{demo, sharing};

// The text of `--help` is that of `DemoArgs`.
#[derive(Parser)]
#[command(name = "cargo xtask demo", version)]
struct Arguments {
    #[command(flatten)]
    demo: demo::DemoArgs,
}

fn main() -> ExitCode {
    let args = Arguments::parse().demo;
    if args.group_args.share_gpus {
        // SAFETY: no other thread runs: this one has only read the command line.
        unsafe { sharing::ask_for_queues() };
    }
    match demo::run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
