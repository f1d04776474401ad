//! Polling, taking and re-arming of rows with inline flags: on a machine of one lane whose vectors are single
//! words, and on which the test decides when words arrive.

use std::cell::{Cell, RefCell};

use ferry_layout::{ByteOffset, Rank, SENTINEL, Shape, Tensor, Window};
use ferry_protocol::wire::inline::{self, SUM_DEPTH};
use ferry_protocol::{ByteRange, Deadline, Rounding, Row, Tiles, TimedOut};

/// Words of a row.
const WORDS: usize = 11;
/// Rows in the window. The output follows them.
const ROWS: usize = 9;
const OUTPUT: usize = ROWS;
/// Vectors of a tile that is copied.
const DEPTH: usize = 3;
/// Contents of words that were never written.
const UNTOUCHED: u32 = 7;

/// Actions of the machine.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    /// Loaded a tile from a word of a row.
    Tile(usize, usize),
    /// Loaded a vector.
    Vector(usize, usize),
    /// Found that the time has not passed.
    Waited,
}

struct Machine {
    window: Window,
    rows: RefCell<[[u32; WORDS]; ROWS + 1]>,
    /// The words that arrive, one after each moment of a wait: row, word, value.
    coming: RefCell<Vec<(usize, usize, u32)>>,
    /// Moments after that, until the deadline has passed: enough to look at one vector and at all of them.
    moments_left: Cell<u32>,
    events: RefCell<Vec<Event>>,
    rearmed: Cell<usize>,
}

impl Machine {
    /// Returns a machine with all rows armed.
    fn new() -> Self {
        let shape = Shape {
            ranks: 2,
            p2p_world_size: 2,
            experts: 2,
            top_k: 2,
            hidden: 24,
            max_tokens_per_rank: 1,
            combine_mode: 0,
            token_format: 0,
        };
        let mut rows = [[SENTINEL; WORDS]; ROWS + 1];
        rows[OUTPUT] = [UNTOUCHED; WORDS];
        Self {
            window: Window::of(&shape),
            rows: RefCell::new(rows),
            coming: RefCell::default(),
            moments_left: Cell::new(2),
            events: RefCell::default(),
            rearmed: Cell::new(0),
        }
    }

    fn offset(&self, row: usize) -> ByteOffset {
        self.window.inline_combine_row(0, row as u32)
    }

    /// Copies row 0 to the output.
    fn copy(&self, range: ByteRange) -> Result<(), TimedOut> {
        let from = Row::Inline(Rank(0), self.offset(0));
        let ahead = inline::load_first::<_, DEPTH>(self, range, from);
        let to = |_| Row::Tensor(Tensor::Output, 0);
        inline::copy(self, range, from, ahead, 1u32, to)
    }

    /// Sums the first rows to the output.
    fn sum(&self, range: ByteRange, rows: usize, polls_all: bool) -> Result<(), TimedOut> {
        let from = |row| self.offset(row as usize);
        let to = Row::Tensor(Tensor::Output, 0);
        inline::sum(self, range, (1 << rows) - 1, polls_all, from, to, Rounding)
    }

    fn events(&self) -> Vec<Event> {
        self.events.borrow().clone()
    }

    fn note(&self, event: Event) {
        self.events.borrow_mut().push(event);
    }

    /// Asserts that the words of a row are as `wanted` in a span, and as before elsewhere.
    fn assert_row(&self, row: usize, range: ByteRange, before: u32, wanted: impl Fn(u32) -> u32) {
        for (at, &word) in (0..).step_by(4).zip(&self.rows.borrow()[row]) {
            let is_inside = (range.start..range.end).contains(&at);
            let wanted = if is_inside { wanted(at / 4) } else { before };
            assert_eq!(word, wanted, "row {row}, byte {at} of {range:?}");
        }
    }
}

impl Deadline for Machine {
    fn now(&self) -> u64 {
        unreachable!("rows are not timed")
    }

    fn timed_out_by(&self, _deadline: u64) -> bool {
        let mut coming = self.coming.borrow_mut();
        if coming.is_empty() {
            let left = self.moments_left.get();
            self.moments_left.set(left.saturating_sub(1));
            return left == 0;
        }
        let (row, word, value) = coming.remove(0);
        self.rows.borrow_mut()[row][word] = value;
        self.note(Event::Waited);
        false
    }
}

impl Tiles for Machine {
    type Address = usize;
    type Vector = u32;
    type Sums = u32;
    const VECTOR_BYTES: u32 = 4;
    const WARP_BYTES: u32 = 4;
    const SENTINELS: u32 = SENTINEL;

    fn row(&self, row: Row) -> usize {
        match row {
            Row::Inline(Rank(0), at) => self.own_row(at),
            Row::Tensor(Tensor::Output, 0) => OUTPUT,
            _ => panic!("{row:?}"),
        }
    }

    fn own_row(&self, at: ByteOffset) -> usize {
        (0..ROWS)
            .find(|&row| self.offset(row) == at)
            .expect("a row that there is")
    }

    fn has_bytes(&self, _row: usize, end: u32) -> bool {
        end <= 4 * WORDS as u32
    }

    fn load_tile<const DEPTH: usize>(
        &self,
        row: usize,
        start: u32,
        end: u32,
        _arrives: bool,
    ) -> [u32; DEPTH] {
        let first = start as usize / 4;
        self.note(Event::Tile(row, first));
        let last = end as usize / 4 - 1;
        std::array::from_fn(|vector| self.rows.borrow()[row][(first + vector).min(last)])
    }

    fn load_vector(&self, row: usize, start: u32, end: u32) -> u32 {
        assert!(start < end, "byte {start} of {end}");
        self.note(Event::Vector(row, start as usize / 4));
        self.rows.borrow()[row][start as usize / 4]
    }

    fn store_tile<const DEPTH: usize>(
        &self,
        row: usize,
        start: u32,
        end: u32,
        tile: &[u32; DEPTH],
    ) {
        for (word, &value) in (start as usize / 4..end as usize / 4).zip(tile) {
            let before = std::mem::replace(&mut self.rows.borrow_mut()[row][word], value);
            if row != OUTPUT {
                assert_eq!(value, SENTINEL, "row {row} is re-armed with something else");
                assert_ne!(
                    before, SENTINEL,
                    "word {word} of row {row} is re-armed before it has come"
                );
                self.rearmed.set(self.rearmed.get() + 1);
            }
        }
    }

    fn store_polled<const DEPTH: usize>(&self, _: usize, _: u32, _: u32, _: &[u32; DEPTH]) {
        panic!("nobody polls the output");
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
        vector
    }

    fn add_bf16(&self, sums: u32, vector: u32) -> u32 {
        sums.wrapping_mul(3).wrapping_add(vector)
    }

    fn round_to_bf16(&self, sums: u32) -> u32 {
        sums
    }
}

/// A word as it was sent.
fn value(row: usize, word: usize) -> u32 {
    (1_000 * (row + 1) + word) as u32
}

/// Every span of a row, empty ones, too.
fn spans() -> impl Iterator<Item = ByteRange> {
    let words = |first| (first..=WORDS as u32).map(move |end| (first, end));
    (0..=WORDS as u32)
        .flat_map(words)
        .map(|(first, end)| ByteRange {
            start: 4 * first,
            end: 4 * end,
        })
}

/// The words in a span of rows, the later ones first if asked for.
fn words_in(range: ByteRange, rows: usize, is_backwards: bool) -> Vec<(usize, usize, u32)> {
    let words = range.start as usize / 4..range.end as usize / 4;
    let of_row = |row| words.clone().map(move |word| (row, word, value(row, word)));
    let mut words: Vec<_> = (0..rows).flat_map(of_row).collect();
    if is_backwards {
        words.reverse();
    }
    words
}

#[test]
fn every_word_is_copied_once_and_rearmed_in_whatever_order_the_words_come() {
    for range in spans() {
        for is_backwards in [false, true] {
            let machine = Machine::new();
            let coming = words_in(range, 1, is_backwards);
            let count = coming.len();
            machine.coming.replace(coming);
            assert_eq!(machine.copy(range), Ok(()), "{range:?}");
            machine.assert_row(0, range, SENTINEL, |_| SENTINEL);
            machine.assert_row(OUTPUT, range, UNTOUCHED, |word| value(0, word as usize));
            assert_eq!(machine.rearmed.get(), count, "{range:?}");
        }
    }
}

#[test]
fn every_word_is_summed_once_and_rearmed_in_whatever_order_the_words_come() {
    for range in spans().filter(|range| range.start < range.end) {
        for rows in 0..=ROWS {
            for [is_backwards, polls_all] in
                [[false, false], [false, true], [true, false], [true, true]]
            {
                let machine = Machine::new();
                let coming = words_in(range, rows, is_backwards);
                let count = coming.len();
                machine.coming.replace(coming);
                assert_eq!(machine.sum(range, rows, polls_all), Ok(()), "{range:?}");
                (0..ROWS).for_each(|row| machine.assert_row(row, range, SENTINEL, |_| SENTINEL));
                machine.assert_row(OUTPUT, range, UNTOUCHED, |word| {
                    let rows = (0..rows).map(|row| value(row, word as usize));
                    rows.fold(0, |sum: u32, value| sum.wrapping_mul(3).wrapping_add(value))
                });
                assert_eq!(machine.rearmed.get(), count, "{range:?}, {rows} rows");
            }
        }
    }
}

#[test]
fn a_word_that_does_not_come_ends_the_wait_and_its_tile_stays_as_it_was() {
    let range = ByteRange { start: 4, end: 40 };
    for missing in 1..10 {
        let machine = Machine::new();
        let mut coming = words_in(range, 1, false);
        coming.retain(|&(_, word, _)| word != missing);
        machine.coming.replace(coming);
        assert_eq!(machine.copy(range), Err(TimedOut { row: 0 }));
        // Tiles that arrived before it were taken.
        let taken = 4 * ((missing - 1) / DEPTH * DEPTH) as u32;
        let taken = ByteRange {
            start: 4,
            end: 4 + taken,
        };
        machine.assert_row(OUTPUT, taken, UNTOUCHED, |word| value(0, word as usize));
        assert_eq!(
            machine.rearmed.get(),
            (taken.end - taken.start) as usize / 4
        );
    }
}

#[test]
fn the_row_that_does_not_come_is_named() {
    let range = ByteRange { start: 0, end: 12 };
    for (missing, polls_all) in (0..ROWS).flat_map(|row| [(row, false), (row, true)]) {
        for word in 0..3 {
            let machine = Machine::new();
            let mut coming = words_in(range, ROWS, true);
            coming.retain(|&(row, at, _)| (row, at) != (missing, word));
            machine.coming.replace(coming);
            let row = missing as u32;
            assert_eq!(machine.sum(range, ROWS, polls_all), Err(TimedOut { row }));
        }
    }
}

#[test]
fn of_a_long_row_the_last_vector_of_each_tile_is_polled_until_it_is_there() {
    let machine = Machine::new();
    let range = ByteRange { start: 0, end: 16 };
    machine.coming.replace(words_in(range, 1, false));
    assert_eq!(machine.copy(range), Ok(()));
    use Event::{Tile, Vector, Waited};
    let wanted = [
        // Words 0, 1 and 2 arrive, one after each moment.
        vec![Tile(0, 0)],
        vec![
            Waited,
            Vector(0, 2),
            Waited,
            Vector(0, 2),
            Waited,
            Vector(0, 2),
        ],
        vec![Tile(0, 0)],
        // Word 3 is a tile of its own.
        vec![Tile(0, 3), Waited, Vector(0, 3), Tile(0, 3)],
    ];
    assert_eq!(machine.events(), wanted.concat());
}

#[test]
fn of_a_short_row_all_is_polled() {
    let machine = Machine::new();
    let range = ByteRange { start: 4, end: 12 };
    machine.coming.replace(words_in(range, 1, true));
    assert_eq!(machine.copy(range), Ok(()));
    use Event::{Tile, Waited};
    let wanted = [Tile(0, 1), Waited, Tile(0, 1), Waited, Tile(0, 1)];
    assert_eq!(machine.events(), wanted);
}

#[test]
fn of_rows_that_are_summed_one_vector_of_the_first_that_is_missing_is_polled() {
    let machine = Machine::new();
    let range = ByteRange {
        start: 0,
        end: 4 * SUM_DEPTH as u32,
    };
    machine.rows.borrow_mut()[0][..2].copy_from_slice(&[1, 2]);
    machine.coming.replace(vec![(1, 1, 20), (1, 0, 10)]);
    assert_eq!(machine.sum(range, 2, false), Ok(()));
    use Event::{Tile, Vector, Waited};
    // If a group has fewer rows, its last one is loaded again.
    let group = vec![Tile(0, 0), Tile(1, 0), Tile(1, 0), Tile(1, 0)];
    let polls = vec![Vector(1, 0), Waited, Vector(1, 0), Waited, Vector(1, 0)];
    machine
        .coming
        .replace(vec![(1, 1, 20), (1, 0, 10), (2, 0, 0)]);
    assert_eq!(machine.events(), [group.clone(), polls, group].concat());
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "bytes 2..6 from 2 are not whole vectors of 4")]
fn bytes_that_are_no_whole_vectors_are_refused() {
    let _ = Machine::new().copy(ByteRange { start: 2, end: 6 });
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "bytes 0..48 leave their row")]
fn bytes_outside_the_row_are_refused() {
    let machine = Machine::new();
    let _ = machine.sum(ByteRange { start: 0, end: 48 }, 1, true);
}
