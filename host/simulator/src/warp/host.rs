//! Memory that the host reads while kernels run.

use ferry_layout::Table;
use ferry_protocol::Host;

use super::Warp;

impl Host for Warp<'_> {
    fn tell_host(&self, ticket: u64) {
        self.pause();
        self.store_word(self.in_table(Table::HostCounts, 0), ticket);
    }
}
