//! Inline flags: a row in which each word is its own flag.
//!
//! ```text
//! before:    each word of the row is the sentinel
//! sender:    write the words, none of which is the sentinel ; no fence, no flag   (copy)
//! receiver:  load until no word is the sentinel ; re-arm: store the sentinel      (copy, sum)
//! ```
//!
//! [`copy`] also copies rows without inline flags, without waiting.
//!
//! Only one warp takes a word. It re-arms words only after it holds all of them, and before the
//! [`credit`](crate::wire::credit) lets their sender write them again.

use ferry_layout::{ByteOffset, RowGroup, Tensor};

use crate::machine::deadline::Deadline;
use crate::machine::finishing::Finish;
use crate::machine::miss::TimedOut;
use crate::machine::rows::{Bits, ByteRange, Row};
use crate::machine::tile::{Tiles, debug_assert_is_inside};

use core::array::from_fn;

/// Vectors of a lane in a short tile. The rest of a byte range is one such tile if it fits, so that no
/// instruction is spent on vectors past the range.
const SHORT: usize = 2;
/// Most vectors of a lane that are all polled at once. Of more, the last ones are polled first.
const POLLED_AT_ONCE: u32 = 2;
/// Vectors of a lane in a tile that is summed.
pub const SUM_DEPTH: usize = 2;

/// Loads the first tile of a byte range of a row, with which [`copy`] begins.
#[inline(always)]
pub fn load_first<T: Tiles, const DEPTH: usize>(
    machine: &T,
    range: ByteRange,
    from: Row,
) -> [T::Vector; DEPTH] {
    load_rest(
        machine,
        machine.row(from),
        range.start,
        range.end,
        arrives(from),
    )
}

/// Whether peers may be writing a row while it is read.
#[inline(always)]
fn arrives(row: Row) -> bool {
    matches!(row, Row::Window(..) | Row::Inline(..))
}

/// Bytes of `DEPTH` vectors of all lanes.
#[inline(always)]
fn bytes_of<T: Tiles>(depth: usize) -> u32 {
    depth as u32 * T::WARP_BYTES
}

/// Loads a tile from byte `start` of a row: all its vectors before byte `end`, or [`SHORT`], or none.
#[inline(always)]
fn load_rest<T: Tiles, const DEPTH: usize>(
    machine: &T,
    row: T::Address,
    start: u32,
    end: u32,
    arrives: bool,
) -> [T::Vector; DEPTH] {
    const { assert!(DEPTH >= SHORT) };
    let mut tile = [T::Vector::default(); DEPTH];
    let left = end - start;
    if left > bytes_of::<T>(SHORT) {
        tile = machine.load_tile(row, start, end, arrives);
    } else if left > 0 {
        let short = machine.load_tile::<SHORT>(row, start, end, arrives);
        tile[..SHORT].copy_from_slice(&short);
    }
    tile
}

/// Copies a byte range of a row to the same range of the row `to(i)` for every `i` of `targets`, reading each
/// word once. `ahead` is the result of [`load_first`].
///
/// Words of [`Tensor::Input`] [avoid the sentinel](Tiles::avoid_sentinel). Waits for every word of a
/// row with inline flags, which is in the own window, and re-arms the row.
#[inline(always)]
pub fn copy<T: Tiles + Deadline, const DEPTH: usize>(
    machine: &T,
    range: ByteRange,
    from: Row,
    ahead: [T::Vector; DEPTH],
    targets: impl Bits,
    to: impl Fn(u32) -> Row,
) -> Result<(), TimedOut> {
    let (source, mut tile) = (machine.row(from), ahead);
    let mut start = range.start;
    loop {
        match range.end - start <= bytes_of::<T>(SHORT) {
            true => {
                let short: [T::Vector; SHORT] = from_fn(|index| tile[index]);
                pass(machine, range, from, start, short, targets, &to)?;
            }
            false => pass(machine, range, from, start, tile, targets, &to)?,
        }
        start += bytes_of::<T>(DEPTH);
        if start >= range.end {
            return Ok(());
        }
        tile = load_rest(machine, source, start, range.end, arrives(from));
    }
}

/// Takes a tile, if its row has inline flags, and stores it to the targets.
#[inline(always)]
fn pass<T: Tiles + Deadline, const DEPTH: usize>(
    machine: &T,
    range: ByteRange,
    from: Row,
    start: u32,
    mut tile: [T::Vector; DEPTH],
    mut targets: impl Bits,
    to: &impl Fn(u32) -> Row,
) -> Result<(), TimedOut> {
    debug_assert_is_inside(machine, machine.row(from), start, range);
    if matches!(from, Row::Inline(..)) {
        take(machine, machine.row(from), start, range, &mut tile)?;
    }
    let is_input = matches!(from, Row::Tensor(Tensor::Input, _));
    if is_input {
        for vector in &mut tile {
            *vector = machine.avoid_sentinel(*vector);
        }
    }
    while let Some(target) = targets.take_lowest() {
        let target = machine.row(to(target));
        debug_assert_is_inside(machine, target, start, range);
        match is_input {
            true => machine.store_polled(target, start, range.end, &tile),
            false => machine.store_tile(target, start, range.end, &tile),
        }
    }
    Ok(())
}

/// Polls a tile until all its words have arrived, and then re-arms it in its row. `tile` holds the result of
/// the first load.
#[inline(always)]
fn take<T: Tiles + Deadline, const DEPTH: usize>(
    machine: &T,
    row: T::Address,
    start: u32,
    range: ByteRange,
    tile: &mut [T::Vector; DEPTH],
) -> Result<(), TimedOut> {
    while machine.incomplete([tile]) != 0 {
        if range.end - range.start > POLLED_AT_ONCE * T::WARP_BYTES {
            wait_for_last::<T, DEPTH>(machine, row, start, range.end)?;
        } else if machine.timed_out() {
            return Err(TimedOut { row: 0 });
        }
        *tile = machine.load_tile(row, start, range.end, true);
    }
    machine.store_tile(row, start, range.end, &[T::SENTINELS; DEPTH]);
    Ok(())
}

/// Polls the last vectors of a tile, which are sent last: polling all of them would slow down the vectors
/// that arrive.
#[inline(always)]
fn wait_for_last<T: Tiles + Deadline, const DEPTH: usize>(
    machine: &T,
    row: T::Address,
    start: u32,
    end: u32,
) -> Result<(), TimedOut> {
    let vectors = (end - start).div_ceil(T::WARP_BYTES);
    let last = start + (vectors.min(DEPTH as u32) - 1) * T::WARP_BYTES;
    loop {
        // Checks the deadline even if these vectors have arrived; the rest of the tile may not.
        if machine.timed_out() {
            return Err(TimedOut { row: 0 });
        }
        if machine.incomplete([&[machine.load_vector(row, last, end)]]) == 0 {
            return Ok(());
        }
    }
}

/// Sums the BF16 elements in a byte range of the rows `from(i)` of the own window, for every bit `i` of
/// `rows`, which are the lowest ones, in this order, and writes them to `to`. Starts at +0; every sum is
/// rounded to f32. `finish` converts the sums and stores them.
///
/// Waits for every word of the rows, and re-arms them. `polls_all`: whether so few warps wait that each may
/// poll all its words at once. A timeout names the first row that had not arrived.
#[inline(always)]
pub fn sum<T: Tiles + Deadline>(
    machine: &T,
    range: ByteRange,
    rows: u32,
    polls_all: bool,
    from: impl Fn(u32) -> ByteOffset,
    to: Row,
    finish: impl Finish<T>,
) -> Result<(), TimedOut> {
    let mut start = range.start;
    while start < range.end {
        let begun = finish.begin(machine, start, range.end);
        let polling = Polling { range, polls_all };
        sum_tile(machine, polling, start, rows, begun, &from, |sums| {
            if !finish.is_rounding() {
                return finish.store(machine, to, start, range.end, sums);
            }
            let (to, sums) = (machine.row(to), sums.map(|sum| machine.round_to_bf16(sum)));
            debug_assert_is_inside(machine, to, start, range);
            machine.store_tile(to, start, range.end, &sums);
        })?;
        start += bytes_of::<T>(SUM_DEPTH);
    }
    Ok(())
}

/// Way in which the rows of a [`sum`] are polled.
#[derive(Clone, Copy)]
struct Polling {
    range: ByteRange,
    polls_all: bool,
}

/// The tile of a [`sum`] that begins at byte `start`, added to `sums`.
#[inline(always)]
fn sum_tile<T: Tiles + Deadline>(
    machine: &T,
    polling: Polling,
    start: u32,
    rows: u32,
    mut sums: [T::Sums; SUM_DEPTH],
    from: impl Fn(u32) -> ByteOffset,
    store: impl FnOnce([T::Sums; SUM_DEPTH]),
) -> Result<(), TimedOut> {
    const {
        assert!(
            RowGroup::SIZE == 4,
            "as many are spelled out, so that they stay in registers"
        )
    };
    let Polling { range, polls_all } = polling;
    let mut group = RowGroup::first_of(rows);
    while group.is_some() {
        let row = |index: u32| machine.own_row(from(group.row(index)));
        let load = |index: u32| {
            debug_assert_is_inside(machine, row(index), start, range);
            machine.load_tile(row(index), start, range.end, true)
        };
        let tiles: [[T::Vector; SUM_DEPTH]; 4] = loop {
            let tiles = [load(0), load(1), load(2), load(3)];
            let incomplete = machine.incomplete(tiles.each_ref());
            if incomplete == 0 {
                break tiles;
            }
            let missing = incomplete.trailing_zeros();
            // Polls one vector of one of them until it has arrived: polling all would slow down the vectors
            // that arrive.
            let polled = match polls_all {
                true => Ok(()),
                false => wait_for_vector(machine, row(missing), start, range.end),
            };
            // Its other vectors may never arrive.
            if polled.is_err() || machine.timed_out() {
                return Err(TimedOut {
                    row: group.row(missing),
                });
            }
        };
        let mut take = |index: u32| {
            if group.has(index) {
                let tile = &tiles[index as usize];
                sums = from_fn(|vector| machine.add_bf16(sums[vector], tile[vector]));
                machine.store_tile(row(index), start, range.end, &[T::SENTINELS; SUM_DEPTH]);
            }
        };
        take(0);
        take(1);
        take(2);
        take(3);
        group = group.next();
    }
    store(sums);
    Ok(())
}

/// Polls a vector of each lane of a row.
#[inline(always)]
fn wait_for_vector<T: Tiles + Deadline>(
    machine: &T,
    row: T::Address,
    start: u32,
    end: u32,
) -> Result<(), TimedOut> {
    while machine.incomplete([&[machine.load_vector(row, start, end)]]) != 0 {
        if machine.timed_out() {
            return Err(TimedOut { row: 0 });
        }
    }
    Ok(())
}
