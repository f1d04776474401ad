//! Rows of a check of links: what they hold, how they are sent, and whether they have come.

use ferry_layout::{ByteOffset, LinkOutcome, LinkTest, Rank};

use super::{Awaited, Links};
use crate::machine::rows::Row;
use crate::machine::{LANES, Machine};

/// Vectors of a lane that are moved at once.
const DEPTH: usize = 2;

impl<M: Machine> Links<'_, M> {
    /// Place of a row of `source` in a window.
    #[inline(always)]
    pub(super) fn place(&self, source: Rank, row: u32) -> ByteOffset {
        let window = &self.args.common.window;
        match self.test {
            LinkTest::Inline => window.inline_dispatch_row(source, row),
            _ => window.dispatch_row(source, row),
        }
    }

    /// A word of a row: never the sentinel.
    #[inline(always)]
    fn word(&self, source: Rank, row: u32, word: u32) -> u32 {
        let of_row = (source.0 << 16 | row).wrapping_mul(0x85eb_ca6b);
        let of_launch = of_row.wrapping_add(self.args.salt as u32);
        (of_launch ^ word).wrapping_mul(0x9e37_79b9) >> 1
    }

    /// Bytes of a row.
    #[inline(always)]
    fn bytes(&self) -> u32 {
        self.args.common.row.payload_bytes
    }

    /// Writes the rows that this warp sends to its own window, from which they are copied.
    #[inline(always)]
    pub(super) fn prepare(&self) {
        let (machine, me) = (self.machine, self.args.common.rank());
        if self.test == LinkTest::Flag {
            return;
        }
        for lane in 0..self.count {
            let (row, _) = self.row(lane);
            let at = self.args.common.window.dispatch_row(me, row);
            for first in (0..self.bytes() / 4).step_by(LANES as usize) {
                machine.lanes(|lane| {
                    let word = first + lane;
                    machine.write_window(at.word(word), self.word(me, row, word));
                });
            }
        }
        machine.converge();
    }

    /// Stores this warp's rows into the peer's window.
    #[inline(always)]
    pub(super) fn store_rows(&self) {
        let (machine, me) = (self.machine, self.args.common.rank());
        if self.test == LinkTest::Flag {
            return;
        }
        let end = self.bytes();
        for lane in 0..self.count {
            let (row, _) = self.row(lane);
            let own = self.args.common.window.dispatch_row(me, row);
            let from = machine.row(Row::Window(me, own));
            let mut start = 0;
            while start < end {
                // This kernel wrote it, so that it must not come from a cache of constant data.
                let tile = machine.load_tile::<DEPTH>(from, start, end, true);
                match self.test {
                    LinkTest::Inline => {
                        let to = machine.row(Row::Inline(self.peer, self.place(me, row)));
                        machine.store_polled(to, start, end, &tile);
                    }
                    _ => {
                        let to = machine.row(Row::Window(self.peer, self.place(me, row)));
                        machine.store_tile(to, start, end, &tile);
                    }
                }
                start += DEPTH as u32 * M::WARP_BYTES;
            }
        }
    }

    /// Waits until no word of the peer's inline row is the sentinel.
    #[inline(always)]
    pub(super) fn wait_for_words(&self, awaited: Awaited) -> LinkOutcome {
        let (machine, end) = (self.machine, self.bytes());
        let row = machine.own_row(self.place(self.peer, 0));
        let mut start = 0;
        while start < end {
            let tile = machine.load_tile::<DEPTH>(row, start, end, true);
            if machine.incomplete([&tile]) == 0 {
                start += DEPTH as u32 * M::WARP_BYTES;
            } else if machine.timed_out_by(awaited.until) {
                return LinkOutcome::Missing;
            }
        }
        // Before lanes read words whose arrival another lane saw.
        machine.converge();
        LinkOutcome::Well
    }

    /// Looks whether the peer's rows are what it sent.
    #[inline(always)]
    pub(super) fn look(&self) -> LinkOutcome {
        let (machine, peer) = (self.machine, self.peer);
        if self.test == LinkTest::Flag {
            return LinkOutcome::Well;
        }
        let mut wrong = 0;
        for lane in 0..self.count {
            let (row, _) = self.row(lane);
            let at = self.place(peer, row);
            for first in (0..self.bytes() / 4).step_by(LANES as usize) {
                wrong |= machine.ballot(machine.lanes(|lane| {
                    let word = first + lane;
                    machine.read_window(at.word(word)) != self.word(peer, row, word)
                }));
            }
        }
        // Before lanes store the sentinel where another lane read.
        machine.converge();
        match wrong {
            0 => LinkOutcome::Well,
            _ => LinkOutcome::Wrong,
        }
    }

    /// Stores the sentinel to the peer's inline row again.
    #[inline(always)]
    pub(super) fn re_arm(&self) {
        let (machine, end) = (self.machine, self.bytes());
        let row = machine.own_row(self.place(self.peer, 0));
        let mut start = 0;
        while start < end {
            machine.store_tile(row, start, end, &[M::SENTINELS; DEPTH]);
            start += DEPTH as u32 * M::WARP_BYTES;
        }
    }
}
