//! Checked configurations.

mod agreed;
pub(crate) mod capacity;
pub(crate) mod check;
pub(crate) mod config;
pub(crate) mod receive;
pub(crate) mod scale_form;

use ferry_layout::{
    CombineMode, Common, MAX_COUNTED_EXPERTS, PROTOCOL_VERSION, Rank, Shape, SharedTokens, Window,
    Workspace, scale_placement,
};

use crate::error::{Error, PlanError};
use crate::group::Group;
use crate::plan::check::{
    Problems, check_alignment, check_behaviour, check_nodes, check_receive, check_routing,
    check_sizes,
};
use crate::plan::config::Config;
use crate::plan::receive::{Receive, ReceiveFields};

/// Proof that a [`Config`] fits a [`Group`]: sizes were checked once, so nothing downstream
/// checks them again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    config: Config,
    /// Ranks of the group.
    ranks: u32,
    /// See [`shape`](Self::shape).
    shape: Shape,
    /// See [`max_sms`](Self::max_sms).
    max_sms: Option<u32>,
}

impl Plan {
    /// Checks `config` for `group`. Not collective; does not synchronize.
    ///
    /// # Errors
    /// [`Error::Plan`] with every problem at once.
    pub fn new(group: &Group, config: Config) -> Result<Self, Error> {
        let (ranks, reaches_other_nodes) = (group.ranks(), group.reaches_other_nodes());
        let plan = Self::check(ranks, reaches_other_nodes, config)?;
        let local = group.local_ranks().into_iter();
        let limits = local.filter_map(|rank| match group.gpu_ranks(rank) {
            Some(gpu) => gpu.limit(rank, config.max_sms),
            None => config.max_sms,
        });
        let max_sms = limits.min();
        Ok(Self { max_sms, ..plan })
    }

    /// [`new`](Self::new), with `fields` in the place of [`Config::receive`]: for configurations that have
    /// the fields of all layouts on one level.
    ///
    /// # Errors
    /// [`Error::Plan`] with every problem at once, also of fields that the layout does not take.
    pub fn with_fields(
        group: &Group,
        config: Config,
        fields: ReceiveFields,
    ) -> Result<Self, Error> {
        let (receive, mut problems) = fields.taken();
        match Self::new(group, Config { receive, ..config }) {
            Ok(plan) if problems.is_empty() => return Ok(plan),
            Ok(_) => {}
            Err(Error::Plan(others)) => problems.extend(others.problems),
            Err(other) => return Err(other),
        }
        Err(PlanError { problems }.into())
    }

    pub(crate) fn check(
        ranks: u32,
        reaches_other_nodes: bool,
        config: Config,
    ) -> Result<Self, PlanError> {
        let mut problems = Problems::default();
        check_routing(&mut problems, ranks, &config);
        // Ranks whose tokens a rank may receive.
        let sources = if config.skip_a2a { 1 } else { ranks };
        let local_experts = config.experts.checked_div(ranks as usize).unwrap_or(0);
        check_sizes(&mut problems, sources, local_experts, &config);
        problems.require(
            !config.skip_a2a || local_experts <= MAX_COUNTED_EXPERTS as usize,
            "experts",
            config.experts,
            format_args!(
                "with skip_a2a a rank has at most {MAX_COUNTED_EXPERTS} experts, and with {ranks} ranks it \
                 has {local_experts}"
            ),
        );
        check_nodes(&mut problems, ranks, reaches_other_nodes, &config);
        check_receive(&mut problems, &config);
        check_alignment(&mut problems, ranks, &config);
        check_behaviour(&mut problems, &config);
        if !problems.0.is_empty() {
            return Err(PlanError {
                problems: problems.0,
            });
        }
        // Every number was checked above to fit.
        let shape = Shape {
            ranks: sources,
            p2p_world_size: match config.p2p_world_size {
                Some(size) if !config.skip_a2a => size as u32,
                _ => sources,
            },
            experts: config.experts as u32 * sources / ranks,
            top_k: config.top_k as u32,
            hidden: config.hidden as u32,
            max_tokens_per_rank: config.max_tokens_per_rank as u32,
            combine_mode: match config.combine {
                CombineMode::Reduced => 0,
                CombineMode::Exact => 1,
            },
            token_format: config.format.number(),
        };
        Ok(Self {
            config,
            ranks,
            shape,
            max_sms: config.max_sms,
        })
    }

    /// The configuration that was checked.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Ranks of the group.
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Most multiprocessors that a kernel of this process's ranks occupies; `None` for all of the device.
    /// [`Config::max_sms`], or if ranks share a GPU the smallest [part](crate::device::GpuRanks::limit) of
    /// any of them, if that is less. [`Communicator::max_sms`](crate::Communicator::max_sms) is each
    /// rank's own.
    pub const fn max_sms(&self) -> Option<u32> {
        self.max_sms
    }

    /// The sizes as kernels see them: with [`skip_a2a`](Config::skip_a2a) those of a group of one rank that
    /// has as many experts as each rank of the group.
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Number of experts on each rank.
    pub const fn local_experts(&self) -> usize {
        self.shape.local_experts() as usize
    }

    /// The first expert on `rank`. The others follow it.
    pub const fn first_expert(&self, rank: Rank) -> usize {
        rank.0 as usize * self.local_experts()
    }

    /// Number of groups of rows in a dispatch's outputs, if rows are [by expert](Config::receive): one for
    /// each local expert, and with a [shared expert](Config::shared_expert) one before these.
    pub const fn groups(&self) -> usize {
        self.local_experts() + self.config.shared_expert as usize
    }

    /// Most rows that a dispatch can bring to one rank: `ranks * max_tokens_per_rank * top_k` (with
    /// [`skip_a2a`](Config::skip_a2a) those of one rank, since all have the same tokens), and up to
    /// [`row_alignment`](Self::row_alignment)` - 1` rows of padding for each local expert, rounded up to a
    /// multiple of the alignment. With a [shared expert](Config::shared_expert) `max_tokens_per_rank` more
    /// (with `skip_a2a` this rank's part of them), rounded up likewise. Output tensors with this
    /// capacity are never too small.
    ///
    /// `ranks * max_tokens_per_rank` if rows [stay as they came](Config::receive), without padding, and as
    /// many for each local expert in padded blocks.
    pub const fn max_rows(&self) -> usize {
        if self.config.receive.keeps_rows() {
            return self.source_counts();
        }
        if self.block_rows() > 0 {
            return self.local_experts() * self.source_counts();
        }
        (self.max_routed_rows() + self.max_shared_rows()) as usize
    }

    /// [`max_rows`](Self::max_rows) if the experts of each token differ, as those of a top-k do. Then
    /// a token brings a rank no more rows than the rank has experts: `ranks * max_tokens_per_rank *
    /// min(top_k, local_experts)`, plus padding and the shared expert's rows as there. For 256 experts on
    /// 64 ranks and top-8 that is half.
    ///
    /// Not enough if a token can name an expert twice, say because filler tokens name expert 0 in every slot
    /// (-1 names none) or because two logical experts of a token are one physical expert. Rows that do not
    /// fit are then left out, with a fault ([`FaultKind::OutputTooSmall`](crate::FaultKind)).
    ///
    /// The same as `max_rows` if rows [stay as they came](Config::receive), and in padded blocks.
    pub const fn max_rows_distinct(&self) -> usize {
        if self.config.receive.keeps_rows() {
            return self.source_counts();
        }
        if self.block_rows() > 0 {
            return self.local_experts() * self.source_counts();
        }
        let routed = self.padded_rows(self.shape.max_rows_distinct());
        (routed + self.max_shared_rows()) as usize
    }

    /// Number of pairs of a source rank and a token: most rows that stay as they came.
    const fn source_counts(&self) -> usize {
        self.shape.ranks as usize * self.shape.max_tokens_per_rank as usize
    }

    /// Number of which the rows of a dispatch's outputs, and the first row of each group, are a multiple:
    /// [`ByExpert::alignment`](crate::ByExpert::alignment), in blockwise FP8 at least 4. 1 if rows [stay
    /// as they came](Config::receive).
    pub const fn row_alignment(&self) -> u32 {
        if self.config.receive.keeps_rows() || self.block_rows() > 0 {
            return 1;
        }
        // At most 256: `check_alignment`.
        let (wanted, format) = (
            self.receive().expert_alignment as u32,
            self.shape.row_alignment(),
        );
        if wanted > format { wanted } else { format }
    }

    /// Rows of each expert's block; 0 if experts have no [padded blocks](Config::receive).
    pub(crate) const fn block_rows(&self) -> usize {
        match self.config.receive {
            Receive::Padded(_) => self.source_counts(),
            _ => 0,
        }
    }

    /// Most routed rows with padding, rounded up to the alignment, if without the format's padding `routed`
    /// rows may come.
    const fn padded_rows(&self, routed: u64) -> u64 {
        let (alignment, format) = (
            self.row_alignment() as u64,
            self.shape.row_alignment() as u64,
        );
        let padding = self.shape.local_experts() as u64 * (alignment - format);
        (routed + padding).next_multiple_of(alignment)
    }

    /// Most routed rows with padding: [`max_rows`](Self::max_rows) without those of a shared expert.
    pub(crate) const fn max_routed_rows(&self) -> u64 {
        self.padded_rows(self.shape.max_rows())
    }

    /// Bytes from one row of a [view](crate::ReceiveLayout::View) to the next: payload, scales, the row's own
    /// scale and words of Ferry's. A multiple of 128.
    pub const fn view_row_stride(&self) -> u64 {
        Window::with(&self.shape, self.receive().combine_weights).dispatch_row_stride()
    }

    /// The range, within `0..tokens`, of tokens that the [shared expert](Config::shared_expert) gets on
    /// `rank`: all of the rank's own; with [`skip_a2a`](Config::skip_a2a) its part of the tokens that all
    /// ranks have, in consecutive runs, of which the first `tokens % ranks` are one token longer; none
    /// without a shared expert, and none for a rank outside the group. They are the first rows of dispatch's
    /// outputs, in order.
    pub const fn shared_tokens(&self, rank: Rank, tokens: usize) -> std::ops::Range<usize> {
        let index = if self.config.skip_a2a { rank.0 } else { 0 };
        if index > 0 && index >= self.ranks {
            return tokens..tokens;
        }
        let shared = SharedTokens::of(tokens as u32, self.shared_of(), index);
        shared.start as usize..(shared.start + shared.count) as usize
    }

    /// The layout of received rows, with the fields of all layouts.
    pub(crate) const fn receive(&self) -> ReceiveFields {
        self.config.receive.fields()
    }

    /// Whether kernels take options.
    pub(crate) const fn takes_options(&self) -> bool {
        let Config {
            options,
            shared_expert,
            skip_a2a,
            receive,
            ..
        } = self.config;
        let has_tables = self.counts_groups() || self.pads_or_describes();
        options || shared_expert || skip_a2a || receive.keeps_rows() || has_tables
    }

    /// Whether outputs by expert have the number of rows of each group, and their ends.
    pub(crate) const fn counts_groups(&self) -> bool {
        self.receive().expert_alignment > 1 || self.block_rows() > 0
    }

    /// Whether dispatch by expert writes padding, or an entry for each row beside those of every dispatch.
    const fn pads_or_describes(&self) -> bool {
        let ReceiveFields {
            clear_padding,
            row_sources,
            m_indices,
            ..
        } = self.receive();
        clear_padding || row_sources || m_indices
    }

    /// Number of ranks that divide the shared expert's tokens; 0 without a shared expert.
    pub(crate) const fn shared_of(&self) -> u32 {
        match (self.config.shared_expert, self.config.skip_a2a) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => self.ranks,
        }
    }

    /// Most positions of rows that a combine reads.
    pub(crate) const fn max_positions(&self) -> u64 {
        if self.block_rows() > 0 {
            return self.max_rows() as u64;
        }
        // None of rows that stay as they came.
        let more = (self.row_alignment()).saturating_sub(self.shape.row_alignment());
        let padding = more as u64 * self.shape.local_experts() as u64;
        self.shape.max_rows() + padding + self.max_shared_rows()
    }

    /// Most rows of the shared expert, including those that pad the group; 0 without one.
    pub(crate) const fn max_shared_rows(&self) -> u64 {
        if !self.config.shared_expert {
            return 0;
        }
        let alignment = self.row_alignment() as u64;
        let tokens = if self.config.skip_a2a {
            self.shape.max_tokens_per_rank.div_ceil(self.ranks)
        } else {
            self.shape.max_tokens_per_rank
        };
        (tokens as u64).next_multiple_of(alignment)
    }

    /// Most blocks of 128 rows that tiled scales can take on one rank.
    pub const fn max_scale_blocks(&self) -> usize {
        self.scale_blocks_of(self.shape.max_rows())
    }

    /// [`max_scale_blocks`](Self::max_scale_blocks) if the experts of each token differ: see
    /// [`max_rows_distinct`](Self::max_rows_distinct).
    pub const fn max_scale_blocks_distinct(&self) -> usize {
        self.scale_blocks_of(self.shape.max_rows_distinct())
    }

    /// Most blocks for `routed` routed rows and those of the shared expert.
    const fn scale_blocks_of(&self, routed: u64) -> usize {
        let of_block = self.block_rows() as u64;
        if of_block > 0 {
            let blocks = of_block.div_ceil(scale_placement::BLOCK_ROWS as u64);
            return self.local_experts() * blocks as usize;
        }
        let routed = max_blocks(routed, self.shape.local_experts(), self.row_alignment());
        // The shared expert's rows begin a block of their own.
        let shared = scale_placement::blocks(self.max_shared_rows() as u32) as u64;
        (routed + shared) as usize
    }

    /// Bytes of each rank's receive window.
    pub const fn window_bytes(&self) -> u64 {
        Window::with(&self.shape, self.receive().combine_weights).bytes
    }

    /// Bytes of each rank's private workspace.
    pub const fn workspace_bytes(&self) -> u64 {
        Workspace::of(&self.shape).bytes_for(&self.shape, self.config.receive.layout())
    }

    /// Kernel arguments that follow from the plan; all others are zero.
    pub(crate) fn common(&self) -> Common {
        let common = Common::with(&self.shape, self.receive().combine_weights);
        Common {
            row: common.row.aligned(self.row_alignment()),
            ..common
        }
    }

    /// Fingerprint of everything that ranks must agree on.
    pub(crate) fn fingerprint(&self) -> u64 {
        let keeps_rows = self.config.receive.keeps_rows();
        let common = self.common();
        common.fingerprint(PROTOCOL_VERSION, keeps_rows, self.receive().combine_weights)
    }

    /// The deadline in nanoseconds.
    pub(crate) fn deadline_ns(&self) -> u64 {
        // At most a day: `check_behaviour`.
        self.config.deadline.as_nanos() as u64
    }
}

/// Most blocks of tiled scales that `rows` rows of `experts` experts can take, if each expert's rows, with
/// padding, are a multiple of `alignment`. Up to a block's rows, padding takes no block of its own.
const fn max_blocks(rows: u64, experts: u32, alignment: u32) -> u64 {
    if alignment <= scale_placement::BLOCK_ROWS {
        return scale_placement::max_blocks(rows, experts);
    }
    let experts = experts as u64;
    let begun = if experts < rows { experts } else { rows };
    let of_alignment = (alignment / scale_placement::BLOCK_ROWS) as u64;
    (begun + (rows - begun) / alignment as u64) * of_alignment
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "receive_tests.rs"]
mod receive_tests;

#[cfg(test)]
#[path = "alignment_tests.rs"]
mod alignment_tests;
