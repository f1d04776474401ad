//! What a warp sees of what others wrote, and what it makes visible: its own writes, and those that other
//! warps of its block made before a barrier that all have passed. To other blocks a barrier shows nothing.

use std::cell::RefCell;
use std::rc::Rc;

use super::Warp;
use crate::store_buffer::{EVER, StoreBuffer};

impl Warp<'_> {
    /// Calls `drain` with the store buffers of the block's warps, and the barriers before which a write must
    /// have been made to be seen by this warp.
    fn each_buffer(&self, drain: impl Fn(&mut StoreBuffer, u16)) {
        for buffer in self.block.buffers.borrow().iter() {
            let before = match Rc::ptr_eq(buffer, &self.buffer) {
                true => EVER,
                false => self.block.barriers(),
            };
            drain(&mut RefCell::borrow_mut(buffer), before);
        }
    }

    /// Makes visible what this warp sees of so many bytes.
    pub(super) fn see(&self, address: u64, bytes: u64) {
        self.each_buffer(|buffer, before| buffer.drain_under(address, bytes, before, &self.shared));
    }

    /// Makes visible what this warp sees that others wrote to so many bytes.
    pub(super) fn see_others(&self, address: u64, bytes: u64) {
        self.each_buffer(|buffer, before| {
            if before != EVER {
                buffer.drain_under(address, bytes, before, &self.shared);
            }
        });
    }

    /// Makes visible all that this warp sees.
    pub(super) fn release_all(&self) {
        self.each_buffer(|buffer, before| buffer.drain_before(before, &self.shared));
    }

    /// Makes visible what this warp sees of its own rank's memory.
    pub(super) fn release_own(&self) {
        self.each_buffer(|buffer, before| buffer.drain_own_before(before, &self.shared));
    }
}
