//! Puts of a warp to ranks of other nodes.

use ferry_layout::ByteOffset;
use ferry_protocol::{PUTS_AT_ONCE, Put, Puts};

use super::Warp;
use crate::network::Sent;
use crate::write::Polled;

impl Puts for Warp<'_> {
    fn has_room(&self) -> bool {
        let has_room = self.shared.network.borrow().has_room(self.rank);
        if has_room {
            self.room.set((PUTS_AT_ONCE, 1));
        }
        has_room
    }

    fn stage(&self, at: ByteOffset, word: u64) {
        let address = self.in_window(at.bytes());
        self.store_bytes(address, &word.to_le_bytes(), Polled::No);
    }

    fn put_row(&self, put: Put) {
        self.send(put, false);
        self.pause();
    }

    fn put_words(&self, put: Put) {
        self.send(put, true);
    }

    fn fence_puts(&self) {
        let (puts, fences) = self.room.get();
        assert_ne!(fences, 0, "a fence follows a look for room");
        self.room.set((puts, fences - 1));
        self.fences.set(self.fences.get() + 1);
    }
}

impl Warp<'_> {
    /// Sends a put: what is staged for it, but not released, may not be in it.
    fn send(&self, put: Put, is_words: bool) {
        let (puts, fences) = self.room.get();
        assert_ne!(puts, 0, "a put follows a look for room");
        self.room.set((puts - 1, fences));
        let sent = Sent {
            sender: (self.rank, self.birth),
            peer: put.peer.0,
            from: self.in_window(put.from.bytes()),
            to: self.remote_address(put.peer, put.to.bytes()),
            bytes: u64::from(put.bytes),
            is_words,
        };
        self.shared.network.borrow_mut().send(
            &sent,
            self.fences.get(),
            &mut self.shared.rng.borrow_mut(),
        );
    }
}
