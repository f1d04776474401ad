//! What to measure.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use ferry::{CombineMode, Config, ScaleLayout, TokenFormat};
use ferry_reference::workload::Routing;

use crate::group::GroupArgs;
use crate::kernel_files::KernelFiles;

/// Zipf's exponent: about that of language.
const ZIPF_EXPONENT: f64 = 1.0;

/// Where the ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GroupChoice {
    /// One process with a thread a GPU
    Local,
    /// A process a GPU, all on one node, without NVSHMEM; under mpirun, or with --rendezvous
    Node,
    /// A process a GPU; under mpirun, or with --rendezvous
    Nvshmem,
}

/// How tokens choose their experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RoutingKind {
    /// Every expert is equally likely
    Uniform,
    /// Some experts are far more popular
    Zipf,
}

impl RoutingKind {
    /// As the workloads name it.
    pub const fn routing(self) -> Routing {
        match self {
            Self::Uniform => Routing::Uniform,
            Self::Zipf => Routing::Zipf {
                exponent: ZIPF_EXPONENT,
            },
        }
    }

    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
        }
    }
}

/// Which combine modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModeChoice {
    /// Summed on the experts' ranks
    Reduced,
    /// Summed at the source
    Exact,
    /// Both
    Both,
}

/// Which dispatch formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatChoice {
    /// BF16
    Bf16,
    /// Blockwise FP8
    Fp8,
    /// MXFP8, scales in tiles
    Mxfp8,
    /// MXFP4, scales in tiles
    Mxfp4,
    /// NVFP4 under one global scale, scales in tiles
    Nvfp4,
    /// NVFP4 under a global scale of each row's own, scales in tiles
    Nvfp4Row,
    /// BF16 and blockwise FP8
    Both,
    /// All of them
    All,
}

/// Whether the L2 cache is flushed before each timed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FlushChoice {
    /// Yes
    Yes,
    /// No
    No,
    /// Once so, once so
    Both,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// GPU time of dispatch (combine is timed beside it)
    Dispatch,
    /// GPU time of combine (dispatch is timed beside it)
    Combine,
    /// Pairs in a graph
    Pair,
    /// What the machine can do
    Limits,
    /// All-gather and reduce-scatter
    Nccl,
    /// The fused SiLU kernels (needs the limits)
    Silu,
    /// Dispatch and combine where nothing travels (needs the limits)
    SkipA2a,
    /// What each option costs (needs the limits)
    Options,
    /// A whole layer with its experts; only if it is named, and built with the feature `cudarc`
    Layer,
}

/// Options of the benchmark.
#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    /// Where the ranks are
    #[arg(long, value_enum, default_value = "local")]
    pub group: GroupChoice,
    /// Ranks [default: one for each GPU; under mpirun, one for each process]
    #[arg(long)]
    pub ranks: Option<usize>,
    /// How ranks have GPUs, and processes meet.
    #[command(flatten)]
    pub group_args: GroupArgs,
    /// PTX in place of the embedded one.
    #[command(flatten)]
    pub files: KernelFiles,
    /// Tokens a rank
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
    /// skip_a2a as on one of this many times as many GPUs: the other experts' assignments go nowhere
    #[arg(long, value_name = "RANKS", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub share_of: u32,
    /// How tokens choose their experts
    #[arg(long, value_enum, default_value = "uniform")]
    pub routing: RoutingKind,
    /// How rows come back
    #[arg(long, value_enum, default_value = "both")]
    pub mode: ModeChoice,
    /// What dispatch makes of a token
    #[arg(long, value_enum, default_value = "both")]
    pub format: FormatChoice,
    /// Timed calls
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    pub iterations: u32,
    /// Calls before them
    #[arg(long, default_value_t = 10)]
    pub warmup: u32,
    /// Most multiprocessors that a kernel occupies [default: all]
    #[arg(long)]
    pub max_sms: Option<u32>,
    /// With the kernels for all shapes, not those compiled for this one
    #[arg(long)]
    pub general: bool,
    /// Whether the L2 cache is flushed before each timed call
    #[arg(long, value_enum, default_value = "both")]
    pub flush_l2: FlushChoice,
    /// Only these parts [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub only: Vec<Part>,
    /// Also time the halves of each call
    #[arg(long)]
    pub split: bool,
    /// 1, 128, 1,024 and 4,096 tokens, reduced mode, fewer calls
    #[arg(long)]
    pub quick: bool,
    /// Do not compare the results with the oracle
    #[arg(long)]
    pub no_verify: bool,
    /// Where to write JSON lines
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// NCCL's library [default: look in the loader's places and python3's packages]
    #[arg(long, value_name = "LIBRARY")]
    pub nccl: Option<PathBuf>,
    /// Also say what the measured limits imply for this many GPUs
    #[arg(long, value_name = "RANKS")]
    pub predict: Option<usize>,
    /// Seed of the workloads
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

impl BenchArgs {
    /// With what `--quick` stands for; tokens ascending.
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

    /// Whether a part is wanted.
    pub fn wants(&self, part: Part) -> bool {
        self.only.contains(&part) || (self.only.is_empty() && part != Part::Layer)
    }

    /// Whether dispatch and combine run at all.
    pub fn wants_rounds(&self) -> bool {
        [Part::Dispatch, Part::Combine, Part::Pair]
            .iter()
            .any(|&part| self.wants(part))
    }

    /// The configuration of a kind.
    pub fn config(&self, format: TokenFormat, combine: CombineMode, tokens: usize) -> Config {
        Config {
            format,
            combine,
            max_sms: self.max_sms,
            specialise: !self.general,
            ..Config::new(self.experts, self.top_k, self.hidden, tokens)
        }
    }

    /// The formats with the modes. Exact combine behind BF16 alone, if more is asked for:
    /// its halves are those of the others.
    pub fn kinds(&self) -> Vec<(TokenFormat, CombineMode)> {
        use CombineMode::{Exact, Reduced};
        use ScaleLayout::Tiled;
        use TokenFormat::{Bf16, BlockwiseFp8, Mxfp4, Mxfp8, Nvfp4, Nvfp4RowScaled};
        let formats: &[_] = match self.format {
            FormatChoice::Bf16 => &[Bf16],
            FormatChoice::Fp8 => &[BlockwiseFp8],
            FormatChoice::Mxfp8 => &[Mxfp8(Tiled)],
            FormatChoice::Mxfp4 => &[Mxfp4(Tiled)],
            FormatChoice::Nvfp4 => &[Nvfp4(Tiled)],
            FormatChoice::Nvfp4Row => &[Nvfp4RowScaled(Tiled)],
            FormatChoice::Both => &[BlockwiseFp8, Bf16],
            FormatChoice::All => &[
                BlockwiseFp8,
                Bf16,
                Mxfp8(Tiled),
                Mxfp4(Tiled),
                Nvfp4(Tiled),
                Nvfp4RowScaled(Tiled),
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

    /// Whether to flush the L2 cache, once or twice.
    pub const fn flushes(&self) -> &'static [bool] {
        match self.flush_l2 {
            FlushChoice::Yes => &[true],
            FlushChoice::No => &[false],
            FlushChoice::Both => &[true, false],
        }
    }
}

/// A mode's name on the command line and in records.
pub const fn mode_name(mode: CombineMode) -> &'static str {
    match mode {
        CombineMode::Reduced => "reduced",
        CombineMode::Exact => "exact",
    }
}
