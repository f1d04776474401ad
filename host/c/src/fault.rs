//! Faults that kernels report.

use ferry::layout::{Kernel, Region};
use ferry::{Error, Fault, FaultKind, InputReport};

use crate::status::Failure;
use crate::status::ferry_status::{FERRY_FAULT, FERRY_INPUT_FAULT, FERRY_POISONED};
use crate::structs::{require_room, sized, write};

/// Reason why a kernel gave up or refused an input.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ferry_fault_kind {
    /// There is no fault.
    FERRY_FAULT_NONE = 0,
    /// A peer's signal did not come before the deadline.
    FERRY_FAULT_PEER_TIMEOUT = 1,
    /// Another part of this GPU was not ready before the deadline.
    FERRY_FAULT_LOCAL_TIMEOUT = 2,
    /// A token names an expert that does not exist; the assignment was not routed.
    FERRY_FAULT_INVALID_EXPERT = 3,
    /// A token names an expert twice (found only with debug_checks).
    FERRY_FAULT_DUPLICATE_EXPERT = 4,
    /// The number of tokens on the device is above the rows of x; only the rows of x were taken.
    FERRY_FAULT_TOO_MANY_ON_DEVICE = 5,
    /// A position received from a peer lies outside the outputs; nothing was written.
    FERRY_FAULT_ROW_OUT_OF_BOUNDS = 6,
    /// More rows arrive (saw) than the outputs hold (wanted), including padding and a shared expert's rows:
    /// the first ones were written, the others count as not routed. Only this rank is told, and sums of any
    /// rank's tokens may lack terms.
    FERRY_FAULT_OUTPUT_TOO_SMALL = 7,
    /// A rank claims more tokens than the plan allows.
    FERRY_FAULT_TOO_MANY_TOKENS = 8,
    /// A launch of this rank was out of order and wrote nothing: a dispatch before the previous round's
    /// end, a combine (or giving up) before its dispatch, a wait before its sending half, or one of them
    /// twice. A graph with a part of a round was launched twice, or at the wrong time. The previous launch
    /// was the ferry_kernel index in round saw (0: there was none).
    FERRY_FAULT_OUT_OF_TURN = 9,
    /// NVSHMEM took no more requests for ranks of other nodes: its thread on the host is stuck with a peer or
    /// the network.
    FERRY_FAULT_NETWORK_STALLED = 11,
    /// A word of the x_scales of token index is 0xfffffffe, which no row carries: 0xffffffff goes instead,
    /// all NaN. wanted is the word's index among the token's scales.
    FERRY_FAULT_LOST_SCALES = 10,
}

/// Memory that a kernel was waiting for or reading.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ferry_region {
    /// Counts of a rank's assignments.
    FERRY_REGION_COUNTS = 0,
    /// A bit for each token of a rank: whether it is sent here.
    FERRY_REGION_PRESENCE = 1,
    /// A row of a dispatch.
    FERRY_REGION_DISPATCH_ROW = 2,
    /// A peer's acknowledgement that it has read its rows.
    FERRY_REGION_CREDIT = 3,
    /// A row of a combine.
    FERRY_REGION_COMBINE_ROW = 4,
    /// Ranks of assignments within experts.
    FERRY_REGION_RANKS_IN_EXPERT = 5,
    /// Row offsets.
    FERRY_REGION_OFFSETS = 6,
    /// The caller's topk_ids.
    FERRY_REGION_TOPK_IDS = 7,
    /// The caller's output tensors.
    FERRY_REGION_OUTPUT = 8,
    /// The caller's tokens_on_device.
    FERRY_REGION_TOKENS_ON_DEVICE = 9,
    /// Blocks of 128 rows of the caller's tiled scales.
    FERRY_REGION_SCALE_BLOCKS = 10,
    /// The previous launch of this rank.
    FERRY_REGION_LAST_LAUNCH = 11,
    /// The caller's x_scales.
    FERRY_REGION_INPUT_SCALES = 12,
    /// An expert's block of the caller's output tensors; the index is the expert's id.
    FERRY_REGION_EXPERT_BLOCK = 13,
    /// NVSHMEM's channel of requests for ranks of other nodes.
    FERRY_REGION_CHANNEL = 14,
}

/// A kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ferry_kernel {
    /// The kernel of ferry_dispatch_async.
    FERRY_KERNEL_DISPATCH_ASYNC = 0,
    /// The kernel of ferry_dispatch_wait.
    FERRY_KERNEL_DISPATCH_WAIT = 1,
    /// The kernel of ferry_dispatch.
    FERRY_KERNEL_DISPATCH = 2,
    /// The kernel of ferry_combine_async.
    FERRY_KERNEL_COMBINE_ASYNC = 3,
    /// The kernel of ferry_combine_wait.
    FERRY_KERNEL_COMBINE_WAIT = 4,
    /// The kernel of ferry_combine.
    FERRY_KERNEL_COMBINE = 5,
    /// The kernel of ferry_fused_silu.
    FERRY_KERNEL_FUSED_SILU = 6,
    /// The kernel of ferry_dispatch with skip_a2a.
    FERRY_KERNEL_LOCAL_DISPATCH = 7,
    /// The kernel of ferry_combine with skip_a2a.
    FERRY_KERNEL_LOCAL_COMBINE = 8,
    /// The kernel of ferry_give_up.
    FERRY_KERNEL_GIVE_UP = 9,
    /// The kernel of ferry_dispatch_counts.
    FERRY_KERNEL_DISPATCH_COUNTS = 10,
    /// The kernel that checks links, which no fault names.
    FERRY_KERNEL_LINKS = 11,
}

/// Fault reported by a kernel. ferry_last_error has it as a sentence.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferry_fault {
    /// sizeof(ferry_fault).
    pub size: usize,
    /// Index of the token, word or row; a ferry_kernel for FERRY_FAULT_OUT_OF_TURN.
    pub index: u64,
    /// Expected value: an epoch, or the first value that is out of range.
    pub wanted: u64,
    /// Value found instead; an expert id is converted to an unsigned number.
    pub saw: u64,
    /// The round.
    pub epoch: u64,
    /// A ferry_fault_kind.
    pub kind: u32,
    /// The kernel, a ferry_kernel. If a rank came late, only kind, rank, peer and culprit are set.
    pub kernel: u32,
    /// Rank of the kernel.
    pub rank: u32,
    /// Peer that was waited for, or that sent the row or count. For FERRY_FAULT_INVALID_EXPERT and
    /// FERRY_FAULT_DUPLICATE_EXPERT not a rank but the top-k slot; otherwise this rank itself.
    pub peer: u32,
    /// Rank at which the chain of waiting ranks begins, for FERRY_FAULT_PEER_TIMEOUT.
    pub culprit: u32,
    /// Memory that was waited for or read: a ferry_region.
    pub region: u32,
}
sized!(ferry_fault, 64);

impl ferry_fault {
    const NONE: Self = Self {
        size: 0,
        index: 0,
        wanted: 0,
        saw: 0,
        epoch: 0,
        kind: ferry_fault_kind::FERRY_FAULT_NONE as u32,
        kernel: 0,
        rank: 0,
        peer: 0,
        culprit: 0,
        region: 0,
    };

    /// The fault of a rank that came late.
    fn of_late(rank: u32, peer: u32) -> Self {
        Self {
            kind: ferry_fault_kind::FERRY_FAULT_PEER_TIMEOUT as u32,
            rank,
            peer,
            culprit: rank,
            ..Self::NONE
        }
    }

    fn of(fault: &Fault) -> Self {
        Self {
            size: 0,
            index: fault.index,
            wanted: fault.wanted,
            saw: fault.saw,
            epoch: fault.epoch,
            kind: kind(fault.kind) as u32,
            kernel: kernel(fault.kernel) as u32,
            rank: fault.rank.0,
            peer: fault.peer.0,
            culprit: fault.culprit.0,
            region: region(fault.region) as u32,
        }
    }
}

/// Runs a check, turns its finding into a status, and stores the fault at `place` unless that is null.
///
/// # Safety
/// The rule of pointers; `place` may be null.
pub(crate) unsafe fn report(
    place: *mut ferry_fault,
    check: impl FnOnce() -> Result<InputReport, Error>,
) -> Result<(), Failure> {
    // Checks `place` first, because the check reports each fault once.
    // SAFETY: the rule of pointers.
    unsafe { tell(place, ferry_fault::NONE)? };
    let (status, fault, text) = match check().map(InputReport::fault) {
        Ok(None) => return Ok(()),
        Ok(Some(found)) => (FERRY_INPUT_FAULT, found.0, found.to_string()),
        Err(error) => match &error {
            Error::Fault(fault) => (FERRY_FAULT, *fault, error.to_string()),
            Error::Poisoned(fault) => (FERRY_POISONED, *fault, error.to_string()),
            &Error::PeerGaveUp { rank, peer } => {
                // SAFETY: the rule of pointers.
                unsafe { tell(place, ferry_fault::of_late(rank.0, peer.0))? };
                return Err(error.into());
            }
            _ => return Err(error.into()),
        },
    };
    // SAFETY: the rule of pointers.
    unsafe { tell(place, ferry_fault::of(&fault))? };
    Err(Failure::new(status, text))
}

/// # Safety
/// The rule of pointers; `place` may be null.
unsafe fn tell(place: *mut ferry_fault, fault: ferry_fault) -> Result<(), Failure> {
    if place.is_null() {
        return Ok(());
    }
    // SAFETY: the rule of pointers.
    unsafe { require_room(place, "fault")? };
    // SAFETY: the rule of pointers.
    unsafe { write(place, "fault", fault) }
}

const fn kind(kind: FaultKind) -> ferry_fault_kind {
    use ferry_fault_kind::*;
    match kind {
        FaultKind::PeerTimeout => FERRY_FAULT_PEER_TIMEOUT,
        FaultKind::LocalTimeout => FERRY_FAULT_LOCAL_TIMEOUT,
        FaultKind::InvalidExpert => FERRY_FAULT_INVALID_EXPERT,
        FaultKind::DuplicateExpert => FERRY_FAULT_DUPLICATE_EXPERT,
        FaultKind::TooManyOnDevice => FERRY_FAULT_TOO_MANY_ON_DEVICE,
        FaultKind::RowOutOfBounds => FERRY_FAULT_ROW_OUT_OF_BOUNDS,
        FaultKind::OutputTooSmall => FERRY_FAULT_OUTPUT_TOO_SMALL,
        FaultKind::TooManyTokens => FERRY_FAULT_TOO_MANY_TOKENS,
        FaultKind::OutOfTurn => FERRY_FAULT_OUT_OF_TURN,
        FaultKind::NetworkStalled => FERRY_FAULT_NETWORK_STALLED,
        FaultKind::LostScales => FERRY_FAULT_LOST_SCALES,
    }
}

const fn region(region: Region) -> ferry_region {
    use ferry_region::*;
    match region {
        Region::Counts => FERRY_REGION_COUNTS,
        Region::Presence => FERRY_REGION_PRESENCE,
        Region::DispatchRow => FERRY_REGION_DISPATCH_ROW,
        Region::Credit => FERRY_REGION_CREDIT,
        Region::CombineRow => FERRY_REGION_COMBINE_ROW,
        Region::RanksInExpert => FERRY_REGION_RANKS_IN_EXPERT,
        Region::Offsets => FERRY_REGION_OFFSETS,
        Region::TopkIds => FERRY_REGION_TOPK_IDS,
        Region::Output => FERRY_REGION_OUTPUT,
        Region::TokensOnDevice => FERRY_REGION_TOKENS_ON_DEVICE,
        Region::ScaleBlocks => FERRY_REGION_SCALE_BLOCKS,
        Region::LastLaunch => FERRY_REGION_LAST_LAUNCH,
        Region::InputScales => FERRY_REGION_INPUT_SCALES,
        Region::ExpertBlock => FERRY_REGION_EXPERT_BLOCK,
        Region::Channel => FERRY_REGION_CHANNEL,
    }
}

const fn kernel(kernel: Kernel) -> ferry_kernel {
    use ferry_kernel::*;
    match kernel {
        Kernel::DispatchAsync => FERRY_KERNEL_DISPATCH_ASYNC,
        Kernel::DispatchWait => FERRY_KERNEL_DISPATCH_WAIT,
        Kernel::Dispatch => FERRY_KERNEL_DISPATCH,
        Kernel::CombineAsync => FERRY_KERNEL_COMBINE_ASYNC,
        Kernel::CombineWait => FERRY_KERNEL_COMBINE_WAIT,
        Kernel::Combine => FERRY_KERNEL_COMBINE,
        Kernel::FusedSilu => FERRY_KERNEL_FUSED_SILU,
        Kernel::LocalDispatch => FERRY_KERNEL_LOCAL_DISPATCH,
        Kernel::LocalCombine => FERRY_KERNEL_LOCAL_COMBINE,
        Kernel::GiveUp => FERRY_KERNEL_GIVE_UP,
        Kernel::DispatchCounts => FERRY_KERNEL_DISPATCH_COUNTS,
        Kernel::Links => FERRY_KERNEL_LINKS,
    }
}
