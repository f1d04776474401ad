//! Replays given tensors, so that anyone can compare Ferry with a reference of their own.

mod file;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use ferry::{CombineMode, Config, TokenFormat};

use crate::group::{GroupKind, GroupOptions, open};
use crate::session::{Session, Settings};
use crate::verify::capacity_for;
use file::{Given, Tensors, read, serialize, tensors, write};

/// Options of `ferry-tests replay`.
///
/// IN holds, for each rank r: `x.r` bf16 `[tokens, hidden]`, `topk_ids.r` i32 `[tokens, top_k]`,
/// `topk_weights.r` f32 `[tokens, top_k]` (on all ranks or on none), and `expert_scale` f32
/// `[experts]`: the stand-in for an expert multiplies each row by it and rounds to bf16.
/// OUT gets `tokens.r`, `row_offsets.r`, `expert_ids.r`, `src_info.r`, `combined.r`. In exact mode
/// without weights, `combined.r` is `[tokens, top_k, hidden]`; in reduced mode without weights, every
/// weight is 1.
#[derive(clap::Args, Debug)]
pub struct ReplayArgs {
    /// Tensors to read
    #[arg(value_name = "IN.safetensors")]
    input: PathBuf,
    /// Tensors to write
    #[arg(value_name = "OUT.safetensors")]
    output: PathBuf,
    /// Where the ranks are
    #[arg(long, value_enum, default_value = "simulated")]
    group: GroupKind,
    /// How expert outputs come back
    #[arg(long, value_enum, default_value = "reduced")]
    mode: Mode,
    /// Ranks of a node [default: all]
    #[arg(long, value_name = "N")]
    p2p_world_size: Option<usize>,
    /// Make the split calls
    #[arg(long)]
    split: bool,
    /// Of the simulator
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where processes meet without MPI
    #[arg(long, value_name = "HOST:PORT")]
    rendezvous: Option<SocketAddr>,
    /// This process's rank, with --rendezvous
    #[arg(long)]
    rank: Option<u32>,
}

/// [`CombineMode`] on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    /// One row a rank, weighted where the experts are
    Reduced,
    /// One row a top-k slot, weighted at the source
    Exact,
}

/// Runs a replay. Under mpirun, every process reads and rank 0 writes.
pub fn run(args: &ReplayArgs) -> Result<()> {
    let given = read(&args.input)?;
    let mut open = open(&GroupOptions {
        kind: args.group,
        ranks: given.problem.ranks,
        seed: args.seed,
        rendezvous: args.rendezvous,
        rank: args.rank,
    })?;
    let (ranks, wanted) = (open.group.ranks() as usize, given.problem.ranks);
    ensure!(
        ranks == wanted,
        "the file has tensors of {wanted} ranks, the group has {ranks}"
    );
    let settings = settings(args, &given);
    let mut session = Session::new(&open.group, &settings)?;
    let outputs = session.round(&given.problem, &given.scale, given.weights)?;
    session.close()?;
    let apart = settings.config.combine == CombineMode::Exact && !given.weights;
    let own: Tensors = outputs
        .iter()
        .flat_map(|o| tensors(o, &given.problem, apart))
        .collect();
    let all = (open.gather)(&serialize(&own)?)?;
    if open.is_first() {
        write(&args.output, &all)?;
        println!(
            "wrote {}: {ranks} ranks, {:?} mode, {} group",
            args.output.display(),
            settings.config.combine,
            open.group.name()
        );
    }
    Ok(open.group.close()?)
}

fn settings(args: &ReplayArgs, given: &Given) -> Settings {
    let problem = &given.problem;
    let most = problem
        .inputs
        .iter()
        .map(|input| input.tokens)
        .max()
        .unwrap_or(0);
    let config = Config {
        experts: problem.experts,
        top_k: problem.top_k,
        hidden: problem.hidden,
        max_tokens_per_rank: most.max(1),
        p2p_world_size: args.p2p_world_size,
        format: TokenFormat::Bf16,
        combine: match args.mode {
            Mode::Reduced => CombineMode::Reduced,
            Mode::Exact => CombineMode::Exact,
        },
        deadline: Duration::from_secs(30),
        debug_checks: false,
        max_sms: None,
    };
    Settings {
        config,
        capacity: capacity_for(problem, TokenFormat::Bf16),
        split: args.split,
    }
}
