//! Wait for room on the way to other nodes: NVSHMEM's own functions wait without end.

use ferry_layout::{FaultKind, Region};

use crate::machine::Machine;
use crate::sync::launch::{Aborted, Awaited, Launch};

impl<M: Machine> Launch<'_, M> {
    /// Waits until other nodes can be [sent](crate::machine::puts::Puts::has_room) something.
    #[inline(always)]
    pub fn wait_for_room(&self) -> Result<(), Aborted> {
        let machine = self.machine;
        while !machine.has_room() {
            if machine.timed_out() {
                let awaited = |_| Awaited {
                    peer: self.common.rank(),
                    region: Region::Channel,
                    index: 0,
                    saw: 0,
                };
                return self.time_out(FaultKind::NetworkStalled, 0, awaited);
            }
        }
        Ok(())
    }
}
