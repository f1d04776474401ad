//! Replays given tensors, so that anyone can compare Ferry with a reference of their own.

mod encoded;
mod file;
mod groups;
mod rows;
mod stored;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ferry::{
    CombineMode, Config, Plan, Receive, ReceiveFields, ReceiveLayout, ScaleLayout, TokenFormat,
};

use crate::group::{GroupArgs, GroupKind, GroupOptions, OpenGroup, open};
use crate::kernel_files::KernelFiles;
use crate::sharing;
use ferry_rig::formats;
use ferry_rig::formats::given::Strides;
use ferry_rig::{GroupFlags, Places, Session, Settings};
use file::{Given, read, require_same, serialize, tensors, write};
use stored::Tensors;

/// Longest wait of a kernel, of ranks that have a GPU each.
const DEADLINE: Duration = Duration::from_secs(30);

/// Run given tensors through dispatch, a stand-in for the experts, and combine
///
/// Compare the file that it writes with a reference of yours. Names and shapes are below the options.
///
/// The stand-in for an expert multiplies each token's row of `x`, whatever the format, by the expert's factor
/// and rounds to bf16. Combine then applies the weights: without `topk_weights`, 1 in reduced mode, and in
/// exact mode the rows of a token stay apart. With --late-weights dispatch is not given the weights, but
/// combine that of each row, on the rank of the row's expert; padded blocks always take them so.
///
/// With --receive view, strided or compact a row is a token that has an expert on rank r. The stand-in's
/// answer is the sum over its experts here of weight times (`x` times factor, rounded to bf16), in the order
/// of the slots, products and sums rounded to f32, and the sum to bf16: so `combined` is the same as by
/// expert. Sums begin with `initial`, then `second_initial`, with --initial. With --combine-weights combine
/// returns the weights that dispatch brought.
///
/// With --residual combine adds `residual` to the sums in f32 before they are rounded, and with --skip-a2a to
/// rank r's part; after the shared row, of which the guide, "A round", says when the sum was rounded before.
///
/// With --shared-expert the first group is the shared expert's: all tokens of rank r. With --skip-a2a `x.r`,
/// `topk_ids.r` and `topk_weights.r` are the same for every r, the shared group of rank r has the r-th of
/// runs of tokens one after another, of which the first tokens % ranks are one token longer, and `combined.r`
/// is rank r's part: the sum over all ranks is the result.
///
/// With --pass-through dispatch is given codes and scales instead of `x`, which the experts still take. i32
/// scales are four powers of two, e8m0, the first in the lowest byte; they arrive as f32. All others arrive
/// as they are, but for the two words that the guide, "Formats", names.
///
/// Bytes that no call writes are 0xa5: rows that pad an expert (0 with --clear-padding), rows without a token
/// in views and strided rows (0 with --clear-absent), and `src_info` of the shared expert's rows. The tables
/// of rows without a token are always written: ids, `src_info` of 3 words or of views and strided rows, and
/// `m_indices` are -1, weights 0.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment, after_long_help = include_str!("replay/files.txt"))]
pub struct ReplayArgs {
    /// Tensors to read
    #[arg(value_name = "IN.safetensors")]
    input: PathBuf,
    /// Tensors to write
    #[arg(value_name = "OUT.safetensors")]
    output: PathBuf,
    /// Place of the ranks
    #[arg(long, value_enum, default_value = "simulated")]
    pub group: GroupKind,
    /// Way back of expert outputs: reduced (one row a rank, weighted where the experts are) or exact (one
    /// row a top-k slot, weighted at the source)
    #[arg(long, default_value_t)]
    mode: CombineMode,
    /// Format that dispatch turns tokens into: bf16, fp8 (blockwise), mxfp8, mxfp4, nvfp4 (one global scale)
    /// or nvfp4-row (a global scale of each row's own)
    #[arg(long, default_value_t)]
    format: TokenFormat,
    /// Layout of scales of one byte: tiled (128 rows and 4 groups) or row-major [default: tiled]
    #[arg(long, value_name = "LAYOUT")]
    scales: Option<ScaleLayout>,
    /// Ranks of a node [default: all]
    #[arg(long, value_name = "N")]
    p2p_world_size: Option<usize>,
    /// Make the split calls
    #[arg(long)]
    split: bool,
    /// Have a shared expert, whose group is the first of every rank
    #[arg(long)]
    shared_expert: bool,
    /// Every rank has the same tokens, and nothing travels
    #[arg(long, conflicts_with = "split")]
    skip_a2a: bool,
    /// Add the rows of `residual.r` to the results
    #[arg(long)]
    residual: bool,
    /// Give the weights to combine, a row of the experts each, not to dispatch; in reduced mode
    #[arg(long)]
    late_weights: bool,
    /// Layout of received rows: by-expert, padded (by expert, in blocks), or as they came: view (in the
    /// receive window), strided (at the same places of a tensor) or compact (without gaps)
    #[arg(long, value_name = "LAYOUT", default_value_t)]
    receive: ReceiveLayout,
    /// Type of the expert ids that dispatch is given
    #[arg(long, value_enum, default_value_t)]
    ids: Ids,
    /// Rows that combine takes: rows, one for each received row, or assignments [default: what goes with
    /// --receive]
    #[arg(long, value_enum)]
    combine: Option<Combined>,
    /// Return weights with the rows, too; of rows that stay as they came
    #[arg(long)]
    combine_weights: bool,
    /// Begin sums with `initial.r` and, if it is there, `second_initial.r`; of rows that stay as they came
    #[arg(long)]
    initial: bool,
    /// Receive the scales of fp8 as [hidden / 128, rows], which they always are by expert; in padded blocks
    /// those of each block
    #[arg(long)]
    transposed_scales: bool,
    /// Write zeros to strided rows without a token
    #[arg(long)]
    clear_absent: bool,
    /// Give dispatch the codes and scales of the file; transposed: scales of fp8, as [hidden / 128, tokens]
    #[arg(long, value_enum, value_name = "PLACES", num_args = 0..=1, default_missing_value = "row-major")]
    pass_through: Option<Places>,
    /// Padding and tables of rows by expert
    #[command(flatten)]
    groups: GroupFlags,
    /// Make one call for all ranks of a process instead of one for each
    #[arg(long)]
    all_at_once: bool,
    /// Have the host wait for the numbers of rows between the halves of the dispatch; with --split
    #[arg(long, requires = "split")]
    counts: bool,
    /// Dispatch the tokens once before, and give up that round
    #[arg(long)]
    give_up: bool,
    /// Seed of the simulator
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Ranks [default: those of IN]
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Way that ranks have GPUs, and processes meet.
    #[command(flatten)]
    pub group_args: GroupArgs,
}

/// Type of expert ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Ids {
    /// 32 bits.
    #[default]
    I32,
    /// 64 bits.
    I64,
}

/// Rows that combine takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Combined {
    /// One for each assignment, by expert.
    Assignments,
    /// One for each received row.
    Rows,
}

/// Runs a replay. Under mpirun, every process reads and rank 0 writes.
pub fn run(args: &ReplayArgs) -> Result<()> {
    let given = read(&args.input, args.pass_through);
    // Over MPI, who cannot read the file can still join and tell the others. Over TCP, only the
    // file says how many ranks meet; the others wait no longer than the rendezvous lets them.
    let over_mpi = args.group.has_processes() && args.group_args.rendezvous.is_none();
    let ranks = match &given {
        Ok(given) => given.problem.ranks,
        Err(_) if over_mpi => 0,
        Err(_) => return given.map(drop),
    };
    let open = open(&GroupOptions {
        kind: args.group,
        ranks,
        seed: args.seed,
        args: args.group_args.clone(),
        files: KernelFiles::default(),
    })?;
    replay(open, args, given)
}

/// Replays on a group. After each step that can fail on one process alone, all agree: what comes
/// next waits for everyone.
fn replay(mut open: OpenGroup, args: &ReplayArgs, given: Result<Given>) -> Result<()> {
    let prepared = given.and_then(|given| prepare(&open, args, given));
    let (given, settings) = open.agree(prepared)?;
    if let Some(title) = sharing::title(open.ranks_per_gpu).filter(|_| open.is_first()) {
        println!("{title}");
    }
    let session = Session::new(&open.group, &settings);
    let mut session = open.agree(session.map_err(Into::into))?;
    session.call_all_at_once(args.all_at_once);
    session.give_up_before_rounds(args.give_up);
    session.count_on_host(args.counts);
    if args.late_weights {
        session.give_weights_late();
    }
    if let Some(encoded) = given
        .encoded
        .as_ref()
        .filter(|_| args.pass_through.is_some())
    {
        session.give_encoded(&encoded.of_rank);
    }
    let own =
        add_rows(&mut session, args, &given).and_then(|()| round(&mut session, &given, &settings));
    let own = open.agree(own)?;
    open.agree(session.close().map_err(Into::into))?;
    let all = (open.gather)(&own)?;
    let written = if open.is_first() {
        write(&args.output, &all)
    } else {
        Ok(())
    };
    open.agree(written)?;
    if open.is_first() {
        println!(
            "wrote {}: {} ranks, {}, {:?} mode, {} group",
            args.output.display(),
            open.group.ranks(),
            settings.config.format.name(),
            settings.config.combine,
            open.group.name()
        );
    }
    Ok(open.group.close()?)
}

/// Checks all that can be checked without the other processes.
fn prepare(open: &OpenGroup, args: &ReplayArgs, given: Given) -> Result<(Given, Settings)> {
    let (ranks, wanted) = (open.group.ranks() as usize, given.problem.ranks);
    ensure!(
        ranks == wanted,
        "the file has tensors of {wanted} ranks, the group has {ranks}"
    );
    ensure!(
        args.ranks.is_none_or(|asked| asked == wanted),
        "--ranks {}: the file has tensors of {wanted} ranks",
        args.ranks.unwrap_or(wanted)
    );
    if args.skip_a2a {
        require_same(&given.problem)?;
    }
    ensure!(
        !args.shared_expert || given.shared_scale.is_some(),
        "tensor shared_scale is missing, by which --shared-expert multiplies"
    );
    ensure!(
        !args.residual || given.residual.is_some(),
        "tensor residual.0 is missing, which --residual adds"
    );
    ensure!(
        !args.residual || given.weights || args.mode == CombineMode::Reduced,
        "--residual adds to sums, but in exact mode without topk_weights rows stay apart"
    );
    ensure!(
        !args.late_weights || args.mode == CombineMode::Reduced,
        "--late-weights is for --mode reduced, the mode is exact"
    );
    ensure!(
        !args.late_weights || given.weights,
        "tensor topk_weights.0 is missing, which --late-weights gives to combine"
    );
    prepare_rows(args, &given)?;
    prepare_scales(args, &given)?;
    let settings = settings(args, &given, open.scaled(DEADLINE))?;
    let settings = Settings {
        given: form(args, &given, &settings.config)?,
        ..settings
    };
    Plan::new(&open.group, settings.config).with_context(|| args.input.display().to_string())?;
    Ok((given, settings))
}

/// Form of the tokens that dispatch is given.
fn form(args: &ReplayArgs, given: &Given, config: &Config) -> Result<formats::given::Given> {
    match (&given.encoded, args.pass_through) {
        (_, None) => Ok(formats::given::Given::Bf16),
        (Some(encoded), Some(_)) => {
            let first = &encoded.of_rank[0];
            let differs = |rank: &usize| args.skip_a2a && encoded.of_rank[*rank] != *first;
            if let Some(rank) = (0..encoded.of_rank.len()).find(differs) {
                bail!(
                    "with --skip-a2a every rank has the same tokens, but tensor codes.{rank} or \
                     x_scales.{rank} is not that of rank 0"
                );
            }
            encoded.form(config.format, config.hidden)
        }
        (None, Some(_)) => bail!("tensor codes.0 is missing, which --pass-through gives"),
    }
}

/// Checks what goes with the layout of received rows alone; the plan checks the rest.
fn prepare_rows(args: &ReplayArgs, given: &Given) -> Result<()> {
    let (receive, keeps_rows) = (args.receive, args.receive.keeps_rows());
    let fitting = if keeps_rows {
        Combined::Rows
    } else {
        Combined::Assignments
    };
    ensure!(
        args.combine.is_none_or(|combine| combine == fitting),
        "--combine {}: with --receive {receive} combine takes {}",
        word(args.combine.unwrap_or(fitting)),
        word(fitting)
    );
    ensure!(
        keeps_rows || !args.initial,
        "--initial: with --receive {receive} sums begin with 0"
    );
    ensure!(
        !args.initial || given.initial[0].is_some(),
        "tensor initial.0 is missing, with which --initial begins"
    );
    ensure!(
        !keeps_rows || !args.late_weights,
        "--late-weights: with --receive {receive} rows have their weights already"
    );
    Ok(())
}

/// Checks that what is said of scales has an effect.
fn prepare_scales(args: &ReplayArgs, given: &Given) -> Result<()> {
    let format = args.format.name();
    ensure!(
        args.scales.is_none() || args.format.scale_layout().is_some(),
        "--scales: with --format {format} there are no scales of one byte"
    );
    let is_nvfp4 = matches!(args.format, TokenFormat::Nvfp4(_));
    ensure!(
        !is_nvfp4 || given.input_scale.is_none() || args.pass_through.is_none(),
        "tensor input_scale is given, but with --pass-through dispatch takes none: the global scale of \
         {format} codes is yours"
    );
    Ok(())
}

/// Name of rows that combine takes.
const fn word(combined: Combined) -> &'static str {
    match combined {
        Combined::Assignments => "assignments",
        Combined::Rows => "rows",
    }
}

/// Gives combine what it adds to sums, and what sums begin with.
fn add_rows(session: &mut Session, args: &ReplayArgs, given: &Given) -> Result<()> {
    if let Some(rows) = given.residual.as_ref().filter(|_| args.residual) {
        session.add_steps(rows, false)?;
    }
    if args.initial {
        session.begin_with(&given.initial)?;
    }
    Ok(())
}

/// Runs a round, and makes a file of what it left on this process's ranks.
fn round(session: &mut Session, given: &Given, settings: &Settings) -> Result<Vec<u8>> {
    session.set_shared_factor(given.shared_scale.unwrap_or(1.0));
    let outputs = session.round(&given.problem, &given.scale)?;
    let own: Tensors = outputs
        .iter()
        .flat_map(|output| tensors(output, &given.problem, settings))
        .collect();
    serialize(&own)
}

fn settings(args: &ReplayArgs, given: &Given, deadline: Duration) -> Result<Settings> {
    let problem = &given.problem;
    let most = problem
        .inputs
        .iter()
        .map(|input| input.tokens)
        .max()
        .unwrap_or(0);
    let config = Config {
        p2p_world_size: args.p2p_world_size.or(args.group_args.node),
        format: (args.scales).map_or(args.format, |layout| args.format.with_scale_layout(layout)),
        combine: args.mode,
        deadline,
        shared_expert: args.shared_expert,
        skip_a2a: args.skip_a2a,
        options: !args.receive.keeps_rows()
            && (args.residual
                || args.late_weights
                || args.ids == Ids::I64
                || args.pass_through.is_some()),
        receive: Receive::try_from(args.groups.put(ReceiveFields {
            transposed_scales: args.transposed_scales,
            clear_absent: args.clear_absent,
            combine_weights: args.combine_weights,
            ..ReceiveFields::new(args.receive)
        }))?,
        ..Config::new(problem.experts, problem.top_k, problem.hidden, most.max(1))
    };
    Ok(Settings {
        split: args.split,
        apart: !given.weights,
        weights: !args.late_weights,
        input_scale: Some(given.input_scale.unwrap_or(1.0)),
        wide_ids: args.ids == Ids::I64,
        strides: (args.pass_through).map_or(Strides::RowMajor, Places::strides),
        ..Settings::of(config, std::slice::from_ref(problem))
    })
}
