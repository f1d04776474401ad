//! Counters: words shared by the warps of a rank.

use ferry_layout::Counter;
use ferry_protocol::Counters;

use super::Warp;

impl Counters for Warp<'_> {
    fn add(&self, counter: Counter, amount: u64) -> u64 {
        self.pause();
        let before = self.read_counter(counter);
        self.store_now(counter, before + amount);
        before
    }

    fn load(&self, counter: Counter) -> u64 {
        self.lanes_differ.set(true);
        self.read_counter(counter)
    }

    fn peek(&self, counter: Counter) -> u64 {
        // All warps of a block look before one of them goes on.
        *self.block.peeked[counter as usize].get_or_init(|| self.read_counter(counter))
    }

    fn store(&self, counter: Counter, value: u64) {
        self.pause();
        self.store_now(counter, value);
    }

    fn raise(&self, counter: Counter, value: u64) -> bool {
        self.pause();
        let is_lower = self.read_counter(counter) < value;
        if is_lower {
            self.store_alone(counter, value);
        }
        is_lower
    }
}

impl Warp<'_> {
    /// Reads a counter, for all lanes at one time.
    pub(super) fn read_counter(&self, counter: Counter) -> u64 {
        self.with_memory(|memory| memory.read_u64(self.counter(counter)))
    }

    /// Stores a counter after all earlier writes to this rank.
    fn store_now(&self, counter: Counter, value: u64) {
        self.release_own();
        self.store_alone(counter, value);
    }

    /// Stores a counter, in no order with earlier writes.
    pub(super) fn store_alone(&self, counter: Counter, value: u64) {
        self.store_word(self.counter(counter), value);
    }

    /// Stores a word of the workspace, in no order with earlier writes.
    pub(super) fn store_word(&self, address: u64, value: u64) {
        let mut memory = self.shared.memory.borrow_mut();
        let written = memory.write(address, &value.to_le_bytes());
        drop(memory);
        self.checked(written);
        self.shared.bump(self.rank);
    }
}
