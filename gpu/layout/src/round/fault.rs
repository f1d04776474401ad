//! Fault records, which a kernel writes when it aborts, and their text.

use core::fmt;

use bytemuck::{Pod, Zeroable};

use crate::plan::shape::Rank;
use crate::round::kernel::Kernel;
use crate::round::region::Region;

/// Reasons for which a kernel aborts or refuses an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// A peer's signal did not arrive before the deadline.
    PeerTimeout,
    /// Another warp of this GPU was not ready before the deadline.
    LocalTimeout,
    /// A token names an expert that does not exist; the assignment was not routed.
    InvalidExpert,
    /// A token names an expert twice (found only with `debug_checks`). Both assignments are routed: the
    /// expert gets the token twice, and both rows count in the sum.
    DuplicateExpert,
    /// The number of tokens on the device exceeds the rows of `x`; all rows were taken.
    TooManyOnDevice,
    /// A word of the user's `x_scales` is `0xfffffffe`, which no row carries: the NaN of an f32, or four
    /// scales of a byte, `0xfe` and then three times `0xff`. `0xffffffff` goes instead, all NaNs.
    LostScales,
    /// More rows arrive than fit in the outputs. The first ones were written, and `row_offsets` end there;
    /// the others count as not routed here, so combine adds nothing for them: sums of tokens of any rank may
    /// lack terms, and in exact mode a lost row counts as zeros, times its weight. Only the rank whose
    /// outputs are too small learns of it. `wanted` is the capacity of the outputs, and `saw` would have
    /// sufficed: rows, including those that pad experts, or blocks of tiled scales.
    OutputTooSmall,
    /// A row position that came over the wire lies outside the outputs; nothing was written.
    RowOutOfBounds,
    /// A source claims more tokens than the plan allows.
    TooManyTokens,
    /// A launch of this rank came out of turn: a dispatch before the end of the round before, a combine (or
    /// giving up) before its dispatch, a wait before its sending half, or one of them twice. The host refuses
    /// such calls, so a graph with a part of a round was launched twice, or at the wrong time. The launch
    /// wrote nothing. [`Fault::last_launch`] is the launch before it.
    OutOfTurn,
    /// NVSHMEM took no more requests for ranks of other nodes until the deadline: its thread on this rank's
    /// host is stuck, mostly with a peer or a network that takes nothing. One channel serves all peers, so
    /// nobody knows which.
    NetworkStalled,
}

impl FaultKind {
    const ALL: [Self; 11] = [
        Self::PeerTimeout,
        Self::LocalTimeout,
        Self::InvalidExpert,
        Self::DuplicateExpert,
        Self::TooManyOnDevice,
        Self::LostScales,
        Self::OutputTooSmall,
        Self::RowOutOfBounds,
        Self::TooManyTokens,
        Self::OutOfTurn,
        Self::NetworkStalled,
    ];

    /// Whether the round continued nevertheless: the input was at fault, not the group.
    #[inline(always)]
    pub const fn is_input(self) -> bool {
        is_input(self as u64)
    }
}

/// [`FaultKind::is_input`] for the number of a kind: the numbers of these kinds are consecutive.
#[inline(always)]
const fn is_input(kind: u64) -> bool {
    kind >= FaultKind::InvalidExpert as u64 && kind <= FaultKind::OutputTooSmall as u64
}

/// A fault as reported by a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Kind of the fault.
    pub kind: FaultKind,
    /// Kernel that reported it.
    pub kernel: Kernel,
    /// Rank that reported it.
    pub rank: Rank,
    /// Other party to the fault:
    ///
    /// | kind | `peer` |
    /// |---|---|
    /// | `PeerTimeout` | the rank that was waited for |
    /// | `RowOutOfBounds` | the rank whose row it is |
    /// | `TooManyTokens` | the rank that claims them |
    /// | `InvalidExpert`, `DuplicateExpert` | no rank: the top-k [`slot`](Self::slot) of token `index` |
    /// | `LocalTimeout`, `TooManyOnDevice`, `OutputTooSmall`, `OutOfTurn` | this rank, the only cause |
    /// | `NetworkStalled` | this rank; which peer stalls is not known |
    /// | `LostScales` | this rank; token `index` |
    pub peer: Rank,
    /// Rank at which the chain of waiting ranks begins, for a [`PeerTimeout`](FaultKind::PeerTimeout):
    /// `peer`, or if that had aborted itself, the rank that it had timed out on. For all other kinds this
    /// rank.
    /// A late rank, on which `peer` had given up, is its own culprit, if it waits for `peer`; if it received
    /// everything, the host reports that the peer gave up instead of a fault.
    pub culprit: Rank,
    /// Data that was awaited or read.
    pub region: Region,
    /// Index of the token, word or row; of an [`ExpertBlock`](Region::ExpertBlock) the expert's id. For
    /// [`OutOfTurn`](FaultKind::OutOfTurn) the kernel of the last launch, as its index in [`Kernel::ALL`].
    pub index: u64,
    /// Expected value: an epoch, or the first value that is out of range.
    pub wanted: u64,
    /// Value found instead.
    pub saw: u64,
    /// Number of the round, counted from 1 in each communicator.
    pub epoch: u64,
    /// Longest wait of the simulator in milliseconds of wall time, its patience or the time of a launch until
    /// the deadline that ends its wait, if a deadline passed while it waited for launches.
    pub patience_ms: Option<u32>,
    /// Number of ranks of this process on the GPU of `rank`, if there are several. Added by the host.
    pub gpu_ranks: Option<u32>,
    /// Whether `culprit` is of the same process, which had enqueued fewer calls for it than for `rank` when
    /// it read the fault. Added by the host; false if graphs have calls of either.
    pub is_culprit_behind: bool,
}

impl Fault {
    /// The top-k slot of token `index` that is at fault, for the kinds whose [`peer`](Self::peer) is a slot.
    pub const fn slot(&self) -> Option<u32> {
        match self.kind {
            FaultKind::InvalidExpert | FaultKind::DuplicateExpert => Some(self.peer.0),
            _ => None,
        }
    }

    /// Writes the circumstances under which a deadline passed.
    fn circumstances(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_timeout = matches!(self.kind, FaultKind::PeerTimeout | FaultKind::LocalTimeout);
        if self.is_culprit_behind {
            let why = "enqueue on all ranks before you wait for one (the guide, \"Why did it time out?\")";
            let Rank(late) = self.culprit;
            write!(f, "; rank {late} was not called: {why}")?;
        }
        if let Some(ranks) = self.gpu_ranks.filter(|_| is_timeout) {
            write!(
                f,
                "; {ranks} ranks of its process share its GPU: give each a stream of its own, and set \
                 CUDA_DEVICE_MAX_CONNECTIONS=32 before anything uses the driver, as streams that share a \
                 hardware queue wait for each other"
            )?;
        }
        match self.patience_ms {
            Some(patience_ms) => write!(
                f,
                " (simulated: no launch came for {patience_ms} ms of wall time, the deadline or the \
                 simulation's patience)"
            ),
            None => Ok(()),
        }
    }

    /// Kernel and round of this rank's last launch before one that came [out of turn](FaultKind::OutOfTurn);
    /// `None` if there was none, and for other kinds.
    pub fn last_launch(&self) -> Option<(Kernel, u64)> {
        match self.kind {
            FaultKind::OutOfTurn if self.saw > 0 => {
                Some((*Kernel::ALL.get(self.index as usize)?, self.saw))
            }
            _ => None,
        }
    }

    /// Writes which outputs lack rows, or blocks of scales, and how many.
    fn too_small(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank: Rank(rank),
            index,
            wanted,
            saw,
            epoch,
            ..
        } = *self;
        let (kernel, what) = (self.kernel.name(), self.region.name());
        match self.region {
            Region::ExpertBlock => write!(
                f,
                "rank {rank} receives {saw} rows for expert {index} in {kernel}, round {epoch}, but the \
                 expert's block holds {wanted}; those beyond count as not routed here"
            ),
            _ => write!(
                f,
                "rank {rank} receives {saw} {what} in {kernel}, round {epoch}, but its outputs hold \
                 {wanted}; those beyond count as not routed here"
            ),
        }
    }

    /// Writes which word of a token's scales is lost.
    fn lost_scales(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rank {}, token {}: word {} of its {} is {:#x}, which no row carries; 0xffffffff goes instead \
             ({}, round {})",
            self.rank.0,
            self.index,
            self.wanted,
            self.region.name(),
            self.saw,
            self.kernel.name(),
            self.epoch
        )
    }

    /// Writes on which rank `peer` had given up itself, if it had.
    fn chain(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rank(peer) = self.peer;
        match self.culprit {
            culprit if culprit == self.peer => Ok(()),
            culprit if culprit == self.rank => write!(
                f,
                "; rank {peer} had given up on this rank, which came late"
            ),
            culprit => write!(f, "; rank {peer} had given up on rank {}", culprit.0),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank: Rank(rank),
            peer: Rank(peer),
            index,
            wanted,
            saw,
            epoch,
            ..
        } = *self;
        let (kernel, what) = (self.kernel.name(), self.region.name());
        match self.kind {
            FaultKind::PeerTimeout => {
                write!(
                    f,
                    "rank {rank} gave up in {kernel}, round {epoch}: rank {peer} did not send its {what} \
                     (index {index}) in time; wanted epoch {wanted}, saw {saw}"
                )?;
                self.chain(f)
            }
            FaultKind::LocalTimeout => write!(
                f,
                "rank {rank} gave up in {kernel}, round {epoch}: its own {what} were not ready in time; \
                 wanted {wanted}, saw {saw}"
            ),
            FaultKind::InvalidExpert => write!(
                f,
                "rank {rank}, token {index}, slot {peer}: expert id {} is not in -1 to {}; the entry was \
                 not routed ({kernel}, round {epoch})",
                saw as i64,
                wanted as i64 - 1
            ),
            FaultKind::DuplicateExpert => write!(
                f,
                "rank {rank}, token {index}, slot {peer}: expert {saw} stands twice in the token's {what} \
                 ({kernel}, round {epoch})"
            ),
            FaultKind::TooManyOnDevice => write!(
                f,
                "rank {rank}: {what} is {saw}, but x has {wanted} rows; these were taken ({kernel}, round \
                 {epoch})"
            ),
            FaultKind::LostScales => self.lost_scales(f),
            FaultKind::RowOutOfBounds => write!(
                f,
                "rank {rank} refused a row of rank {peer} (token {index}) in {kernel}, round {epoch}: \
                 position {saw} is not below {wanted}"
            ),
            FaultKind::OutputTooSmall => self.too_small(f),
            FaultKind::TooManyTokens => write!(
                f,
                "rank {peer} announced {saw} tokens to rank {rank} in {kernel}, round {epoch}; the plan \
                 allows {wanted}"
            ),
            FaultKind::NetworkStalled => write!(
                f,
                "rank {rank} gave up in {kernel}, round {epoch}: NVSHMEM took no more requests for ranks of \
                 other nodes; its thread on the host is stuck with a peer or the network"
            ),
            FaultKind::OutOfTurn => {
                write!(
                    f,
                    "rank {rank} refused {kernel}, round {epoch}, out of turn: its {what} was "
                )?;
                match self.last_launch() {
                    Some((last, round)) => write!(f, "{}, round {round}", last.name()),
                    None => write!(f, "none"),
                }
            }
        }?;
        self.circumstances(f)
    }
}

/// A page that the host and the device share. The first fault wins, but one that stops the group replaces one
/// of the input, and one that names a cause replaces a [`LocalTimeout`](FaultKind::LocalTimeout).
///
/// Records are numbered. The device stores the number before a record and after it, and the host reads the
/// second number first: if the two differ, the record is being written. Neither side needs an atomic
/// operation on the other's memory.
///
/// The words between the numbers are a [`Fault`] in numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct FaultPage {
    /// Number of the record that the device began to write, from 1; 0 before.
    pub begun: u64,
    /// Index into the kinds.
    pub kind: u64,
    /// Index into [`Kernel::ALL`]; in the upper half one more than [`Fault::patience_ms`], if there is one.
    pub kernel: u64,
    /// See [`Fault::rank`].
    pub rank: u64,
    /// See [`Fault::peer`].
    pub peer: u64,
    /// See [`Fault::culprit`].
    pub culprit: u64,
    /// Index into the regions.
    pub region: u64,
    /// See [`Fault::index`].
    pub index: u64,
    /// See [`Fault::wanted`].
    pub wanted: u64,
    /// See [`Fault::saw`].
    pub saw: u64,
    /// See [`Fault::epoch`].
    pub epoch: u64,
    /// Number of the record that is complete.
    pub complete: u64,
    /// Number of the record that the host has read and reported. The host alone writes this word.
    pub acknowledged: u64,
}

impl FaultPage {
    /// Record `number` of a page: `fault`, complete. Nothing is acknowledged.
    pub const fn of(fault: &Fault, number: u64) -> Self {
        Self {
            begun: number,
            kind: fault.kind as u64,
            kernel: fault.kernel as u64
                | match fault.patience_ms {
                    Some(patience_ms) => (patience_ms as u64 + 1) << 32,
                    None => 0,
                },
            rank: fault.rank.0 as u64,
            peer: fault.peer.0 as u64,
            culprit: fault.culprit.0 as u64,
            region: fault.region as u64,
            index: fault.index,
            wanted: fault.wanted,
            saw: fault.saw,
            epoch: fault.epoch,
            complete: number,
            acknowledged: 0,
        }
    }

    /// Whether there is a whole record that the host has not acknowledged.
    pub const fn has_news(&self) -> bool {
        self.begun == self.complete && self.complete != self.acknowledged
    }

    /// The fault, if there is a new record that makes sense.
    pub fn fault(&self) -> Option<Fault> {
        if !self.has_news() {
            return None;
        }
        Some(Fault {
            kind: *FaultKind::ALL.get(self.kind as usize)?,
            kernel: *Kernel::ALL.get(self.kernel as u32 as usize)?,
            rank: Rank(self.rank as u32),
            peer: Rank(self.peer as u32),
            culprit: Rank(self.culprit as u32),
            region: *Region::ALL.get(self.region as usize)?,
            index: self.index,
            wanted: self.wanted,
            saw: self.saw,
            epoch: self.epoch,
            patience_ms: (self.kernel >> 32)
                .checked_sub(1)
                .map(|patience_ms| patience_ms as u32),
            gpu_ranks: None,
            is_culprit_behind: false,
        })
    }
}

/// Number, kind and culprit of the last record that a device wrote to its page. 0 before the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastRecord(pub u64);

impl LastRecord {
    /// Word for record `number`. `kind` and `culprit` are as on the page.
    #[inline(always)]
    pub const fn new(number: u64, kind: u64, culprit: u64) -> Self {
        Self(number << 24 | culprit << 8 | kind)
    }

    /// The number.
    #[inline(always)]
    const fn number(self) -> u64 {
        self.0 >> 24
    }

    #[inline(always)]
    const fn kind(self) -> u64 {
        self.0 & 0xff
    }

    /// The rank at which the chain of waiting ranks begins, if this rank has timed out on a peer.
    #[inline(always)]
    pub fn culprit(self) -> Option<Rank> {
        let has_given_up = self.0 != 0 && self.kind() == FaultKind::PeerTimeout as u64;
        has_given_up.then_some(Rank((self.0 >> 8) as u32 & 0xffff))
    }

    /// The number that the record of a new fault of kind `new` (as a number) takes; `None` if the last record
    /// stays. `acknowledged` reads from the page the number that the host has acknowledged.
    #[inline(always)]
    pub fn next(self, new: u64, acknowledged: impl FnOnce() -> u64) -> Option<u64> {
        const LOCAL: u64 = FaultKind::LocalTimeout as u64;
        const TOO_SMALL: u64 = FaultKind::OutputTooSmall as u64;
        let gives_way = if self.number() == 0 {
            true
        } else if is_input(self.kind()) {
            // A fault that stops the group matters more; the host acknowledges only faults of the input.
            // Among these, missing rows matter more than a bad input.
            let lacks_rows = new == TOO_SMALL && self.kind() != TOO_SMALL;
            !is_input(new) || lacks_rows || acknowledged() == self.number()
        } else {
            self.kind() == LOCAL && new != LOCAL && !is_input(new)
        };
        gives_way.then_some(self.number() + 1)
    }
}
