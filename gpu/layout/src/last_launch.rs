//! Order of the launches of a round: a dispatch, then a combine, each whole or in two halves.

use crate::epoch::Epoch;
use crate::kernel::Kernel;

/// Bits of a word that hold the kernel.
const KERNEL_BITS: u32 = 3;

/// Word in which a block keeps the last launch of its communicator that it was a part of: round and kernel. 0
/// before the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastLaunch(pub u64);

impl LastLaunch {
    /// Word of a launch of `kernel` in `epoch`. Not for fused SiLU, nor for kernels with `skip_a2a`.
    #[inline(always)]
    pub const fn of(epoch: Epoch, kernel: Kernel) -> Self {
        debug_assert!((kernel as u64) < Kernel::FusedSilu as u64);
        Self(epoch.0 << KERNEL_BITS | kernel as u64)
    }

    /// Round of the launch, 0 before the first.
    #[inline(always)]
    pub const fn epoch(self) -> u64 {
        self.0 >> KERNEL_BITS
    }

    /// Number of its kernel in [`Kernel::ALL`].
    #[inline(always)]
    pub const fn kernel(self) -> u64 {
        self.0 & ((1 << KERNEL_BITS) - 1)
    }

    /// Whether a launch of `kernel` in `epoch`, the round after the last finished one, may follow. A combine
    /// finishes a round, so a dispatch that finds one of its own round comes before that round's combine.
    #[inline(always)]
    pub fn precedes(self, epoch: Epoch, kernel: Kernel) -> bool {
        let is = |earlier| self == Self::of(epoch, earlier);
        match kernel {
            Kernel::Dispatch | Kernel::DispatchAsync => self.epoch() < epoch.0,
            Kernel::DispatchWait => is(Kernel::DispatchAsync),
            Kernel::Combine | Kernel::CombineAsync => {
                is(Kernel::Dispatch) || is(Kernel::DispatchWait)
            }
            Kernel::CombineWait => is(Kernel::CombineAsync),
            // No other kernel has a place in a round.
            _ => false,
        }
    }
}

const _: () = assert!(
    (Kernel::FusedSilu as u64) < 1 << KERNEL_BITS,
    "a kernel of a round has a number below that"
);
