//! Who implements what kernels rely on promises something.

use ferry::Group;
use ferry::device::{FaultPage, SharedPage};

struct Nowhere;

impl SharedPage for Nowhere {
    fn address(&self) -> u64 {
        0x1000
    }
    fn read(&self) -> FaultPage {
        FaultPage::default()
    }
    fn acknowledge(&self, _: u64) {}
}

fn close(group: &Group) {
    let _ = group.fabric();
}

fn main() {}
