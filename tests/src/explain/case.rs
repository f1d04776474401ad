//! A plan's launches on a device: their grids and tactics, as host and kernels work them out.

use ferry::Plan;
use ferry::layout::Kernel;
use ferry_layout::Common;
use ferry_protocol::Extent;
use ferry_protocol::tactics::Phase;
use ferry_protocol::tactics::combine::CombineTactics;
use ferry_protocol::tactics::dispatch::DispatchTactics;
use ferry_protocol::{Grid, LANES};

/// Inputs of the decision on a launch's tactics. All ranks bring the same number of tokens.
#[derive(Clone, Copy)]
pub struct Case {
    common: Common,
    blocks: u32,
}

/// Reasons for which there is no such launch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CaseError {
    /// More tokens than planned.
    #[error("tokens is {tokens}, but the plan has at most {most} a rank (max_tokens_per_rank)")]
    TooManyTokens {
        /// Tokens of each rank.
        tokens: u32,
        /// Most tokens of a rank, by the plan.
        most: u32,
    },
    /// More ranks on a GPU than there are.
    #[error("ranks-per-gpu is {ranks_per_gpu}, but there are {ranks} ranks")]
    MoreThanRanks {
        /// Ranks of a GPU.
        ranks_per_gpu: u32,
        /// Ranks of the group.
        ranks: u32,
    },
    /// Nodes with different numbers of ranks.
    #[error("nodes is {nodes}, but it must divide the {ranks} ranks")]
    UnevenNodes {
        /// Nodes.
        nodes: u32,
        /// Ranks of all nodes.
        ranks: u32,
    },
}

impl Case {
    /// Launches of `plan` with `tokens` tokens of each rank, on a device with so many `multiprocessors`.
    ///
    /// # Errors
    /// [`CaseError::TooManyTokens`].
    pub fn new(plan: &Plan, tokens: u32, multiprocessors: u32) -> Result<Self, CaseError> {
        let most = plan.shape().max_tokens_per_rank;
        if tokens > most {
            return Err(CaseError::TooManyTokens { tokens, most });
        }
        Ok(Self {
            common: Common {
                tokens,
                ..Common::of(plan.shape())
            },
            blocks: Kernel::blocks(plan.max_sms(), multiprocessors),
        })
    }

    /// Arguments of the kernels: the shape, this rank's tokens, and values derived from both.
    pub const fn common(&self) -> &Common {
        &self.common
    }

    /// Blocks of each launch, one a multiprocessor.
    pub const fn blocks(&self) -> u32 {
        self.blocks
    }

    /// The warps of a launch of `kernel`.
    pub const fn grid(&self, kernel: Kernel) -> Grid {
        Grid {
            in_block: kernel.threads(self.common.shape.max_tokens_per_rank) / LANES,
            blocks: self.blocks,
        }
    }

    /// Rows of all sources, as dispatch learns them.
    pub fn extent(&self) -> Extent {
        Extent {
            tokens: self.common.tokens,
            parts: self.common.row.parts(self.common.tokens),
        }
    }

    /// Tactics of a launch that dispatches in `phase`.
    pub fn dispatch(&self, phase: Phase) -> DispatchTactics {
        let grid = self.grid(dispatch_kernel(phase));
        DispatchTactics::decide(
            &self.common,
            self.common.tokens,
            phase,
            grid,
            self.common.shape.spans_nodes(),
            ferry::ReceiveLayout::ByExpert,
        )
    }

    /// Tactics of a launch of combine.
    pub fn combine(&self) -> CombineTactics {
        let (grid, spans_nodes) = (self.grid(Kernel::Combine), self.common.shape.spans_nodes());
        CombineTactics::decide(
            &self.common,
            self.common.tokens,
            self.extent(),
            Phase::Fused,
            grid,
            spans_nodes,
            false,
        )
    }
}

/// The kernel that dispatches in `phase`.
pub const fn dispatch_kernel(phase: Phase) -> Kernel {
    match phase {
        Phase::Send => Kernel::DispatchAsync,
        Phase::Wait => Kernel::DispatchWait,
        Phase::Fused => Kernel::Dispatch,
    }
}
