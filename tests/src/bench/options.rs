//! Command line of the benchmark.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use ferry::{CombineMode, Config, Receive, ReceiveFields, ReceiveLayout, ScaleLayout, TokenFormat};

use super::against;
use super::routing::RoutingChoice;
use crate::group::{GroupArgs, GroupKind};
use crate::kernel_files::KernelFiles;
use ferry_rig::formats::given::{Given, Strides};
use ferry_rig::{GroupFlags, Places};

/// Combine modes to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModeChoice {
    /// Sums on the experts' ranks
    Reduced,
    /// Sums at the source
    Exact,
    /// Both modes
    Both,
}

/// Dispatch formats to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatChoice {
    /// BF16
    Bf16,
    /// Blockwise FP8
    Fp8,
    /// MXFP8, tiled scales
    Mxfp8,
    /// MXFP4, tiled scales
    Mxfp4,
    /// NVFP4 with one global scale, tiled scales
    Nvfp4,
    /// NVFP4 with a global scale per row, tiled scales
    Nvfp4Row,
    /// BF16 and blockwise FP8
    Both,
    /// All formats
    All,
}

/// Values of a switch that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// The switch on
    Yes,
    /// The switch off
    No,
    /// Both, one after the other
    Both,
}

impl Choice {
    /// The values to measure, in order.
    pub const fn values(self) -> &'static [bool] {
        match self {
            Self::Yes => &[true],
            Self::No => &[false],
            Self::Both => &[true, false],
        }
    }
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// GPU time of dispatch (combine is timed beside it)
    Dispatch,
    /// GPU time of combine (dispatch is timed beside it)
    Combine,
    /// Pairs of dispatch and combine in a graph
    Pair,
    /// Limits of the machine
    Limits,
    /// NCCL's all-gather and reduce-scatter
    Nccl,
    /// The fused SiLU kernels (needs the limits)
    Silu,
    /// Dispatch and combine without communication (needs the limits)
    SkipA2a,
    /// Cost of each option (needs the limits)
    Options,
    /// Making communicators, with the driver's cache and without; only if it is named
    SetUp,
    /// A whole layer with its experts; only if it is named, and built with the feature `cudarc`
    Layer,
}

/// Measure dispatch and combine on GPUs, beside the limits of the machine
///
/// Local ranks are all in this process; with --group node and nvshmem every process is a rank: start one for
/// each, with mpirun or with --rendezvous and --rank. BENCHMARKS.md has the method, and figures of other
/// machines.
#[derive(Clone, Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct BenchArgs {
    /// Kind of group, of GPUs
    #[arg(long, value_enum, default_value = "local")]
    pub group: GroupKind,
    /// Number of ranks [default: one per GPU; under mpirun, one per process]
    #[arg(long)]
    pub ranks: Option<usize>,
    /// Sharing of GPUs, and rendezvous of processes.
    #[command(flatten)]
    pub group_args: GroupArgs,
    /// PTX in place of the embedded one.
    #[command(flatten)]
    pub files: KernelFiles,
    /// Tokens per rank
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    )]
    pub tokens: Vec<usize>,
    /// Elements of a token
    #[arg(long, default_value_t = 7168)]
    pub hidden: usize,
    /// Values between an expert's two products, in a layer
    #[arg(long, default_value_t = 2048)]
    pub intermediate: usize,
    /// Experts of a token
    #[arg(long, default_value_t = 8)]
    pub top_k: usize,
    /// Experts of all ranks together
    #[arg(long, default_value_t = 256)]
    pub experts: usize,
    /// skip_a2a as with RANKS times as many GPUs: assignments to the other GPUs' experts are dropped
    #[arg(long, value_name = "RANKS", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub share_of: u32,
    /// Popularity of the experts: uniform, zipf:EXPONENT (1 is about that of language), hot (one expert has
    /// every token), or groups:CHOSEN/GROUPS (each token's experts are of so many of the groups, as 4/8)
    #[arg(long, default_value = "uniform")]
    pub routing: RoutingChoice,
    /// Let the last rank begin each timed call so many microseconds, at most 500, after the others; not pairs
    #[arg(
        long,
        value_name = "MICROSECONDS",
        default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(..=500)
    )]
    pub late_us: u32,
    /// Combine modes
    #[arg(long, value_enum, default_value = "both")]
    pub mode: ModeChoice,
    /// Dispatch formats
    #[arg(long, value_enum, default_value = "both")]
    pub format: FormatChoice,
    /// Layout of received rows: by-expert, padded, view, strided or compact
    #[arg(long, default_value_t = ReceiveLayout::ByExpert)]
    pub receive: ReceiveLayout,
    /// Padding and tables of rows by expert
    #[command(flatten)]
    pub groups: GroupFlags,
    /// Give dispatch rows that are encoded already, with scales in these places; not with BF16
    #[arg(long, value_enum, value_name = "PLACES", num_args = 0..=1, default_missing_value = "row-major")]
    pub pass_through: Option<Places>,
    /// Most tokens of the plans, if not those that ranks bring
    #[arg(long, value_name = "TOKENS")]
    pub plan_tokens: Option<usize>,
    /// Timed calls
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    pub iterations: u32,
    /// Untimed calls before the timed ones
    #[arg(long, default_value_t = 10)]
    pub warmup: u32,
    /// Most multiprocessors that a kernel occupies [default: all]
    #[arg(long)]
    pub max_sms: Option<u32>,
    /// Kernels compiled for the shape (`Config::specialise`), or those for all shapes, which are the
    /// library's default. The parts skip-a2a and options take the former unless it is "no"
    #[arg(long, value_enum, default_value = "both")]
    pub specialise: Choice,
    /// Whether the L2 cache is flushed before each timed call
    #[arg(long, value_enum, default_value = "both")]
    pub flush_l2: Choice,
    /// Parts to measure [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub only: Vec<Part>,
    /// Measure the set-up of this process, for `--only set-up`
    #[arg(long, hide = true)]
    pub set_up_here: bool,
    /// Also time the halves of each call
    #[arg(long)]
    pub split: bool,
    /// 1, 128, 1,024 and 4,096 tokens, reduced mode, fewer calls
    #[arg(long)]
    pub quick: bool,
    /// Do not compare the results with the oracle
    #[arg(long)]
    pub no_verify: bool,
    /// File for JSON lines
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Run another ferry-tests with the same arguments in turns with this one, and tell differences of calls
    /// and pairs from noise: a path without spaces, with arguments of its own behind it, such as
    /// "./ferry-tests --kernels OLD.ptx"
    #[arg(long, value_name = "PROGRAM")]
    pub against: Option<String>,
    /// Turns of each of the two programs
    #[arg(long, value_name = "N", default_value_t = against::TURNS, requires = "against")]
    pub turns: usize,
    /// NCCL library [default: search the loader's paths and python3's packages]
    #[arg(long, value_name = "LIBRARY")]
    pub nccl: Option<PathBuf>,
    /// Also predict times on this many GPUs from the measured limits
    #[arg(long, value_name = "RANKS")]
    pub predict: Option<usize>,
    /// Seed of the workloads
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

impl BenchArgs {
    /// Applies `--quick`; sorts the token counts, and drops zeros and duplicates.
    pub fn resolved(mut self) -> Self {
        if self.quick {
            self.tokens
                .retain(|tokens| [1, 128, 1024, 4096].contains(tokens));
            self.iterations = self.iterations.min(20);
            self.warmup = self.warmup.min(5);
            if self.mode == ModeChoice::Both {
                self.mode = ModeChoice::Reduced;
            }
        }
        self.tokens.retain(|&tokens| tokens > 0);
        self.tokens.sort_unstable();
        self.tokens.dedup();
        self
    }

    /// Whether a part is wanted. Some need rows by expert, and are left out of all parts where rows are not;
    /// so are, between nodes, those that copy from GPU to GPU or have no wire between nodes.
    pub fn wants(&self, part: Part) -> bool {
        let is_of_all = match part {
            Part::Layer | Part::SetUp => false,
            Part::Dispatch | Part::Combine | Part::Pair => true,
            _ if self.has_nodes() => false,
            Part::SkipA2a | Part::Options => self.receive == ReceiveLayout::ByExpert,
            _ => true,
        };
        self.only.contains(&part) || (self.only.is_empty() && is_of_all)
    }

    /// Whether ranks are on several nodes.
    const fn has_nodes(&self) -> bool {
        self.group_args.network.is_some() || self.group_args.node.is_some()
    }

    /// A part that was asked for and is not measured between nodes.
    pub fn part_of_one_node(&self) -> Option<Part> {
        use Part::{Combine, Dispatch, Pair};
        let mut only = self.only.iter().copied();
        only.find(|part| self.has_nodes() && !matches!(part, Dispatch | Combine | Pair))
    }

    /// Whether dispatch and combine run at all.
    pub fn wants_rounds(&self) -> bool {
        [Part::Dispatch, Part::Combine, Part::Pair]
            .iter()
            .any(|&part| self.wants(part))
    }

    /// Configuration of one of the [`kinds`](Self::kinds), specialised if that is to be measured at all.
    pub fn config(
        &self,
        format: TokenFormat,
        combine: CombineMode,
        tokens: usize,
    ) -> anyhow::Result<Config> {
        let fields = ReceiveFields::new(self.receive);
        Ok(Config {
            format,
            combine,
            receive: Receive::try_from(self.groups.put(fields))?,
            max_sms: self.max_sms,
            specialise: self.specialise != Choice::No,
            p2p_world_size: self.group_args.node,
            options: self.given(format) != Given::Bf16 && !self.receive.keeps_rows(),
            ..Config::new(
                self.experts,
                self.top_k,
                self.hidden,
                self.plan_tokens.unwrap_or(0).max(tokens),
            )
        })
    }

    /// Form of the tokens that dispatch is given.
    pub fn given(&self, format: TokenFormat) -> Given {
        match self.pass_through {
            Some(_) if format != TokenFormat::Bf16 => Given::Encoded,
            _ => Given::Bf16,
        }
    }

    /// Places of their scales.
    pub fn strides(&self) -> Strides {
        self.pass_through.map_or(Strides::RowMajor, Places::strides)
    }

    /// Pairs of format and mode. If several of both are asked for, exact combine runs only with BF16: the
    /// halves of its other pairs are measured anyway.
    pub fn kinds(&self) -> Vec<(TokenFormat, CombineMode)> {
        use CombineMode::{Exact, Reduced};
        // Scales that are tiled have no place in rows that stay as they came.
        let scales = match self.receive.keeps_rows() {
            true => ScaleLayout::RowMajor,
            false => ScaleLayout::Tiled,
        };
        use TokenFormat::{Bf16, BlockwiseFp8, Mxfp4, Mxfp8, Nvfp4, Nvfp4RowScaled};
        let formats: &[_] = match self.format {
            FormatChoice::Bf16 => &[Bf16],
            FormatChoice::Fp8 => &[BlockwiseFp8],
            FormatChoice::Mxfp8 => &[Mxfp8(scales)],
            FormatChoice::Mxfp4 => &[Mxfp4(scales)],
            FormatChoice::Nvfp4 => &[Nvfp4(scales)],
            FormatChoice::Nvfp4Row => &[Nvfp4RowScaled(scales)],
            FormatChoice::Both => &[BlockwiseFp8, Bf16],
            FormatChoice::All => &[
                BlockwiseFp8,
                Bf16,
                Mxfp8(scales),
                Mxfp4(scales),
                Nvfp4(scales),
                Nvfp4RowScaled(scales),
            ],
        };
        let modes: &[_] = match self.mode {
            ModeChoice::Reduced => &[Reduced],
            ModeChoice::Exact => &[Exact],
            ModeChoice::Both => &[Reduced, Exact],
        };
        let all = formats
            .iter()
            .flat_map(|&format| modes.iter().map(move |&mode| (format, mode)));
        let doubled = formats.len() > 1 && modes.len() > 1;
        all.filter(|&(format, mode)| !(doubled && format != Bf16 && mode == Exact))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: BenchArgs,
    }

    #[test]
    fn all_parts_are_those_that_the_layout_has() {
        let wants = |flags: &str, part| {
            let words = ["bench"].into_iter().chain(flags.split_whitespace());
            Program::parse_from(words).args.wants(part)
        };
        assert!(
            wants("", Part::Options)
                && wants("", Part::SkipA2a)
                && !wants("", Part::Layer)
                && !wants("", Part::SetUp)
        );
        for layout in ["padded", "view"] {
            let flags = format!("--receive {layout}");
            assert!(!wants(&flags, Part::Options) && !wants(&flags, Part::SkipA2a));
            assert!(wants(&flags, Part::Pair));
            assert!(wants(&format!("{flags} --only options"), Part::Options));
        }
        for part in [Part::Limits, Part::Nccl, Part::Silu, Part::Options] {
            assert!(!wants("--node 2", part) && !wants("--network fence --ranks 2", part));
        }
        assert!(wants("--node 2", Part::Dispatch) && wants("--node 2", Part::Pair));
    }
}
