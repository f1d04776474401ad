//! Explanation of a plan: for its users what it takes and which settings go with it, for those who change
//! kernels the tactics of launches and the reasons. Nothing is run.
//!
//! The decisions are those of `tactics`, the grids those of the host. Neither is repeated here.

mod case;
mod facts;
mod path;
pub mod reasons;
mod roles;
mod settings;
mod table;
mod words;

use std::fmt::Write;

use anyhow::Result;
use ferry::device::GpuRanks;
use ferry::layout::Kernel;
use ferry::{CombineMode, Config, Group, Plan, Rank, TokenFormat};
use ferry_layout::MAX_RANKS;
use ferry_protocol::Grid;
use ferry_protocol::tactics::{Phase, Wire};

pub use case::{Case, CaseError};
pub use facts::Question;
pub use table::{HEAD, line};

/// Longest line that is printed.
const COLUMNS: usize = 110;

/// Say what a plan takes and which settings go with how many tokens, without a GPU
///
/// Memory of each rank, bytes on the wire, and settings for a number of tokens. With --kernels what each
/// launch does with them: the roles of warps, a row's way, and why.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct ExplainArgs {
    /// Tokens of each rank
    #[arg(long, value_name = "T", default_value_t = 128)]
    tokens: u32,
    /// Explain what the kernels do with these tokens, and why
    #[arg(long)]
    kernels: bool,
    /// Most tokens that a rank may bring: the plan's [default: --tokens]
    #[arg(long, value_name = "T")]
    max_tokens: Option<u32>,
    /// Token format: bf16, fp8, mxfp8, mxfp4, nvfp4 or nvfp4-row
    #[arg(long, default_value = "bf16")]
    format: TokenFormat,
    /// Mode of combine: reduced or exact
    #[arg(long, default_value = "reduced")]
    mode: CombineMode,
    /// Ranks
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = at_most(MAX_RANKS))]
    ranks: u32,
    /// Nodes that the ranks are on, as many on each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_most(u32::MAX))]
    nodes: u32,
    /// Experts of all ranks together
    #[arg(long, value_name = "E", default_value_t = 256)]
    experts: usize,
    /// Experts of a token
    #[arg(long, value_name = "K", default_value_t = 8)]
    top_k: usize,
    /// Elements of a token
    #[arg(long, value_name = "H", default_value_t = 7168)]
    hidden: usize,
    /// Multiprocessors of the GPU
    #[arg(long, value_name = "N", default_value_t = 132, value_parser = at_most(u32::MAX))]
    multiprocessors: u32,
    /// Most multiprocessors that a kernel occupies [default: all]
    #[arg(long, value_name = "N")]
    max_sms: Option<u32>,
    /// Ranks that share a GPU, each with its part of it
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_most(MAX_RANKS))]
    ranks_per_gpu: u32,
}

/// Numbers from 1 to `most`.
fn at_most(most: u32) -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=i64::from(most))
}

impl ExplainArgs {
    /// Most multiprocessors of a rank's kernel, on the GPU that it shares.
    fn limit(&self) -> Option<u32> {
        let ranks = (0..self.ranks_per_gpu).map(|rank| (Rank(rank), self.multiprocessors));
        GpuRanks::new("GPU", ranks).limit(Rank(0), self.max_sms)
    }

    /// The plan, and a group for it: the simulator stands for any, as a plan asks it only for its size.
    fn plan(&self) -> Result<(Group, Plan)> {
        let Self {
            ranks,
            nodes,
            ranks_per_gpu,
            ..
        } = *self;
        if ranks_per_gpu > ranks {
            return Err(CaseError::MoreThanRanks {
                ranks_per_gpu,
                ranks,
            }
            .into());
        }
        if !ranks.is_multiple_of(nodes) {
            return Err(CaseError::UnevenNodes { nodes, ranks }.into());
        }
        let config = Config {
            p2p_world_size: Some((ranks / nodes) as usize),
            format: self.format,
            combine: self.mode,
            max_sms: self.limit(),
            ..Config::new(
                self.experts,
                self.top_k,
                self.hidden,
                self.max_tokens.unwrap_or(self.tokens) as usize,
            )
        };
        let group = Group::simulated(ranks, 0)?;
        let plan = Plan::new(&group, config)?;
        Ok((group, plan))
    }
}

/// Prints what the plan takes and which settings go with it, or what its launches do.
///
/// # Errors
/// A configuration that no communicator has, and [`CaseError`].
pub fn run(args: &ExplainArgs) -> Result<()> {
    let (group, plan) = args.plan()?;
    let (tokens, multiprocessors) = (args.tokens, args.multiprocessors);
    let case = Case::new(&plan, tokens, multiprocessors)?;
    if args.ranks_per_gpu > 1 {
        let (ranks, all, part) = (args.ranks_per_gpu, args.multiprocessors, case.blocks());
        println!("GPU       {ranks} ranks share its {all} SMs: {part} SMs each");
    }
    if args.kernels {
        print!("{}", text(&case)?);
        return Ok(());
    }
    let answer = settings::Answer {
        group: &group,
        plan: &plan,
        tokens,
        multiprocessors,
    };
    print!("{}", answer.text()?);
    Ok(())
}

/// Text for people: the tactics of a case's launches, and the reasons.
pub fn text(case: &Case) -> Result<String> {
    let mut text = String::new();
    introduce(&mut text, case)?;
    for phase in [Phase::Fused, Phase::Send] {
        tell_dispatch(&mut text, case, phase)?;
    }
    tell_combine(&mut text, case)?;
    Ok(text)
}

/// The plan and the grid.
fn introduce(text: &mut String, case: &Case) -> Result<()> {
    let common = case.common();
    let (shape, row, grid) = (&common.shape, &common.row, case.grid(Kernel::Dispatch));
    let (scale_bytes, whole) = (4 * row.scale_words, shape.dispatch_row_bytes());
    let plan = format!(
        "{} ranks, {} on each node; {} experts, top-{}; {} tokens a rank of at most {}; {} {} elements \
         each; {}",
        shape.ranks,
        shape.p2p_world_size,
        shape.experts,
        shape.top_k,
        common.tokens,
        shape.max_tokens_per_rank,
        shape.hidden,
        shape.format().name(),
        words::mode(shape.mode()),
    );
    wrapped(text, "plan      ", &plan)?;
    let row = format!(
        "{whole} bytes on the wire: payload {}, scales {scale_bytes}, header {}, padding; back: {}",
        row.payload_bytes,
        whole - row.header,
        shape.combine_row_bytes(),
    );
    wrapped(text, "row       ", &row)?;
    let Grid { in_block, blocks } = grid;
    let warps = grid.warps();
    let grid =
        format!("{blocks} SMs, a block each (SM n: block n), of {in_block} warps: {warps} warps");
    wrapped(text, "grid      ", &grid)?;
    tell(text, "", &reasons::of_geometry(case))?;
    writeln!(text, "parts     {} a row", case.extent().parts)?;
    tell(text, "", &reasons::of_parts(case))?;
    let rows = common.tokens * shape.ranks;
    if let Some(number) = reasons::of_parts_number(case.extent().parts, rows) {
        tell(text, "", &number)?;
    }
    let numbering = words::numbering(case.dispatch(Phase::Fused).numbering);
    writeln!(text, "numbering {numbering}")?;
    tell(text, "", &reasons::of_numbering(case))
}

fn tell_dispatch(text: &mut String, case: &Case, phase: Phase) -> Result<()> {
    let tactics = case.dispatch(phase);
    let roles = roles::of_dispatch(case, phase);
    writeln!(text, "\n{}", case::dispatch_kernel(phase).name())?;
    heading(text, "wire", words::wire(tactics.wire(roles.senders)))?;
    for question in reasons::of_dispatch_wire(case, phase) {
        tell(text, "  ", &question)?;
    }
    heading(text, "split", words::split(tactics.split))?;
    for question in reasons::of_dispatch_split(case, phase) {
        tell(text, "  ", &question)?;
    }
    for number in reasons::of_dispatch_numbers(case, phase) {
        tell(text, "  ", &number)?;
    }
    for role in &roles.roles {
        writeln!(text, "  {role}")?;
    }
    if let Some(position) = roles.offsets {
        let (warp, block) = (position.index, position.block);
        writeln!(
            text,
            "  offsets  warp {warp} of SM {block}, before it receives"
        )?;
    }
    way_to_experts(text, case, phase)
}

/// Differences between a launch that only sends and the fused one.
fn way_to_experts(text: &mut String, case: &Case, phase: Phase) -> Result<()> {
    let (steps, fused) = (
        path::of_dispatch(case, phase),
        path::of_dispatch(case, Phase::Fused),
    );
    let same = steps
        .iter()
        .zip(&fused)
        .take_while(|(step, fused)| step == fused);
    let same: Vec<_> = same.map(|(step, _)| step.0).collect();
    match (phase, same.last()) {
        (Phase::Send, Some(last)) => {
            let dispatch = Kernel::Dispatch.name();
            writeln!(text, "  a row's way: as in {dispatch} up to `{last}`, then")?;
        }
        _ => writeln!(text, "  a row's way")?,
    }
    let skipped = if phase == Phase::Send { same.len() } else { 0 };
    way(text, &steps[skipped..])
}

fn tell_combine(text: &mut String, case: &Case) -> Result<()> {
    let tactics = case.combine();
    writeln!(text, "\n{}", Kernel::Combine.name())?;
    heading(text, "wire", words::wire(tactics.wire))?;
    for question in reasons::of_combine_wire(case) {
        tell(text, "  ", &question)?;
    }
    heading(text, "split", words::split(tactics.split))?;
    for question in reasons::of_combine_split(case) {
        tell(text, "  ", &question)?;
    }
    match tactics.batch {
        1 => heading(text, "batch", "one item at a time")?,
        batch => heading(text, "batch", &format!("{batch} items together"))?,
    }
    tell(text, "  ", &reasons::of_combine_batch(case))?;
    let parts = tactics.reduce_parts;
    heading(text, "reduce", &format!("{parts} parts of each token"))?;
    if tactics.wire == Wire::Inline {
        if let Some(number) = reasons::of_parts_number(parts, case.common().tokens) {
            tell(text, "  ", &number)?;
        }
        tell(text, "  ", &reasons::of_polling(case))?;
    }
    for role in roles::of_combine(case) {
        writeln!(text, "  {role}")?;
    }
    writeln!(text, "  a row's way back")?;
    way(text, &path::of_combine(case))
}

fn heading(text: &mut String, choice: &str, value: &str) -> Result<()> {
    Ok(writeln!(text, "  {choice:<8} {value}")?)
}

/// A reason, below what it is for.
fn tell(text: &mut String, indent: &str, reason: &impl std::fmt::Display) -> Result<()> {
    wrapped(text, &format!("{indent}          - "), &reason.to_string())
}

fn way(text: &mut String, steps: &[path::Step]) -> Result<()> {
    for (word, step) in steps {
        wrapped(text, &format!("    {word:<10} "), step)?;
    }
    Ok(())
}

/// `words` behind `first`, in lines of at most [`COLUMNS`].
fn wrapped(text: &mut String, first: &str, words: &str) -> Result<()> {
    let mut line = first.to_owned();
    for word in words.split(' ') {
        if line.len() + word.len() > COLUMNS && line.len() > first.len() {
            writeln!(text, "{}", line.trim_end())?;
            line = " ".repeat(first.len());
        }
        line += word;
        line.push(' ');
    }
    Ok(writeln!(text, "{}", line.trim_end())?)
}
