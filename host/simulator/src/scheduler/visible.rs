//! Writes and puts that become visible.

use rand::Rng;

use super::World;

impl World {
    /// Makes writes visible that have arrived over a slow link by then.
    pub(super) fn arrive(&self, by: u64) {
        if let Some(bad) = self.options.bad_link {
            self.shared.arrive(bad.from, by);
        }
    }

    /// Lets time pass until the next write arrives over a slow link; false if none is under way.
    pub(super) fn await_link(&self) -> bool {
        let due = self.shared.links.borrow().next_due();
        due.inspect(|&due| {
            let clock = &self.shared.clock;
            clock.set(clock.get().max(due));
            self.arrive(due);
        })
        .is_some()
    }

    /// Makes a random write visible; false if there is none.
    pub(super) fn drain(&mut self) -> bool {
        let buffers = self.running.iter().map(|warp| &warp.buffer);
        let mut full = buffers.filter(|buffer| !buffer.borrow().is_empty());
        let count = full.clone().count();
        if count == 0 {
            return false;
        }
        let which = self.shared.rng.borrow_mut().random_range(0..count);
        if let Some(buffer) = full.nth(which) {
            buffer.borrow_mut().drain_one(&self.shared);
        }
        true
    }

    /// Delivers a part of a put, also of one that is held back if `all`; false if there is none.
    pub(super) fn deliver(&mut self, all: bool) -> bool {
        let shared = &self.shared;
        if shared.network.borrow().is_empty() {
            return false;
        }
        let delivered = shared.network.borrow_mut().deliver(
            all,
            &mut shared.memory.borrow_mut(),
            &mut shared.rng.borrow_mut(),
        );
        match delivered {
            Ok(None) => return false,
            Ok(Some(delivered)) => shared.delivered(&delivered),
            Err(outside) => shared.report(outside, "a put"),
        }
        true
    }
}
