//! Rows with inline flags, as the kernels send and take them, on warps of one lane whose vectors are single
//! words.

use std::cell::Cell;
use std::sync::Arc;

use ferry_layout::{ByteOffset, Counter, Epoch, Rank, SENTINEL, Tensor};
use ferry_protocol::wire::credit;
use ferry_protocol::wire::inline;
use ferry_protocol::{ByteRange, Counters, Deadline, Rounding, Row, Tiles};
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

use super::{Memory, NOT_WHOLE, OVERWRITTEN, ROUNDS, Warp, Weak, wait};

/// Message of a reader that re-armed a word too late, or too early.
pub const LOST: &str = "a word was re-armed after it had been written again";

/// Words of a row.
const WORDS: usize = 2;
/// Vectors of a lane in a tile that is copied.
const DEPTH: usize = 2;
/// All words of a row.
const SPAN: ByteRange = ByteRange {
    start: 0,
    end: 4 * WORDS as u32,
};

/// Two rows in the window of rank 1.
pub struct Rows([[AtomicU32; WORDS]; 2]);

impl Rows {
    /// Returns two armed rows.
    pub fn new() -> Self {
        Self([(); 2].map(|()| [(); WORDS].map(|()| AtomicU32::new(SENTINEL))))
    }
}

/// Place of a row.
#[derive(Clone, Copy)]
enum Address {
    Window(usize),
    Input,
    Output,
}

/// A warp and its tensors.
struct InlineWarp<'a> {
    warp: Warp<'a>,
    /// Value that this warp sends.
    input: Cell<u32>,
    /// Row that this warp has received.
    output: Cell<[u32; WORDS]>,
    /// Number of vain looks after the last write.
    looks: Cell<u32>,
}

impl<'a> InlineWarp<'a> {
    fn new(warp: Warp<'a>) -> Self {
        Self {
            warp,
            input: Cell::new(0),
            output: Cell::default(),
            looks: Cell::new(0),
        }
    }

    /// Place of row `row` in the window of rank 1.
    fn offset(&self, row: u32) -> ByteOffset {
        self.warp.memory.window.inline_combine_row(0, row)
    }
}

impl Deadline for InlineWarp<'_> {
    fn now(&self) -> u64 {
        unreachable!("rows are not timed")
    }

    /// True after the last write and a look at one vector and at all of them.
    fn timed_out_by(&self, _deadline: u64) -> bool {
        thread::yield_now();
        let is_all = self.warp.load(Counter::Finished) != 0;
        self.looks.set(self.looks.get() + u32::from(is_all));
        self.looks.get() > 2
    }
}

impl Tiles for InlineWarp<'_> {
    type Address = Address;
    type Vector = u32;
    type Sums = u32;
    const VECTOR_BYTES: u32 = 4;
    const WARP_BYTES: u32 = 4;
    const SENTINELS: u32 = SENTINEL;

    fn row(&self, row: Row) -> Address {
        match row {
            Row::Inline(Rank(1), at) => self.own_row(at),
            Row::Tensor(Tensor::Input, 0) => Address::Input,
            Row::Tensor(Tensor::Output, 0) => Address::Output,
            _ => panic!("a row that no model uses: {row:?}"),
        }
    }

    fn own_row(&self, at: ByteOffset) -> Address {
        let row = (0..2).find(|&row| at == self.offset(row));
        Address::Window(row.expect("a row that no model uses") as usize)
    }

    fn has_bytes(&self, _row: Address, end: u32) -> bool {
        end <= SPAN.end
    }

    fn load_tile<const DEPTH: usize>(
        &self,
        row: Address,
        start: u32,
        end: u32,
        _arrives: bool,
    ) -> [u32; DEPTH] {
        std::array::from_fn(|vector| {
            let at = (start + 4 * vector as u32).min(end - 4);
            self.load_vector(row, at, end)
        })
    }

    fn load_vector(&self, row: Address, start: u32, _end: u32) -> u32 {
        let word = (start / 4) as usize;
        match row {
            Address::Window(row) => self.warp.memory.inline.0[row][word].load(Ordering::Relaxed),
            Address::Input => self.input.get(),
            Address::Output => self.output.get()[word],
        }
    }

    fn store_tile<const DEPTH: usize>(
        &self,
        row: Address,
        start: u32,
        end: u32,
        tile: &[u32; DEPTH],
    ) {
        for (word, &value) in ((start / 4) as usize..(end / 4) as usize).zip(tile) {
            match row {
                Address::Window(row) => {
                    self.warp.memory.inline.0[row][word].store(value, Ordering::Relaxed);
                }
                Address::Input => panic!("nobody writes the input"),
                Address::Output => {
                    let mut output = self.output.get();
                    output[word] = value;
                    self.output.set(output);
                }
            }
        }
    }

    fn store_polled<const DEPTH: usize>(
        &self,
        row: Address,
        start: u32,
        end: u32,
        tile: &[u32; DEPTH],
    ) {
        self.store_tile(row, start, end, tile);
    }

    fn incomplete<const TILES: usize, const DEPTH: usize>(
        &self,
        tiles: [&[u32; DEPTH]; TILES],
    ) -> u32 {
        (0..).zip(tiles).fold(0, |bits, (index, tile)| {
            bits | u32::from(tile.contains(&SENTINEL)) << index
        })
    }

    fn avoid_sentinel(&self, vector: u32) -> u32 {
        ferry_layout::avoid_sentinel(vector)
    }

    /// Integers do as well.
    fn add_bf16(&self, sums: u32, vector: u32) -> u32 {
        sums + vector
    }

    fn round_to_bf16(&self, sums: u32) -> u32 {
        sums
    }
}

/// Rank 0 sends rows a round, without a release and without a flag. Rank 1 waits for each word with `take`,
/// re-arms it, and then says that it has read the rows. Each word that it takes must be the round's number
/// times `rows`.
fn model(weak: Weak, rows: u32, take: fn(&InlineWarp<'_>) -> bool) {
    let memory = Memory::new(weak);
    let sender = thread::spawn({
        let memory = Arc::clone(&memory);
        move || {
            let warp = InlineWarp::new(memory.warp(0));
            let from = Row::Tensor(Tensor::Input, 0);
            let to = |row: u32| Row::Inline(Rank(1), warp.offset(row));
            for epoch in (1..=ROUNDS).map(Epoch) {
                warp.input.set(epoch.0 as u32);
                let ahead = inline::load_first::<_, DEPTH>(&warp, SPAN, from);
                let sent = inline::copy(&warp, SPAN, from, ahead, (1u32 << rows) - 1, to);
                assert_eq!(sent, Ok(()));
                if epoch.0 < ROUNDS && weak != Weak::ReuseGuard {
                    wait(|| credit::has_credit(&warp.warp, memory.consumed(1), epoch));
                }
            }
            // For the test alone: nothing more will be written.
            warp.warp.store(Counter::Finished, ROUNDS);
        }
    });
    let warp = InlineWarp::new(memory.warp(1));
    for epoch in (1..=ROUNDS).map(Epoch) {
        assert!(take(&warp), "{LOST}");
        for word in warp.output.get() {
            assert!(word >= rows * epoch.0 as u32, "{NOT_WHOLE}");
            assert!(word <= rows * epoch.0 as u32, "{OVERWRITTEN}");
        }
        memory.say_consumed(1, 0, epoch);
    }
    sender.join().unwrap();
}

/// Models a row that is copied.
pub fn copy_model(weak: Weak) {
    model(weak, 1, |warp| {
        let from = Row::Inline(Rank(1), warp.offset(0));
        let ahead = inline::load_first::<_, DEPTH>(warp, SPAN, from);
        let to = |_| Row::Tensor(Tensor::Output, 0);
        inline::copy(warp, SPAN, from, ahead, 1u32, to).is_ok()
    });
}

/// Models two rows that are summed.
pub fn sum_model(weak: Weak) {
    model(weak, 2, |warp| {
        let from = |row| warp.offset(row);
        let to = Row::Tensor(Tensor::Output, 0);
        inline::sum(warp, SPAN, 0b11, false, from, to, Rounding).is_ok()
    });
}
