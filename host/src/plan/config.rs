//! The user's configuration.

use std::time::Duration;

use ferry_layout::{CombineMode, TokenFormat};

use crate::plan::receive::Receive;

/// Sizes and behavior of a communicator. Plain data; [`Plan::new`](crate::Plan::new)
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
/// `specialise`, `options`, without `skip_a2a` also `shared_expert`, and, of `receive`, which layout keeps
/// rows if it does, whether rows by expert are in padded blocks, `transposed_scales`, `clear_absent`,
/// `clear_padding`, `row_sources` and `m_indices`; [`Communicator::new`](crate::Communicator::new) compares.
///
/// # In files
///
/// With the feature `serde` it can be read from a file, and written. The four sizes, which [`Config::new`]
/// takes, must be present; all other fields default to those of [`Config::new`], and unknown fields are
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
///     "receive": "by-expert",
///     "expert_alignment": 128,
///     "deadline": { "secs": 2, "nanos": 0 },
///     "max_sms": 20
/// }
/// ```
///
/// A `format` is one of the words `bf16`, `fp8` (blockwise), `mxfp8:tiled`, `mxfp8:row-major`, `mxfp4:tiled`,
/// `mxfp4:row-major`, `nvfp4:tiled`, `nvfp4:row-major`, `nvfp4-row:tiled` and `nvfp4-row:row-major`; without
/// a layout, scales are tiled. `combine` is `reduced` or `exact`, `receive` is `by-expert`, `padded`, `view`,
/// `strided` or `compact`; what only some layouts have are fields beside it, as in
/// [`ReceiveFields`](crate::ReceiveFields), and refused with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(
    feature = "serde",
    serde(try_from = "file::Fields", into = "file::Fields")
)]
pub struct Config {
    /// Experts of the whole group, 1 to 65,535, divisible by the ranks. Rank `r` holds the experts from
    /// `r * experts / ranks` on.
    pub experts: usize,
    /// Experts that a token names, 1 to 32 and at most [`experts`](Self::experts).
    pub top_k: usize,
    /// Elements of a token, a multiple of 8; in formats with scales a multiple of 64 for NVFP4 and of 128 for
    /// the others, as their scales are moved in words.
    pub hidden: usize,
    /// Most tokens that one rank brings to a dispatch. Each rank may bring fewer, or none. Times `top_k` it
    /// is limited by the bits that the number of experts leaves of 32: 8,388,608 with 256
    /// experts, 65,536 with 65,535.
    pub max_tokens_per_rank: usize,
    /// Ranks of one node, which write each other's memory directly; divides the ranks. `None`:
    /// all ranks are on one node. A number below the real one sends more through NVSHMEM.
    pub p2p_world_size: Option<usize>,
    /// Format in which dispatch encodes tokens. Combine is BF16 in any case.
    pub format: TokenFormat,
    /// Way in which expert outputs return, see [`CombineOutput::Summed`](crate::CombineOutput::Summed).
    pub combine: CombineMode,
    /// Layout of the rows that dispatch leaves on the experts' rank, with what only that layout has.
    pub receive: Receive,
    /// Whether every token also goes to a shared expert, of which each rank has a copy. Then this rank's own
    /// tokens are the first group of dispatch's outputs, in the same format, and the experts' groups follow
    /// ([`DispatchOutput`](crate::DispatchOutput)). That group does not travel. Outputs have
    /// `max_tokens_per_rank` more rows ([`Plan::max_rows`](crate::Plan::max_rows)). Combine adds the group's
    /// rows to their tokens, in f32: in reduced mode to the unrounded sum, in exact mode to the sum rounded
    /// to BF16. The epilogue follows, then one conversion to the elements of `combined`. With
    /// `skip_a2a` the ranks divide the tokens ([`Plan::shared_tokens`](crate::Plan::shared_tokens)): a token
    /// has its row on one of them, and in exact mode only that rank rounds its part before.
    pub shared_expert: bool,
    /// Longest time that a kernel waits, for everything together, from its start, unless
    /// [`Communicator::set_deadline`](crate::Communicator::set_deadline) sets that of a call. A
    /// dispatch also waits for ranks whose combine has not yet read the round before: for these until the
    /// deadline of this rank's own last combine (if it was split, of its wait), if that comes first; once
    /// that has passed, not at all. After the deadline the kernel returns, and
    /// [`Communicator::check`](crate::Communicator::check) says what it waited for.
    pub deadline: Duration,
    /// Whether kernels look for experts that a token lists twice.
    pub debug_checks: bool,
    /// Most streaming multiprocessors that a kernel occupies; `None` for all of the device.
    ///
    /// A kernel occupies them entirely while it waits for its peers. Kernels that wait for peers on a GPU at
    /// one time must fit on it together: two communicators in two streams, or one beside NCCL. See
    /// [`Communicator`](crate::Communicator#what-waits-on-a-gpu-at-one-time). In the stream of a green
    /// context (CUDA 12.4), at most as many as that has. If ranks share a GPU, no kernel occupies more
    /// than its [part](crate::device::GpuRanks::limit) of it, whatever this says.
    pub max_sms: Option<u32>,
    /// Whether every rank brings the same tokens, so that nothing has to travel. Each rank's dispatch keeps
    /// the assignments of its own experts, and its combine sums only those: zeros for a token that names
    /// none of them. These parts are summed in f32 by top-k slot, in exact and in reduced mode, and each is
    /// rounded once, to the elements of `combined` ([`shared_expert`](Self::shared_expert): in exact mode
    /// before that row, too). The caller sums the ranks' results (an all-reduce). No kernel waits for another
    /// rank, and there are no split calls. A group may have one rank, and a rank at most 2,680 experts,
    /// which every block counts in its shared memory. Whether the tokens are the same is not checked. A bias
    /// or residual of [`CombineSteps`](crate::CombineSteps) counts once for each rank that adds it: pass
    /// them on one rank.
    pub skip_a2a: bool,
    /// Whether the kernels are compiled for this very shape when the communicator is made: this takes a few
    /// seconds for a shape's first one on a machine (the driver keeps the result), and makes calls faster,
    /// most of all with few tokens. If [`max_tokens_per_rank`](Self::max_tokens_per_rank) is small, they have
    /// no code for many tokens: a reason to give decoding a plan of its own. Such kernels stay loaded as long
    /// as the process. Without effect in the simulator, with
    /// [`combine_weights`](crate::KeptRows::combine_weights), and if ranks are on several nodes.
    pub specialise: bool,
    /// Whether the kernels with options are loaded, too, when the communicator is made (a second module,
    /// compiled by the driver, which keeps the result). Calls with an option need them, and are refused
    /// without. A [shared expert](Self::shared_expert), [`skip_a2a`](Self::skip_a2a), and whatever
    /// [`ByExpert`](crate::ByExpert) has beyond its defaults imply it. Without effect in other
    /// [layouts](Self::receive) than by expert, whose kernels take options.
    pub options: bool,
}

/// The deadline of [`Config::new`].
const fn deadline() -> Duration {
    Duration::from_secs(10)
}

impl Config {
    /// These sizes, with the defaults: all ranks on one node, [`TokenFormat::Bf16`],
    /// [`CombineMode::Reduced`], rows by expert, no shared expert, a deadline of 10 seconds, no debug checks,
    /// all multiprocessors, tokens that travel (`skip_a2a` is false), the kernels for every shape
    /// (`specialise` is false), none with options, no alignment of experts beyond the format's, and no tables
    /// of padding and rows.
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
            receive: Receive::BY_EXPERT,
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

/// The configuration in files: one level, with the fields of all layouts.
#[cfg(feature = "serde")]
mod file {
    use std::time::Duration;

    use ferry_layout::{CombineMode, ReceiveLayout, TokenFormat};

    use super::{Config, deadline};
    use crate::error::PlanError;
    use crate::plan::receive::ReceiveFields;

    const fn no_alignment() -> usize {
        1
    }

    #[derive(serde::Serialize, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(super) struct Fields {
        experts: usize,
        top_k: usize,
        hidden: usize,
        max_tokens_per_rank: usize,
        #[serde(default)]
        p2p_world_size: Option<usize>,
        #[serde(default)]
        format: TokenFormat,
        #[serde(default)]
        combine: CombineMode,
        #[serde(default)]
        receive: ReceiveLayout,
        #[serde(default)]
        transposed_scales: bool,
        #[serde(default)]
        clear_absent: bool,
        #[serde(default)]
        combine_weights: bool,
        #[serde(default)]
        shared_expert: bool,
        #[serde(default = "deadline")]
        deadline: Duration,
        #[serde(default)]
        debug_checks: bool,
        #[serde(default)]
        max_sms: Option<u32>,
        #[serde(default)]
        skip_a2a: bool,
        #[serde(default)]
        specialise: bool,
        #[serde(default)]
        options: bool,
        #[serde(default = "no_alignment")]
        expert_alignment: usize,
        #[serde(default)]
        clear_padding: bool,
        #[serde(default)]
        row_sources: bool,
        #[serde(default)]
        m_indices: bool,
    }

    impl TryFrom<Fields> for Config {
        type Error = PlanError;

        fn try_from(fields: Fields) -> Result<Self, PlanError> {
            let receive = ReceiveFields {
                layout: fields.receive,
                transposed_scales: fields.transposed_scales,
                clear_absent: fields.clear_absent,
                combine_weights: fields.combine_weights,
                expert_alignment: fields.expert_alignment,
                clear_padding: fields.clear_padding,
                row_sources: fields.row_sources,
                m_indices: fields.m_indices,
            };
            Ok(Self {
                p2p_world_size: fields.p2p_world_size,
                format: fields.format,
                combine: fields.combine,
                receive: receive.try_into()?,
                shared_expert: fields.shared_expert,
                deadline: fields.deadline,
                debug_checks: fields.debug_checks,
                max_sms: fields.max_sms,
                skip_a2a: fields.skip_a2a,
                specialise: fields.specialise,
                options: fields.options,
                ..Self::new(
                    fields.experts,
                    fields.top_k,
                    fields.hidden,
                    fields.max_tokens_per_rank,
                )
            })
        }
    }

    impl From<Config> for Fields {
        fn from(config: Config) -> Self {
            let receive = config.receive.fields();
            Self {
                experts: config.experts,
                top_k: config.top_k,
                hidden: config.hidden,
                max_tokens_per_rank: config.max_tokens_per_rank,
                p2p_world_size: config.p2p_world_size,
                format: config.format,
                combine: config.combine,
                receive: receive.layout,
                transposed_scales: receive.transposed_scales,
                clear_absent: receive.clear_absent,
                combine_weights: receive.combine_weights,
                shared_expert: config.shared_expert,
                deadline: config.deadline,
                debug_checks: config.debug_checks,
                max_sms: config.max_sms,
                skip_a2a: config.skip_a2a,
                specialise: config.specialise,
                options: config.options,
                expert_alignment: receive.expert_alignment,
                clear_padding: receive.clear_padding,
                row_sources: receive.row_sources,
                m_indices: receive.m_indices,
            }
        }
    }
}
