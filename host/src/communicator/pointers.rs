//! Addresses of a rank's memory, for debuggers and tools.

use ferry_layout::{CombineMode, Rank};

use crate::communicator::Communicator;
use crate::device::pointers::DevicePointers;

impl Communicator {
    /// Returns the addresses of this rank's memory on its device. Reads no device memory. Not collective;
    /// does not synchronize.
    pub const fn device_pointers(&self) -> DevicePointers {
        let shape = &self.common.shape;
        let (own, window) = (self.common.own_window, self.common.window);
        let first = Rank(0);
        let sends = match (shape.spans_nodes(), shape.mode()) {
            (false, _) => [0, 0],
            (true, mode) => {
                let rows = match mode {
                    CombineMode::Reduced => window.reduced_staging(first, 0),
                    CombineMode::Exact => window.exact_staging(0),
                };
                [own + window.dispatch_staging(0).bytes(), own + rows.bytes()]
            }
        };
        let [dispatch, combine] = sends;
        DevicePointers {
            rank: self.rank(),
            table: [
                [
                    dispatch,
                    own + window.dispatch_row(first, 0).bytes(),
                    own + window.count(first, 0).bytes(),
                ],
                [
                    combine,
                    own + window.combine_row(0, 0).bytes(),
                    own + window.combine_flag(0, 0).bytes(),
                ],
            ],
            counters: self.common.workspace,
        }
    }
}
