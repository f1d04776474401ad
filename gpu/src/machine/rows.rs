//! Rows on their way through a warp's registers: copied, summed, and waited for where they are bare.

use ferry_layout::{Arguments, ByteOffset, RowGroup, SENTINEL, Tensor, avoid_sentinel};
#[cfg(target_feature = "sm_90")]
use ferry_layout::{PIPELINE_BYTES, PIPELINE_STAGES};
use ferry_protocol::{Bits, ByteRange, Machine, Row};

use super::Gpu;
use super::tile;
use crate::ptx::memory::Vector;
#[cfg(target_feature = "sm_90")]
use crate::ptx::pipeline::{self, Pipeline};
use crate::ptx::thread;

/// So many vectors of a bare row a lane looks at all the time rather than at the last one first.
/// measured: T-061, H200
const FEW_VECTORS: u32 = 2;

/// Vectors of a lane that are few enough to be handled apart: of those that there are not, nothing is done.
/// measured: T-083, H200
const SHORT: usize = 2;

/// Whether peers may be writing a row while it is read.
#[inline(always)]
fn arrives(row: Row) -> bool {
    matches!(row, Row::Window(..) | Row::Inline(..))
}

impl<A: Arguments, const SHMEM: bool> Gpu<'_, A, SHMEM> {
    /// [`Machine::read_ahead`].
    #[inline(always)]
    pub fn first_tile<const DEPTH: usize>(&self, range: ByteRange, from: Row) -> [Vector; DEPTH] {
        let start = range.start + self.lane * size_of::<Vector>() as u32;
        self.load_tile((self.row(from), start, range), from)
    }

    /// A strip of a row that is copied: as many vectors as there are, or a few, or none.
    #[inline(always)]
    fn load_tile<const DEPTH: usize>(
        &self,
        (source, start, range): (u64, u32, ByteRange),
        from: Row,
    ) -> [Vector; DEPTH] {
        let mut tile = [[0; 4]; DEPTH];
        // The same for all lanes.
        let left = range.end + self.lane * size_of::<Vector>() as u32 - start;
        // SAFETY: the protocol copies whole rows, with the span's bytes on both sides.
        unsafe {
            if left > SHORT as u32 * tile::WARP_BYTES {
                tile = tile::load_again(source, start, range.end, arrives(from));
            } else if left > 0 {
                let small_batch =
                    tile::load_again::<SHORT>(source, start, range.end, arrives(from));
                tile[..SHORT].copy_from_slice(&small_batch);
            }
        }
        tile
    }

    /// [`Machine::copy_row`], `DEPTH` vectors a lane at a time.
    #[inline(always)]
    pub fn copy_tiles<const DEPTH: usize>(
        &self,
        (range, from): (ByteRange, Row),
        ahead: [Vector; DEPTH],
        targets: impl Bits,
        to: impl Fn(u32) -> Row,
    ) -> bool {
        let (source, mut tile) = (self.row(from), ahead);
        let mut start = range.start + self.lane * size_of::<Vector>() as u32;
        let lane_end = range.end + self.lane * size_of::<Vector>() as u32;
        loop {
            let at = (source, start, range);
            // How much is left is the same for all lanes, here and below.
            let passed = match lane_end - start <= SHORT as u32 * tile::WARP_BYTES {
                true => {
                    let tile: [Vector; SHORT] = core::array::from_fn(|index| tile[index]);
                    self.pass_tile(from, at, tile, (targets, &to))
                }
                false => self.pass_tile(from, at, tile, (targets, &to)),
            };
            if !passed {
                return false;
            }
            start += DEPTH as u32 * tile::WARP_BYTES;
            if start >= lane_end {
                return true;
            }
            tile = self.load_tile((source, start, range), from);
        }
    }

    /// Waits for the words of a strip, if it is of a bare row, and stores it. False where this launch should give up.
    #[inline(always)]
    fn pass_tile<const DEPTH: usize>(
        &self,
        from: Row,
        (source, start, range): (u64, u32, ByteRange),
        mut tile: [Vector; DEPTH],
        (mut targets, to): (impl Bits, &impl Fn(u32) -> Row),
    ) -> bool {
        if let Row::Inline(..) = from {
            while thread::union((tile::largest_word(&tile) == SENTINEL) as u32) != 0 {
                let gives_up = match range.end - range.start > FEW_VECTORS * tile::WARP_BYTES {
                    true => !self.wait_for_last::<DEPTH>(source, start, range.end),
                    false => self.timed_out(),
                };
                if gives_up {
                    return false;
                }
                // SAFETY: the protocol copies whole rows, with the span's bytes on both sides.
                tile = unsafe { tile::load_again(source, start, range.end, true) };
            }
            // SAFETY: as above.
            unsafe { tile::store(source, start, range.end, &[[SENTINEL; 4]; DEPTH]) };
        }
        let is_input = matches!(from, Row::Tensor(Tensor::Input, _));
        if is_input {
            tile = tile.map(|vector| vector.map(avoid_sentinel));
        }
        while let Some(target) = targets.take_lowest() {
            let target = self.row(to(target));
            // SAFETY: as above.
            unsafe {
                match is_input {
                    true => tile::store_polled(target, start, range.end, &tile),
                    false => tile::store(target, start, range.end, &tile),
                }
            }
        }
        true
    }

    /// Waits for the last vectors of a strip of a bare row, which are sent last: to look at all of them
    /// again and again would be in the way of those that come. False where this launch should give up.
    #[inline(always)]
    fn wait_for_last<const DEPTH: usize>(&self, row: u64, start: u32, end: u32) -> bool {
        let tile_start = start - self.lane * size_of::<Vector>() as u32;
        let vectors = (end - tile_start).div_ceil(tile::WARP_BYTES);
        let last = start + (vectors.min(DEPTH as u32) - 1) * tile::WARP_BYTES;
        loop {
            // Also where it is there: others may never come.
            if self.timed_out() {
                return false;
            }
            // SAFETY: the caller's row has `end` bytes.
            let vector = unsafe { tile::load_arriving(row, last, end) };
            let is_sentinel = tile::largest_word(&[vector]) == SENTINEL;
            if thread::union(is_sentinel as u32) == 0 {
                return true;
            }
        }
    }

    /// [`Machine::sum_rows`], `DEPTH` vectors a lane at a time.
    #[inline(always)]
    pub fn sum_tiles<const DEPTH: usize>(
        &self,
        range: ByteRange,
        sources: u32,
        from: impl Fn(u32) -> (Row, f32),
        to: Row,
    ) {
        // The next row is on its way while this one is added, which takes registers: for sm_80 the
        // assembler finds too few.
        let loads_ahead = !matches!(to, Row::Tensor(..)) && cfg!(target_feature = "sm_90");
        let target = self.row(to);
        let lane_start = self.lane * size_of::<Vector>() as u32;
        let mut tile_start = range.start;
        while tile_start < range.end {
            let start = tile_start + lane_start;
            let load = |sources: u32| {
                if sources == 0 {
                    return [[0; 4]; DEPTH];
                }
                let (row, _) = from(sources.trailing_zeros());
                // SAFETY: the protocol sums whole rows, with the span's bytes on both sides.
                unsafe { tile::load::<DEPTH>(self.row(row), start, range.end) }
            };
            let mut sums = [[0f32; 8]; DEPTH];
            let mut left = sources;
            let mut ahead = [[0; 4]; DEPTH];
            if loads_ahead {
                ahead = load(left);
            }
            while left != 0 {
                let (_, weight) = from(left.trailing_zeros());
                let mut tile = ahead;
                if !loads_ahead {
                    tile = load(left);
                }
                left &= left - 1;
                if loads_ahead {
                    ahead = load(left);
                }
                sums = core::array::from_fn(|i| tile::add(sums[i], tile[i], weight));
            }
            let tile = core::array::from_fn(|index| tile::round(&sums[index]));
            // SAFETY: as above.
            unsafe { tile::store_polled::<DEPTH>(target, start, range.end, &tile) };
            tile_start += DEPTH as u32 * tile::WARP_BYTES;
        }
    }
}

#[cfg(target_feature = "sm_90")]
impl<A: Arguments, const SHMEM: bool> Gpu<'_, A, SHMEM> {
    /// [`Machine::sum_rows`] of rows that go through the ring.
    #[inline(always)]
    pub fn sum_through_pipeline(
        &self,
        of: (ByteRange, u32),
        from: impl Fn(u32) -> (Row, f32),
        to: Row,
    ) {
        const DEPTH: usize = (PIPELINE_BYTES / PIPELINE_STAGES / tile::WARP_BYTES) as usize;
        match of.0.end - of.0.start <= SHORT as u32 * tile::WARP_BYTES {
            true => self.sum_slots::<SHORT>(of, &from, to),
            false => self.sum_slots::<DEPTH>(of, &from, to),
        }
    }

    /// [`sum_through_pipeline`](Self::sum_through_ring), `DEPTH` of a row's vectors a lane at a time, which a slot holds.
    #[inline(always)]
    fn sum_slots<const DEPTH: usize>(
        &self,
        (range, sources): (ByteRange, u32),
        from: &impl Fn(u32) -> (Row, f32),
        to: Row,
    ) {
        let tile_bytes = DEPTH as u32 * tile::WARP_BYTES;
        let (pipeline, target) = (Pipeline::of_lane(), self.row(to));
        let lane_start = self.lane * size_of::<Vector>() as u32;
        let next = |slot: u32| (slot + 1) % PIPELINE_STAGES;
        let (mut ahead_start, mut ahead, mut ahead_slot) = (range.start, sources, 0);
        // Begins to load what comes next, if anything. Gives the slot that is read next: the one after.
        let mut load = || {
            if ahead != 0 && ahead_start < range.end {
                let (row, _) = from(ahead.trailing_zeros());
                let start = ahead_start + lane_start;
                // SAFETY: the protocol sums whole rows, with the span's bytes on both sides. This lane alone reads and
                // writes its part of the slot, and has read it in program order before: CUDA's own pipelines of one
                // thread (libcu++, `pipeline<thread_scope_thread>`) reuse a stage with nothing in between either.
                unsafe { pipeline.load::<DEPTH>(ahead_slot, self.row(row), start, range.end) };
                ahead &= ahead - 1;
                if ahead == 0 {
                    ahead = sources;
                    ahead_start += tile_bytes;
                }
            }
            ahead_slot = next(ahead_slot);
            pipeline::commit();
            ahead_slot
        };
        for _ in 1..PIPELINE_STAGES {
            load();
        }
        let mut tile_start = range.start;
        while tile_start < range.end {
            let mut sums = [[0f32; 8]; DEPTH];
            let mut left = sources;
            while left != 0 {
                let slot = load();
                pipeline::wait_for_all_but::<{ PIPELINE_STAGES - 1 }>();
                let tile = pipeline.read::<DEPTH>(slot);
                let (_, weight) = from(left.trailing_zeros());
                left &= left - 1;
                sums = core::array::from_fn(|i| tile::add(sums[i], tile[i], weight));
            }
            let tile = core::array::from_fn(|index| tile::round(&sums[index]));
            let start = tile_start + lane_start;
            // SAFETY: as above.
            unsafe { tile::store_polled::<DEPTH>(target, start, range.end, &tile) };
            tile_start += tile_bytes;
        }
    }
}

/// Vectors of a bare row that a lane has in flight.
/// measured: T-004, H200
pub const INLINE_DEPTH: usize = 2;

impl<A: Arguments, const SHMEM: bool> Gpu<'_, A, SHMEM> {
    /// Waits for a vector a lane of a bare row. False where this launch should give up.
    #[inline(always)]
    fn wait_for_vector(&self, row: u64, start: u32, end: u32) -> bool {
        loop {
            // SAFETY: the caller's row has `end` bytes.
            let vector = unsafe { tile::load_arriving(row, start, end) };
            let is_sentinel = tile::largest_word(&[vector]) == SENTINEL;
            if thread::union(is_sentinel as u32) == 0 {
                return true;
            }
            if self.timed_out() {
                return false;
            }
        }
    }

    /// A strip of [`Machine::sum_inline_rows`].
    #[inline(always)]
    pub fn sum_inline_tile(
        &self,
        (tile_start, end): (u32, u32),
        (sources, small_batch): (u32, bool),
        from: impl Fn(u32) -> ByteOffset,
        to: Row,
    ) -> Result<(), u32> {
        let start = tile_start + self.lane * size_of::<Vector>() as u32;
        let own = self.window(self.common().rank());
        let mut sums = [[0f32; 8]; INLINE_DEPTH];
        const { assert!(RowGroup::SIZE == 4) };
        let mut group = RowGroup::first_of(sources);
        while group.is_some() {
            let row = |index: u32| own + from(group.row(index)).bytes();
            // Where there are fewer, the last one again: loads that may not take place would be made one
            // after the other.
            // SAFETY: the protocol sums whole rows, with the span's bytes on both sides.
            let load = |index: u32| unsafe {
                tile::load_again::<INLINE_DEPTH>(row(index), start, end, true)
            };
            let rows = loop {
                // Spelled out, so that they stay in registers.
                let rows = [load(0), load(1), load(2), load(3)];
                let is_sentinel =
                    |index: usize| ((tile::largest_word(&rows[index]) == SENTINEL) as u32) << index;
                let absent = is_sentinel(0) | is_sentinel(1) | is_sentinel(2) | is_sentinel(3);
                let absent = thread::union(absent);
                if absent == 0 {
                    break rows;
                }
                // One vector of one of them, until it is there: to look at all again and again would be
                // in the way of those that come.
                let missing = absent.trailing_zeros();
                if !small_batch && !self.wait_for_vector(row(missing), start, end) {
                    return Err(group.row(missing));
                }
                // Its other vectors may never come.
                if self.timed_out() {
                    return Err(group.row(missing));
                }
            };
            let mut take = |index: u32| {
                if group.has(index) {
                    let of_row = &rows[index as usize];
                    sums = core::array::from_fn(|i| tile::add(sums[i], of_row[i], 1.0));
                    // SAFETY: as above.
                    unsafe { tile::store(row(index), start, end, &[[SENTINEL; 4]; INLINE_DEPTH]) };
                }
            };
            take(0);
            take(1);
            take(2);
            take(3);
            group = group.next();
        }
        let sums = core::array::from_fn(|index| tile::round(&sums[index]));
        // SAFETY: as above.
        unsafe { tile::store::<INLINE_DEPTH>(self.row(to), start, end, &sums) };
        Ok(())
    }
}
