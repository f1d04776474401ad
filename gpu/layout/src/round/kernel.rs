//! The kernels by name.

use crate::plan::limits::{
    BLOCK_THREADS, MAX_BLOCKS, PIPELINE_BYTES, SILU_BLOCK_THREADS, SMALL_BLOCK_TOKENS,
};

/// A kernel entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Sends tokens after every rank has read those of the round before; waits for nothing else.
    DispatchAsync,
    /// Waits for tokens and puts them in expert order.
    DispatchWait,
    /// Does both in one launch.
    Dispatch,
    /// Sends expert outputs back; waits for nothing.
    CombineAsync,
    /// Waits for them and sums.
    CombineWait,
    /// Does both in one launch.
    Combine,
    /// Computes the activation between an expert's matrix multiplications.
    FusedSilu,
    /// Puts the tokens of this rank's experts in expert order; every rank has all tokens.
    LocalDispatch,
    /// Sums the rows of this rank's experts; every rank has all tokens.
    LocalCombine,
    /// Ends a round that has no combine; between nodes waits for the ranks' credits.
    GiveUp,
    /// Waits for the counts of a dispatch and tells the host of them.
    DispatchCounts,
    /// Sends over every link between ranks and looks at what comes; no part of a round.
    Links,
}

impl Kernel {
    /// Every kernel.
    pub const ALL: [Self; 12] = [
        Self::DispatchAsync,
        Self::DispatchWait,
        Self::Dispatch,
        Self::CombineAsync,
        Self::CombineWait,
        Self::Combine,
        Self::FusedSilu,
        Self::LocalDispatch,
        Self::LocalCombine,
        Self::GiveUp,
        Self::DispatchCounts,
        Self::Links,
    ];

    /// Whether it takes a dispatch's arguments.
    pub const fn dispatches(self) -> bool {
        matches!(
            self,
            Self::DispatchAsync | Self::DispatchWait | Self::Dispatch | Self::LocalDispatch
        )
    }

    /// Whether it takes a combine's arguments.
    pub const fn combines(self) -> bool {
        matches!(
            self,
            Self::CombineAsync | Self::CombineWait | Self::Combine | Self::LocalCombine
        )
    }

    /// Whether it exists only among the kernels that take options.
    pub const fn needs_options(self) -> bool {
        matches!(self, Self::LocalDispatch | Self::LocalCombine)
    }

    /// Every kernel that also exists without options.
    pub fn without_options() -> impl Iterator<Item = Self> {
        let all = Self::ALL.into_iter();
        all.filter(|kernel| !kernel.needs_options())
    }

    /// Whether it exists only among the kernels without options.
    pub const fn has_no_options(self) -> bool {
        matches!(self, Self::FusedSilu | Self::Links)
    }

    /// Its name in sentences and faults.
    pub const fn name(self) -> &'static str {
        match self {
            Self::DispatchAsync => "dispatch_async",
            Self::DispatchWait => "dispatch_wait",
            Self::Dispatch => "dispatch",
            Self::CombineAsync => "combine_async",
            Self::CombineWait => "combine_wait",
            Self::Combine => "combine",
            Self::FusedSilu => "fused_silu",
            Self::LocalDispatch => "dispatch_local",
            Self::LocalCombine => "combine_local",
            Self::GiveUp => "give_up",
            Self::DispatchCounts => "dispatch_counts",
            Self::Links => "links",
        }
    }

    /// Its entry in the PTX module. `shmem` picks the one that reaches unmapped peers.
    pub const fn entry(self, shmem: bool) -> &'static str {
        match (self, shmem) {
            (Self::DispatchAsync, false) => "ferry_dispatch_async",
            (Self::DispatchAsync, true) => "ferry_dispatch_async_shmem",
            (Self::DispatchWait, _) => "ferry_dispatch_wait",
            (Self::Dispatch, false) => "ferry_dispatch",
            (Self::Dispatch, true) => "ferry_dispatch_shmem",
            (Self::CombineAsync, false) => "ferry_combine_async",
            (Self::CombineAsync, true) => "ferry_combine_async_shmem",
            (Self::CombineWait, _) => "ferry_combine_wait",
            (Self::Combine, false) => "ferry_combine",
            (Self::Combine, true) => "ferry_combine_shmem",
            (Self::FusedSilu, _) => "ferry_fused_silu",
            (Self::LocalDispatch, _) => "ferry_dispatch_local",
            (Self::LocalCombine, _) => "ferry_combine_local",
            (Self::GiveUp, false) => "ferry_give_up",
            (Self::GiveUp, true) => "ferry_give_up_shmem",
            (Self::DispatchCounts, _) => "ferry_dispatch_counts",
            (Self::Links, _) => "ferry_links",
        }
    }
}

/// Registers of a multiprocessor, on every architecture from sm_80 on (CUDA C++ Programming Guide,
/// "Technical Specifications per Compute Capability").
const REGISTERS: u32 = 65_536;

impl Kernel {
    /// Threads of a block if a rank may have up to `most_tokens` tokens; the host launches one block for each
    /// multiprocessor. The kernels take any multiple of 32 from `2 * MAX_RANKS` on. With up to
    /// [`SMALL_BLOCK_TOKENS`] tokens most warps have nothing to do, but all of them take part in setting up
    /// their block.
    pub const fn threads(self, most_tokens: u32) -> u32 {
        match self {
            Self::FusedSilu => self.threads_per_block(),
            _ if most_tokens <= SMALL_BLOCK_TOKENS => self.threads_per_block() / 2,
            _ => self.threads_per_block(),
        }
    }

    /// Blocks that the host launches on a device with so many `multiprocessors`, of which a kernel may occupy
    /// at most `max_sms`: one each, so that all are resident at once. At least 1 and at most [`MAX_BLOCKS`].
    /// Launches of a communicator have the same number, unless rows stay as they came, as each block has a
    /// [`LastLaunch`](crate::LastLaunch) of its own; `dispatch_counts`, which leaves none, has one block.
    pub const fn blocks(max_sms: Option<u32>, multiprocessors: u32) -> u32 {
        let blocks = match max_sms {
            Some(most) if most < multiprocessors => most,
            _ => multiprocessors,
        };
        match blocks {
            0 => 1,
            MAX_BLOCKS.. => MAX_BLOCKS,
            _ => blocks,
        }
    }

    /// Most threads of a block.
    pub const fn threads_per_block(self) -> u32 {
        match self {
            Self::FusedSilu => SILU_BLOCK_THREADS,
            _ => BLOCK_THREADS,
        }
    }

    /// Bytes of dynamic shared memory for the pipelines of a block's warps, which the host passes at launch;
    /// 0 for kernels without pipelines. Used from sm_90 on, without peers on other nodes.
    pub const fn pipeline_bytes(self) -> u32 {
        match self {
            Self::Combine
            | Self::CombineAsync
            | Self::CombineWait
            | Self::LocalDispatch
            | Self::LocalCombine => self.threads_per_block() / 32 * PIPELINE_BYTES,
            _ => 0,
        }
    }

    /// Registers that a thread may use for the block to fit.
    pub const fn max_registers(self) -> u32 {
        // Allocated in units of eight.
        REGISTERS / self.threads_per_block() / 8 * 8
    }
}

/// Registers that a thread of most kernels may use. Kernels that may use fewer have the limit in their PTX.
pub const MAX_REGISTERS: u32 = Kernel::Dispatch.max_registers();
