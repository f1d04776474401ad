//! Order of a rank's launches.

use ferry_layout::{Fault, FaultKind, LastLaunch, Region};

use crate::machine::Machine;
use crate::sync::culprit;
use crate::sync::launch::{Aborted, Launch};

impl<M: Machine> Launch<'_, M> {
    /// Makes sure that no earlier launch aborted and that this one is the next of its round, and leaves it to
    /// the next. A launch out of turn, as in a graph with a part of a round that is launched twice, is
    /// refused before it has written anything but the rank at fault. Not for `skip_a2a`, with which nobody
    /// waits.
    ///
    /// No late block takes its own launch for an earlier one, and no early one lets a wrong launch pass:
    ///
    /// - Each block decides by itself, from a [`LastLaunch`] of its own, which no other block reads or
    ///   writes. It loads the word before the barrier of [`begun`](Self::begun) and stores it after that. So
    ///   whatever other blocks of this launch have done, the loaded word is of an earlier launch.
    /// - Launches of a communicator follow each other in stream order, and all have the same number of blocks
    ///   ([`ferry_layout::Kernel::blocks`]), each of which leaves its word. So the loaded word is of the
    ///   launch before, all blocks load the same, and all or none refuse. If the number varies, a block also
    ///   leaves the words of blocks that this launch does not have, which none of its blocks reads.
    /// - A block that begins after its launch has aborted leaves nothing. Later launches find `Aborted`.
    #[inline(always)]
    pub fn enter(&self) -> Result<(), Aborted> {
        self.require_turn()?;
        let machine = self.machine;
        let position = machine.warp_position();
        if position.index + 1 == position.in_block {
            machine.leave_launch(LastLaunch::of(self.epoch, self.kernel), self.varies);
        }
        Ok(())
    }

    /// Makes the same sure as [`enter`](Self::enter), but leaves the launch to no other: for one after which
    /// another takes the same turn.
    #[inline(always)]
    pub fn require_turn(&self) -> Result<(), Aborted> {
        // Loaded before the branch on the other word, so that nothing waits for the two in turn.
        let last = self.machine.last_launch();
        self.check()?;
        match last.precedes(self.epoch, self.kernel) {
            true => Ok(()),
            false => self.refuse(last),
        }
    }

    /// Stops this rank, whose launch comes out of turn, and tells all ranks that it is at fault. By one warp,
    /// as every warp gets here.
    #[inline(always)]
    fn refuse(&self, last: LastLaunch) -> Result<(), Aborted> {
        let machine = self.machine;
        if machine.warp() == 0 {
            machine.lanes(|lane| {
                if lane == 0 {
                    let fault = Fault {
                        region: Region::LastLaunch,
                        index: last.kernel(),
                        wanted: self.follows().0,
                        saw: last.epoch(),
                        ..self.fault()
                    };
                    self.record(FaultKind::OutOfTurn, fault);
                }
            });
            let aborted = self.abort();
            culprit::tell_culprit(machine, self.common, self.common.rank());
            return aborted;
        }
        Err(Aborted)
    }
}
