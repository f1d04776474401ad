//! The demo: a text's words go to their experts and back.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ferry::layout::Shape;
use ferry::{CombineMode, Config, Plan, Receive, ReceiveLayout, TokenFormat};
use ferry_reference::text::{self, TextSpec};
use ferry_reference::{Problem, bf16};

use crate::group::{GroupArgs, GroupKind, GroupOptions, OpenGroup, gpus, open};
use crate::kernel_files::KernelFiles;
use crate::sharing;
use ferry_rig::verify::{Compared, Contents, Mismatch, Oracle, RankOutputs};
use ferry_rig::{Phases, Session, Settings};

/// Text that is carried if none is given.
const README: &str = include_str!("../../README.md");
/// Longest wait of a kernel, of ranks that have a GPU each.
const DEADLINE: Duration = Duration::from_secs(10);
/// Width of the longest bar of the chart.
const BAR: usize = 40;
/// Lines of the chart at most.
const LINES: usize = 32;

/// Carry a text's words to their experts and back, and show what happens
///
/// Words become vectors, a router gives each its experts, and every bit that arrives and returns is compared
/// with a sequential oracle. Runs on this machine's GPUs, and without any in the simulator.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct DemoArgs {
    /// The text [default: Ferry's README]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Ranks [default: all GPUs, or 4 in the simulator]
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Tokens of each rank
    #[arg(long, value_name = "N", default_value_t = 64)]
    tokens: usize,
    /// Elements of a token, a multiple of 8
    #[arg(long, value_name = "H", default_value_t = 256)]
    hidden: usize,
    /// Experts a token goes to
    #[arg(long, value_name = "K", default_value_t = 4)]
    top_k: usize,
    /// Experts of all ranks together
    #[arg(long, value_name = "E", default_value_t = 32)]
    experts: usize,
    /// Layout of received rows: by-expert, padded, view, strided or compact
    #[arg(long, value_name = "LAYOUT", default_value_t)]
    receive: ReceiveLayout,
    /// auto, none, or how many GPUs to use
    #[arg(long, value_name = "auto|none|N", default_value = "auto")]
    gpus: String,
    /// Place of the ranks [default: local, or simulated where there are too few GPUs]
    #[arg(long, value_enum)]
    group: Option<GroupKind>,
    /// Seed of the embedding, the router and the simulator
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Way that ranks have GPUs, and processes meet.
    #[command(flatten)]
    pub group_args: GroupArgs,
}

/// Runs the demo. An error if the oracle disagrees.
pub fn run(args: &DemoArgs) -> Result<()> {
    let (kind, ranks) = choose_group(args, gpus())?;
    let mut open = open(&GroupOptions {
        kind,
        ranks,
        seed: args.seed,
        args: args.group_args.clone(),
        files: KernelFiles::default(),
    })?;
    introduce(&mut open, kind)?;
    let carried = carry(&mut open, args)?;
    let oracle = Oracle::of(
        &carried.problem,
        &carried.scale,
        TokenFormat::Bf16,
        carried.compared,
    );
    let verdict = oracle.verify(CombineMode::Reduced, true, &carried.outputs);
    let wanted = oracle.combined(CombineMode::Reduced, true);
    let all = carried.outputs.iter();
    let errors = all.map(|output| largest_error(&wanted[output.rank], &output.combined));
    let error = errors.fold(0.0, larger);
    let errors = (open.gather)(bytemuck::bytes_of(&error))?;
    let errors = errors
        .iter()
        .map(|bytes| bytemuck::pod_read_unaligned(bytes));
    let error = errors.fold(0.0, larger);
    let rows: Vec<u32> = carried.outputs.iter().flat_map(rows_of_experts).collect();
    let rows = (open.gather)(bytemuck::cast_slice(&rows))?.concat();
    let held: Vec<_> = carried.outputs.iter().flat_map(received_rows).collect();
    let held = (open.gather)(bytemuck::cast_slice(&held))?.concat();
    if open.is_first() {
        let rows = rows.chunks(4).map(bytemuck::pod_read_unaligned).collect();
        show_experts(&carried.problem, rows);
        show_layout(args.receive, &held);
        carried.show(kind);
    }
    let conclusion = open.agree(conclude(verdict, error))?;
    if open.is_first() {
        println!("oracle    {conclusion}");
    }
    Ok(open.group.close()?)
}

/// Tokens that were carried, and what came back on the ranks of this process.
struct Carried {
    problem: Problem,
    compared: Compared,
    scale: Vec<f32>,
    shape: Shape,
    outputs: Vec<RankOutputs>,
    phases: Phases,
}

/// Turns the text into tokens and carries them. Collective.
fn carry(open: &mut OpenGroup, args: &DemoArgs) -> Result<Carried> {
    let ranks = open.group.ranks() as usize;
    let text = match &args.text {
        Some(path) => std::fs::read_to_string(path)
            .with_context(|| format!("--text {}: cannot be read as text", path.display())),
        None => Ok(README.to_owned()),
    };
    let text = open.agree(text)?;
    let config = Config {
        deadline: open.scaled(DEADLINE),
        debug_checks: true,
        specialise: true,
        receive: Receive::of(args.receive),
        ..Config::new(args.experts, args.top_k, args.hidden, args.tokens)
    };
    // Checks every number before the text is turned into tokens.
    let plan = Plan::new(&open.group, config)?;
    let problem = text::problem(
        &text,
        TextSpec {
            ranks,
            experts: args.experts,
            top_k: args.top_k,
            hidden: args.hidden,
            tokens_per_rank: args.tokens,
            seed: args.seed,
        },
    )?;
    // Each expert does something else, so that a token at the wrong one is found out.
    let scale: Vec<f32> = (0..args.experts)
        .map(|expert| 0.5 + expert as f32 / 16.0)
        .collect();
    let settings = Settings::of(config, std::slice::from_ref(&problem));
    let session = Session::new(&open.group, &settings).map_err(Into::into);
    let mut session = open.agree(session)?;
    let mut round = || session.round(&problem, &scale).map_err(Into::into);
    // The first one loads code; the second is the one to look at.
    open.agree(round())?;
    let outputs = open.agree(round())?;
    let phases = session.phases();
    session.close()?;
    Ok(Carried {
        compared: Compared::of(&config),
        problem,
        scale,
        shape: *plan.shape(),
        outputs,
        phases,
    })
}

impl Carried {
    fn show(&self, kind: GroupKind) {
        show_wire(&self.problem, &self.shape);
        println!(
            "time      dispatch {:?}, combine {:?}{}",
            self.phases.dispatch,
            self.phases.combine,
            match kind {
                GroupKind::Simulated => " (of the simulator, not of a GPU)",
                _ => " (host wall time, launches included)",
            }
        );
    }
}

/// End of the demo. Bits that agree are not enough: the oracle may have no numbers either.
fn conclude(verdict: Result<(), Mismatch>, error: f32) -> Result<String> {
    match verdict {
        Ok(()) if error.is_nan() => bail!("the results are no numbers: largest error {error}"),
        Ok(()) => Ok(format!("every bit agrees; largest error {error}")),
        Err(mismatch) => bail!("the oracle disagrees: {mismatch}; largest error {error}"),
    }
}

/// The kind of the group, and its ranks; mpirun says how many processes there are. `found` are GPUs.
fn choose_group(args: &DemoArgs, found: usize) -> Result<(GroupKind, usize)> {
    if let Some(kind) = args.group.filter(|&kind| kind != GroupKind::Local) {
        return Ok((kind, args.ranks.unwrap_or(4)));
    }
    let (is_local, gpus) = (args.group.is_some(), args.gpus.as_str());
    if args.group_args.share_gpus {
        ensure!(
            found > 0 && gpus == "auto",
            "--share-gpus: ranks share all GPUs that this program sees, {found}; --gpus is {gpus}"
        );
        return Ok((GroupKind::Local, args.ranks.unwrap_or(found)));
    }
    let wanted = match gpus {
        "none" => 0,
        "auto" => match args.ranks {
            Some(ranks) if ranks > found && !is_local => 0,
            ranks => ranks.unwrap_or(found),
        },
        number => number
            .parse()
            .with_context(|| format!("--gpus {number}: neither auto, none nor a number"))?,
    };
    // Neither number may be dropped for the other. No GPUs leave any number of simulated ranks.
    if let Some(ranks) = args.ranks.filter(|&ranks| wanted > 0 && ranks != wanted) {
        bail!(
            "--gpus {wanted}, but --ranks {ranks}: there is one rank a GPU; with --share-gpus ranks share all"
        );
    }
    if wanted > found {
        bail!("--gpus {wanted}: this program sees {found} GPUs");
    }
    Ok(match wanted {
        0 if !is_local => (GroupKind::Simulated, args.ranks.unwrap_or(4)),
        wanted => (GroupKind::Local, wanted),
    })
}

/// Says where the ranks are. Collective.
fn introduce(open: &mut OpenGroup, kind: GroupKind) -> Result<()> {
    let mut names = String::new();
    for rank in open.group.local_ranks() {
        let name = open.group.device(rank)?.name();
        names += &format!("          rank {}: {name}\n", rank.0);
    }
    let names = (open.gather)(names.as_bytes())?.concat();
    if !open.is_first() {
        return Ok(());
    }
    let group = &open.group;
    match kind {
        GroupKind::Simulated => println!(
            "group     {} ranks in the simulator: no GPU is used, the kernels' logic runs on the CPU",
            group.ranks()
        ),
        _ => {
            println!("group     {} ranks, {}", group.ranks(), group.name());
            print!("{}", String::from_utf8_lossy(&names));
        }
    }
    if let Some(title) = sharing::title(open.ranks_per_gpu) {
        println!("          {title}");
    }
    Ok(())
}

/// Rows that each expert of a rank received.
fn rows_of_experts(outputs: &RankOutputs) -> Vec<u32> {
    let counts = match &outputs.received {
        Contents::ByExpert(received) if received.tables.expert_counts.is_empty() => {
            let offsets = received.row_offsets.windows(2);
            return offsets.map(|pair| pair[1] - pair[0]).collect();
        }
        Contents::ByExpert(received) => &received.tables.expert_counts,
        Contents::Rows(rows) => &rows.expert_counts,
    };
    counts.iter().map(|&rows| rows as u32).collect()
}

/// Rows that a rank received, and rows that its outputs have.
fn received_rows(outputs: &RankOutputs) -> [u64; 2] {
    match &outputs.received {
        Contents::ByExpert(received) => {
            let rows: u32 = rows_of_experts(outputs).iter().sum();
            [rows.into(), received.layout.capacity.rows as u64]
        }
        Contents::Rows(rows) => [rows.present().count() as u64, rows.layout.rows as u64],
    }
}

/// Rows that each expert received, as bars.
fn show_experts(problem: &Problem, rows: Vec<u32>) {
    let tokens: usize = problem.inputs.iter().map(|input| input.tokens).sum();
    let total: u32 = rows.iter().sum();
    println!(
        "tokens    {tokens} of {} elements, each to {} of {} experts: {total} rows",
        problem.hidden, problem.top_k, problem.experts
    );
    let each = rows.len().div_ceil(LINES);
    let bars: Vec<u32> = rows.chunks(each).map(|chunk| chunk.iter().sum()).collect();
    let longest = bars.iter().copied().max().unwrap_or(0).max(1);
    println!(
        "rows per expert{}",
        if each > 1 {
            format!(", {each} experts a line")
        } else {
            String::new()
        }
    );
    for (index, &rows) in bars.iter().enumerate() {
        let width = (rows as usize * BAR).div_ceil(longest as usize);
        println!("  {:>5} {:<BAR$} {rows}", index * each, "█".repeat(width));
    }
    let mean = f64::from(total) / rows.len() as f64;
    let most = rows.iter().copied().max().unwrap_or(0);
    println!(
        "imbalance {:.2} (busiest expert {most} rows, mean {mean:.1})",
        f64::from(most) / mean.max(1e-9)
    );
}

/// Rows in the outputs of all ranks. `held` has, for each rank, those with a token and all, 8 bytes each.
fn show_layout(receive: ReceiveLayout, held: &[u8]) {
    let words: Vec<u64> = held.chunks(8).map(bytemuck::pod_read_unaligned).collect();
    let sum = |at: usize| words.iter().skip(at).step_by(2).sum::<u64>();
    println!(
        "received  {receive}: {} rows with a token of {} in the outputs",
        sum(0),
        sum(1)
    );
}

/// Rows that leave their rank, as bytes, sent once a rank and once an expert.
fn show_wire(problem: &Problem, shape: &Shape) {
    let (mut dispatch, mut combine) = ([0u64; 2], [0u64; 2]);
    for (rank, input) in problem.inputs.iter().enumerate() {
        // Every part of a row that is cut brings the header.
        let header = shape.dispatch_row_bytes() - shape.header_start();
        let again = (shape.parts(input.tokens as u32) - 1) * header;
        let rows = far_rows(problem, rank);
        for way in 0..2 {
            dispatch[way] += rows[way] * u64::from(shape.dispatch_row_bytes() + again);
            combine[way] += rows[way] * u64::from(shape.combine_row_bytes());
        }
    }
    println!(
        "wire      dispatch {} bytes of rows and headers, combine {} bytes of rows, once a rank",
        dispatch[0], combine[0]
    );
    println!(
        "          once an expert {} and {} ({:.2} times as many); flags and counts not included",
        dispatch[1],
        combine[1],
        (dispatch[1] + combine[1]) as f64 / (dispatch[0] + combine[0]).max(1) as f64
    );
}

/// Rows that a rank sends to others: one a rank that a token goes to, and one an expert.
fn far_rows(problem: &Problem, rank: usize) -> [u64; 2] {
    let local = problem.local_experts();
    let (mut by_rank, mut by_expert) = (0, 0);
    for token in 0..problem.inputs[rank].tokens {
        let far = (0..problem.top_k)
            .filter_map(|slot| problem.expert(rank, token, slot))
            .map(|expert| expert / local)
            .filter(|&home| home != rank);
        let homes: std::collections::BTreeSet<_> = far.clone().collect();
        by_rank += homes.len() as u64;
        by_expert += far.count() as u64;
    }
    [by_rank, by_expert]
}

/// NaN if any difference is.
fn largest_error(wanted: &[bf16], given: &[bf16]) -> f32 {
    let pairs = wanted.iter().zip(given);
    let errors = pairs.map(|(wanted, given)| (wanted.to_f32() - given.to_f32()).abs());
    errors.fold(0.0, larger)
}

/// NaN if either is: `f32::max` would pass over it.
fn larger(most: f32, error: f32) -> f32 {
    if error.is_nan() || error > most {
        error
    } else {
        // Once NaN, it stays: nothing is greater.
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kind and the ranks that these arguments choose where so many GPUs are found.
    fn chosen(arguments: &str, found: usize) -> Result<(GroupKind, usize), String> {
        #[derive(clap::Parser)]
        struct Arguments {
            #[command(flatten)]
            demo: DemoArgs,
        }
        let words = std::iter::once("demo").chain(arguments.split_whitespace());
        let args = <Arguments as clap::Parser>::parse_from(words).demo;
        choose_group(&args, found).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn ranks_share_the_gpus_where_that_is_asked_for() {
        use GroupKind::{Local, Node, Simulated};
        assert_eq!(chosen("--ranks 4", 1), Ok((Simulated, 4)));
        assert_eq!(chosen("--ranks 4 --share-gpus", 1), Ok((Local, 4)));
        assert_eq!(chosen("--share-gpus", 2), Ok((Local, 2)));
        assert_eq!(chosen("--group node --share-gpus", 1), Ok((Node, 4)));
        assert_eq!(
            chosen("--group simulated --share-gpus --ranks 3", 0),
            Ok((Simulated, 3))
        );
        let refused = |arguments, found| chosen(arguments, found).unwrap_err();
        assert!(refused("--share-gpus --ranks 2", 0).contains("--share-gpus"));
        assert!(refused("--share-gpus --ranks 2 --gpus 1", 1).contains("--gpus is 1"));
        assert!(refused("--group local --ranks 4", 1).contains("sees 1 GPUs"));
    }

    fn error_of(wanted: [f32; 3], given: [f32; 3]) -> f32 {
        let [wanted, given] = [wanted, given].map(|values| values.map(bf16::from_f32));
        largest_error(&wanted, &given)
    }

    #[test]
    fn the_largest_error_does_not_hide_what_is_no_number() {
        assert_eq!(error_of([1.0, 2.0, 3.0], [1.0, 4.0, 2.0]), 2.0);
        for place in 0..3 {
            let mut given = [1.0, 4.0, 3.0];
            given[place] = f32::NAN;
            assert!(error_of([1.0, 2.0, 3.0], given).is_nan(), "at {place}");
        }
    }

    #[test]
    fn results_that_are_no_numbers_fail_even_where_the_oracle_has_the_same() {
        let told = format!("{:#}", conclude(Ok(()), f32::NAN).unwrap_err());
        assert!(told.contains("largest error NaN"), "{told}");
        let told = conclude(Ok(()), 0.5).unwrap();
        assert_eq!(told, "every bit agrees; largest error 0.5");
    }
}
