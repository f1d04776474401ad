//! What kernels meet.

use ferry::layout::{Kernel, Region};
use ferry::{Error, Fault, FaultKind, InputFault};

use crate::status::Failure;
use crate::status::ferry_status::{FERRY_FAULT, FERRY_INPUT_FAULT, FERRY_POISONED};
use crate::structs::{require_room, sized, write};

/// Why a kernel gave up or refused an input.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ferry_fault_kind {
    /// There is no fault.
    FERRY_FAULT_NONE = 0,
    /// A peer's signal did not come before the deadline.
    FERRY_FAULT_PEER_TIMEOUT = 1,
    /// Another part of this GPU did not get ready before the deadline.
    FERRY_FAULT_LOCAL_TIMEOUT = 2,
    /// A token names an expert that does not exist; the assignment was not routed.
    FERRY_FAULT_INVALID_EXPERT = 3,
    /// A token names an expert twice (found only with debug_checks).
    FERRY_FAULT_DUPLICATE_EXPERT = 4,
    /// The number of tokens on the device is above the rows of x; so many were taken.
    FERRY_FAULT_TOO_MANY_ON_DEVICE = 5,
    /// A position that came over the wire lies outside the outputs; nothing was written.
    FERRY_FAULT_ROW_OUT_OF_BOUNDS = 6,
    /// More rows arrive than the outputs hold, saw instead of wanted, padding and a shared expert's
    /// included: the first ones were written, the others count as not routed. Only this rank is
    /// told, and sums of any rank's tokens may lack terms.
    FERRY_FAULT_OUTPUT_TOO_SMALL = 7,
    /// A rank claims more tokens than the plan allows.
    FERRY_FAULT_TOO_MANY_TOKENS = 8,
    /// A launch of this rank came out of turn, and wrote nothing: a dispatch before the combine of the
    /// round before, a combine before its dispatch, a wait before its half that sends, or one of them
    /// twice. A graph with a part of a round was launched twice, or at the wrong time. The launch
    /// before was of round saw (0: there was none), by the ferry_kernel index.
    FERRY_FAULT_OUT_OF_TURN = 9,
}

/// What a kernel was waiting for or reading.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ferry_region {
    /// Counts of assignments of a rank.
    FERRY_REGION_COUNTS = 0,
    /// Which tokens of a rank come.
    FERRY_REGION_PRESENCE = 1,
    /// A row of a dispatch.
    FERRY_REGION_DISPATCH_ROW = 2,
    /// A peer's word that it has read its rows.
    FERRY_REGION_CREDIT = 3,
    /// A row of a combine.
    FERRY_REGION_COMBINE_ROW = 4,
    /// Ranks within experts.
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
    /// The last launch of this rank.
    FERRY_REGION_LAST_LAUNCH = 11,
}

/// A kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ferry_kernel {
    /// Of ferry_dispatch_async.
    FERRY_KERNEL_DISPATCH_ASYNC = 0,
    /// Of ferry_dispatch_wait.
    FERRY_KERNEL_DISPATCH_WAIT = 1,
    /// Of ferry_dispatch.
    FERRY_KERNEL_DISPATCH = 2,
    /// Of ferry_combine_async.
    FERRY_KERNEL_COMBINE_ASYNC = 3,
    /// Of ferry_combine_wait.
    FERRY_KERNEL_COMBINE_WAIT = 4,
    /// Of ferry_combine.
    FERRY_KERNEL_COMBINE = 5,
    /// Of ferry_fused_silu.
    FERRY_KERNEL_FUSED_SILU = 6,
    /// Of ferry_dispatch with skip_a2a.
    FERRY_KERNEL_LOCAL_DISPATCH = 7,
    /// Of ferry_combine with skip_a2a.
    FERRY_KERNEL_LOCAL_COMBINE = 8,
}

/// What a kernel met. ferry_last_error has it as a sentence.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferry_fault {
    /// sizeof(ferry_fault).
    pub size: usize,
    /// Which one: a token, a word, or a row; of FERRY_FAULT_OUT_OF_TURN a kernel.
    pub index: u64,
    /// What was wanted: an epoch, or the first value that is out of range.
    pub wanted: u64,
    /// What was there instead; of ids of experts as a number without a sign.
    pub saw: u64,
    /// The round.
    pub epoch: u64,
    /// A ferry_fault_kind.
    pub kind: u32,
    /// In which kernel: a ferry_kernel. Of a rank that came late only kind, rank, peer and culprit are set.
    pub kernel: u32,
    /// On which rank.
    pub rank: u32,
    /// The peer that was waited for, or whose row or claim it is; of FERRY_FAULT_INVALID_EXPERT and
    /// FERRY_FAULT_DUPLICATE_EXPERT no rank but the top-k slot; of the others this rank itself.
    pub peer: u32,
    /// Of FERRY_FAULT_PEER_TIMEOUT, the rank at which the chain of waiting ranks begins.
    pub culprit: u32,
    /// What was waited for or read: a ferry_region.
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

    /// Of a rank that came late.
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

/// What a check found, as a status, with the fault in the caller's struct, if there is a struct.
///
/// # Safety
/// The rule of pointers; `place` may be null.
pub(crate) unsafe fn report(
    place: *mut ferry_fault,
    check: impl FnOnce() -> Result<Option<InputFault>, Error>,
) -> Result<(), Failure> {
    // Before the check: it tells each fault once.
    // SAFETY: the caller's promise.
    unsafe { tell(place, ferry_fault::NONE)? };
    let (status, fault, text) = match check() {
        Ok(None) => return Ok(()),
        Ok(Some(found)) => (FERRY_INPUT_FAULT, found.0, found.to_string()),
        Err(error) => match &error {
            Error::Fault(fault) => (FERRY_FAULT, *fault, error.to_string()),
            Error::Poisoned(fault) => (FERRY_POISONED, *fault, error.to_string()),
            &Error::PeerGaveUp { rank, peer } => {
                // SAFETY: the caller's promise.
                unsafe { tell(place, ferry_fault::of_late(rank.0, peer.0))? };
                return Err(error.into());
            }
            _ => return Err(error.into()),
        },
    };
    // SAFETY: the caller's promise.
    unsafe { tell(place, ferry_fault::of(&fault))? };
    Err(Failure::new(status, text))
}

/// # Safety
/// As [`report`].
unsafe fn tell(place: *mut ferry_fault, fault: ferry_fault) -> Result<(), Failure> {
    if place.is_null() {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { require_room(place, "fault")? };
    // SAFETY: the caller's promise.
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
    }
}
