//! What the user decides.

use std::time::Duration;

use ferry_layout::{CombineMode, TokenFormat};

/// The sizes and the behaviour of a communicator. Plain data; [`Plan::new`](crate::Plan::new)
/// checks it.
///
/// Name the fields that differ from [`Config::new`]'s. Code that does so still compiles when a field is
/// added:
///
/// ```
/// use ferry::{Config, ScaleLayout, TokenFormat};
///
/// let config = Config {
///     format: TokenFormat::Nvfp4(ScaleLayout::Tiled),
///     ..Config::new(256, 8, 7168, 4096)
/// };
/// ```
///
/// All ranks of a group must agree on everything but `deadline`, `debug_checks`, `max_sms`,
/// `specialise`, `options` and, without `skip_a2a`, `shared_expert`;
/// [`Communicator::new`](crate::Communicator::new) compares.
///
/// # In files
///
/// With the feature `serde` it can be read from a file, and written. The four sizes, which [`Config::new`]
/// takes, must be there; what else is not there is as in [`Config::new`], and what there is no field for is
/// refused. In JSON:
///
/// ```json
/// {
///     "experts": 256,
///     "top_k": 8,
///     "hidden": 7168,
///     "max_tokens_per_rank": 128,
///     "format": "nvfp4:tiled",
///     "combine": "exact",
///     "deadline": { "secs": 2, "nanos": 0 },
///     "max_sms": 20
/// }
/// ```
///
/// A `format` is one of the words `bf16`, `fp8` (blockwise), `mxfp8:tiled`, `mxfp8:row-major`, `mxfp4:tiled`,
/// `mxfp4:row-major`, `nvfp4:tiled`, `nvfp4:row-major`, `nvfp4-row:tiled` and `nvfp4-row:row-major`; without
/// a layout, scales are tiled. `combine` is `reduced` or `exact`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
pub struct Config {
    /// Experts of the whole group, 1 to 65,535, divisible by the ranks. Rank `r` holds experts
    /// `r * experts / ranks` and up.
    pub experts: usize,
    /// Experts that a token names, 1 to 32 and at most [`experts`](Self::experts).
    pub top_k: usize,
    /// Elements of a token, a multiple of 8; in formats with scales of the elements whose scales fill a
    /// word: 64 for NVFP4, 128 for the others.
    pub hidden: usize,
    /// Most tokens that one rank brings to a dispatch. Each rank may bring fewer, or none. Times `top_k`, at
    /// most as many as the bits can count that the number of experts leaves of 32: 8,388,608 with 256
    /// experts, 65,536 with 65,535.
    pub max_tokens_per_rank: usize,
    /// Ranks of one node, which write each other's memory directly; divides the ranks. `None`:
    /// all ranks are on one node. A number below the real one sends more through NVSHMEM.
    #[cfg_attr(feature = "serde", serde(default))]
    pub p2p_world_size: Option<usize>,
    /// What dispatch makes of a token. Combine is BF16 in any case.
    #[cfg_attr(feature = "serde", serde(default))]
    pub format: TokenFormat,
    /// How expert outputs come back.
    #[cfg_attr(feature = "serde", serde(default))]
    pub combine: CombineMode,
    /// Whether every token also goes to a shared expert, which each rank has a copy of. Then this rank's own
    /// tokens are the first group of dispatch's outputs, in the same format, and the experts' groups follow
    /// ([`DispatchOutput`](crate::DispatchOutput)). Nothing of that group travels. Outputs hold
    /// `max_tokens_per_rank` rows more ([`Plan::max_rows`](crate::Plan::max_rows)). Combine adds the group's
    /// rows to their tokens, in f32: in reduced mode to the sum as it is, in exact mode to the sum rounded to
    /// BF16. The epilogue follows, then one conversion, to what `combined` is made of. With
    /// `skip_a2a` the ranks share the tokens ([`Plan::shared_tokens`](crate::Plan::shared_tokens)): a token
    /// has its row on one of them, which alone rounds its part before, in exact mode.
    #[cfg_attr(feature = "serde", serde(default))]
    pub shared_expert: bool,
    /// Longest time that a kernel waits for all that it waits for together, from its start. A
    /// dispatch also waits for ranks whose combine has not yet read the round before: for these until the
    /// deadline of this rank's combine before (if it was split, of its wait), if that comes first; once that
    /// has passed, not at all. After it the kernel returns, and
    /// [`Communicator::check`](crate::Communicator::check) says what it waited for.
    #[cfg_attr(feature = "serde", serde(default = "deadline"))]
    pub deadline: Duration,
    /// Whether kernels look for experts that a token lists twice.
    #[cfg_attr(feature = "serde", serde(default))]
    pub debug_checks: bool,
    /// Most streaming multiprocessors that a kernel occupies; `None` for all of the device.
    ///
    /// A kernel holds them whole while it waits for its peers. What waits for peers on a GPU at one time must
    /// fit on it together: two communicators in two streams, or one beside NCCL. See
    /// [`Communicator`](crate::Communicator#what-waits-on-a-gpu-at-one-time). In the stream of a green
    /// context (CUDA 12.4), at most as many as that has. Of ranks that share a GPU, no kernel occupies more
    /// than its [part](crate::device::GpuRanks::limit) of it, whatever this says.
    #[cfg_attr(feature = "serde", serde(default))]
    pub max_sms: Option<u32>,
    /// Whether every rank brings the same tokens, so that nothing has to travel. Each rank's dispatch keeps
    /// the assignments of its own experts, and its combine sums those alone: zeros for a token that names
    /// none of them. These parts are summed in f32, in exact and in reduced mode, and each is rounded once,
    /// to what `combined` is made of ([`shared_expert`](Self::shared_expert): in exact mode before that row,
    /// too). Summing the ranks' results is up to the caller (an all-reduce). No kernel waits for another
    /// rank, and only fused calls are there. A group may have one rank, and a rank at most 2,680 experts,
    /// which every block counts in its shared memory. Whether the tokens are the same is not checked. What a
    /// [`CombineSteps`](crate::CombineSteps) adds on each rank counts as often in the sum of the ranks: give
    /// biases and residual on one rank.
    #[cfg_attr(feature = "serde", serde(default))]
    pub skip_a2a: bool,
    /// Whether the kernels are compiled for this very shape when the communicator is made: a few seconds for
    /// a shape's first one on a machine (the driver keeps the result), and faster calls, most of all with few
    /// tokens. Where [`max_tokens_per_rank`](Self::max_tokens_per_rank) is small, they have no code for many
    /// tokens: a reason to give decoding a plan of its own. Such kernels stay loaded as long as the process.
    /// Without effect on the simulator and where ranks are on several nodes.
    #[cfg_attr(feature = "serde", serde(default))]
    pub specialise: bool,
    /// Whether the kernels that take options are loaded, too, when the communicator is made (a second module,
    /// compiled by the driver, which keeps the result): what a call needs that gives an option. A call with
    /// one is refused without. A [shared expert](Self::shared_expert) and [`skip_a2a`](Self::skip_a2a) imply
    /// it.
    #[cfg_attr(feature = "serde", serde(default))]
    pub options: bool,
}

/// That of [`Config::new`].
const fn deadline() -> Duration {
    Duration::from_secs(10)
}

impl Config {
    /// These sizes, with the defaults: all ranks on one node, [`TokenFormat::Bf16`],
    /// [`CombineMode::Reduced`], no shared expert, a deadline of 10 seconds, no debug checks, all
    /// multiprocessors, tokens that travel (`skip_a2a` is false), the kernels for every shape (`specialise`
    /// is false), and none with options.
    pub const fn new(
        experts: usize,
        top_k: usize,
        hidden: usize,
        max_tokens_per_rank: usize,
    ) -> Self {
        Self {
            experts,
            top_k,
            hidden,
            max_tokens_per_rank,
            p2p_world_size: None,
            format: TokenFormat::Bf16,
            combine: CombineMode::Reduced,
            shared_expert: false,
            deadline: deadline(),
            debug_checks: false,
            max_sms: None,
            skip_a2a: false,
            specialise: false,
            options: false,
        }
    }
}
