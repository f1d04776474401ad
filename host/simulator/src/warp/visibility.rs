//! Writes that a warp sees and makes visible: its own, and those that other warps of its block made before a
//! barrier that all have passed. A barrier makes nothing visible to other blocks.

use std::cell::RefCell;
use std::rc::Rc;

use super::Warp;
use crate::store_buffer::{EVER, StoreBuffer};

impl Warp<'_> {
    /// Calls `drain` with the store buffer of each warp of the block, and the number of barriers before which
    /// a write must have been made for this warp to see it.
    fn each_buffer(&self, drain: impl Fn(&mut StoreBuffer, u16)) {
        for buffer in self.block.buffers.borrow().iter() {
            let before = if Rc::ptr_eq(buffer, &self.buffer) {
                EVER
            } else {
                self.block.barriers()
            };
            drain(&mut RefCell::borrow_mut(buffer), before);
        }
    }

    /// Makes all writes to these bytes visible that this warp sees.
    pub(super) fn see(&self, address: u64, bytes: u64) {
        self.each_buffer(|buffer, before| buffer.drain_under(address, bytes, before, &self.shared));
    }

    /// Makes all writes of others to these bytes visible that this warp sees.
    pub(super) fn see_others(&self, address: u64, bytes: u64) {
        self.each_buffer(|buffer, before| {
            if before != EVER {
                buffer.drain_under(address, bytes, before, &self.shared);
            }
        });
    }

    /// Makes all writes visible that this warp sees.
    pub(super) fn release_all(&self) {
        self.each_buffer(|buffer, before| buffer.drain_before(before, &self.shared));
    }

    /// Makes all writes to its own rank's memory visible that this warp sees.
    pub(super) fn release_own(&self) {
        self.each_buffer(|buffer, before| buffer.drain_own_before(before, &self.shared));
    }
}
