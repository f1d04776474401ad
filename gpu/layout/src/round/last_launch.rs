//! Order of the launches of a round: a dispatch, then a combine, each whole or in two halves, or instead of
//! the combine the end of a round that is given up.

use crate::round::epoch::Epoch;
use crate::round::kernel::Kernel;

/// Bits of a word that hold the kernel.
const KERNEL_BITS: u32 = 3;
/// Stands for [`Kernel::GiveUp`], whose own number has more bits: the number of a kernel without a place in a
/// round.
const GIVE_UP: u64 = Kernel::FusedSilu as u64;

/// Word in which a block keeps the last launch of its communicator that it was a part of: round and kernel. 0
/// before the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastLaunch(pub u64);

impl LastLaunch {
    /// Word of a launch of `kernel` in `epoch`. Not for fused SiLU, nor for kernels with `skip_a2a`.
    #[inline(always)]
    pub const fn of(epoch: Epoch, kernel: Kernel) -> Self {
        let number = match kernel {
            Kernel::GiveUp => GIVE_UP,
            kernel => kernel as u64,
        };
        debug_assert!(number < GIVE_UP || matches!(kernel, Kernel::GiveUp));
        Self(epoch.0 << KERNEL_BITS | number)
    }

    /// Round of the launch, 0 before the first.
    #[inline(always)]
    pub const fn epoch(self) -> u64 {
        self.0 >> KERNEL_BITS
    }

    /// Number of its kernel in [`Kernel::ALL`].
    #[inline(always)]
    pub const fn kernel(self) -> u64 {
        match self.0 & ((1 << KERNEL_BITS) - 1) {
            GIVE_UP => Kernel::GiveUp as u64,
            number => number,
        }
    }

    /// Whether a launch of `kernel` in `epoch`, the round after the last finished one, may follow. A combine
    /// and giving up finish a round, so a dispatch that finds one of its own round comes before that round's
    /// combine.
    #[inline(always)]
    pub fn precedes(self, epoch: Epoch, kernel: Kernel) -> bool {
        let is = |earlier| self == Self::of(epoch, earlier);
        match kernel {
            Kernel::Dispatch | Kernel::DispatchAsync => self.epoch() < epoch.0,
            Kernel::DispatchWait | Kernel::DispatchCounts => is(Kernel::DispatchAsync),
            Kernel::Combine | Kernel::CombineAsync | Kernel::GiveUp => {
                is(Kernel::Dispatch) || is(Kernel::DispatchWait)
            }
            Kernel::CombineWait => is(Kernel::CombineAsync),
            // No other kernel has a place in a round.
            _ => false,
        }
    }
}

const _: () = assert!(
    GIVE_UP < 1 << KERNEL_BITS,
    "the other kernels of a round have numbers below that"
);
