//! Rows that pass through a warp's registers.

use ferry_layout::{Arguments, ByteOffset, SENTINEL};
#[cfg(ferry_sm = "90")]
use ferry_layout::{PIPELINE_BYTES, PIPELINE_STAGES};
#[cfg(ferry_sm = "90")]
use ferry_protocol::Rounding;
use ferry_protocol::{ByteRange, Finish, Row, Tiles};

use super::Gpu;
use super::tile;
use crate::ptx::memory::{self, Vector, WARP_BYTES};
#[cfg(ferry_sm = "90")]
use crate::ptx::pipeline::{self, Pipeline};
use crate::ptx::thread;

/// Byte ranges of at most this many vectors a lane take a path of this depth, without instructions for
/// vectors that they do not have.
#[cfg(ferry_sm = "90")]
const SHORT: usize = 2;

impl<A: Arguments, const SHMEM: bool> Tiles for Gpu<'_, A, SHMEM> {
    type Address = u64;
    type Vector = Vector;
    type Sums = [f32; 8];
    const VECTOR_BYTES: u32 = size_of::<Vector>() as u32;
    const WARP_BYTES: u32 = WARP_BYTES;
    const SENTINELS: Vector = [SENTINEL; 4];

    #[inline(always)]
    fn row(&self, row: Row) -> u64 {
        match row {
            // Not from shared memory, whose reads would queue behind the rows' stores: the table is in the L1
            // cache since the block was set up.
            Row::Window(rank, at) | Row::Inline(rank, at) => {
                let window = self.common().peers + 8 * rank.0 as u64;
                // SAFETY: the table of peers has an entry for every rank and stays as it is.
                unsafe { memory::load_constant_u64(window) + at.bytes() }
            }
            Row::Tensor(tensor, index) => {
                let stride = self.args.row_stride(tensor) as u64;
                self.args.tensor(tensor) + index as u64 * stride
            }
        }
    }

    #[inline(always)]
    fn own_row(&self, at: ByteOffset) -> u64 {
        self.window(self.common().rank()) + at.bytes()
    }

    #[inline(always)]
    fn load_tile<const DEPTH: usize>(
        &self,
        row: u64,
        start: u32,
        end: u32,
        arrives: bool,
    ) -> [Vector; DEPTH] {
        // SAFETY: the protocol moves whole rows, with the span's bytes on both sides.
        unsafe { tile::load_again(row, start + self.lane_start(), end, arrives) }
    }

    #[inline(always)]
    fn load_vector(&self, row: u64, start: u32, end: u32) -> Vector {
        // SAFETY: as above.
        unsafe { tile::load_arriving(row, start + self.lane_start(), end) }
    }

    #[inline(always)]
    fn store_tile<const DEPTH: usize>(
        &self,
        row: u64,
        start: u32,
        end: u32,
        tile: &[Vector; DEPTH],
    ) {
        // SAFETY: as above.
        unsafe { tile::store(row, start + self.lane_start(), end, tile) };
    }

    #[inline(always)]
    fn store_polled<const DEPTH: usize>(
        &self,
        row: u64,
        start: u32,
        end: u32,
        tile: &[Vector; DEPTH],
    ) {
        // SAFETY: as above.
        unsafe { tile::store_polled(row, start + self.lane_start(), end, tile) };
    }

    #[inline(always)]
    fn incomplete<const TILES: usize, const DEPTH: usize>(
        &self,
        tiles: [&[Vector; DEPTH]; TILES],
    ) -> u32 {
        let mut of_lane = 0;
        for (index, tile) in tiles.iter().enumerate() {
            of_lane |= ((tile::largest_word(tile) == SENTINEL) as u32) << index;
        }
        thread::union(of_lane)
    }

    #[inline(always)]
    fn avoid_sentinel(&self, vector: Vector) -> Vector {
        let all_ones = self.args.all_ones_of_input();
        vector.map(|word| if word < SENTINEL { word } else { all_ones })
    }

    #[inline(always)]
    fn add_bf16(&self, sums: [f32; 8], vector: Vector) -> [f32; 8] {
        tile::add(sums, vector, 1.0)
    }

    #[inline(always)]
    fn round_to_bf16(&self, sums: [f32; 8]) -> Vector {
        tile::round(&sums)
    }
}

impl<A: Arguments, const SHMEM: bool> Gpu<'_, A, SHMEM> {
    /// Bytes from the start of a tile to this lane's first vector.
    #[inline(always)]
    pub(super) fn lane_start(&self) -> u32 {
        self.lane * size_of::<Vector>() as u32
    }

    /// Stores the sums of a tile with `finish`. Peers may be waiting for them if they are only rounded to
    /// BF16.
    #[inline(always)]
    fn store_finished<const DEPTH: usize>(
        &self,
        to: Row,
        target: u64,
        tile_start: u32,
        end: u32,
        sums: [[f32; 8]; DEPTH],
        finish: &impl Finish<Self>,
    ) {
        if !finish.is_rounding() {
            return finish.store(self, to, tile_start, end, sums);
        }
        let tile = core::array::from_fn(|index| tile::round(&sums[index]));
        let start = tile_start + self.lane_start();
        // SAFETY: the protocol sums whole rows, with the span's bytes on both sides.
        unsafe { tile::store_polled::<DEPTH>(target, start, end, &tile) };
    }

    /// [`Machine::sum_rows`](ferry_protocol::Machine::sum_rows), `DEPTH` vectors a lane at a time.
    #[inline(always)]
    pub fn sum_tiles<const DEPTH: usize>(
        &self,
        range: ByteRange,
        sources: u32,
        from: impl Fn(u32) -> (Row, f32),
        to: Row,
        finish: impl Finish<Self>,
    ) {
        // The next row is loaded while this one is added, which takes registers: for sm_80 the assembler
        // finds too few.
        let loads_ahead = !matches!(to, Row::Tensor(..)) && cfg!(ferry_sm = "90");
        let target = self.row(to);
        let lane_start = self.lane_start();
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
            let mut sums: [[f32; 8]; DEPTH] = finish.begin(self, tile_start, range.end);
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
            self.store_finished(to, target, tile_start, range.end, sums, &finish);
            tile_start += DEPTH as u32 * WARP_BYTES;
        }
    }
}

#[cfg(ferry_sm = "90")]
impl<A: Arguments, const SHMEM: bool> Gpu<'_, A, SHMEM> {
    /// [`Machine::sum_rows`](ferry_protocol::Machine::sum_rows) of rows that go through the pipeline.
    #[inline(always)]
    pub fn sum_through_pipeline(
        &self,
        range: ByteRange,
        sources: u32,
        from: impl Fn(u32) -> (Row, f32),
        to: Row,
        finish: impl Finish<Self>,
    ) {
        const DEPTH: usize = (PIPELINE_BYTES / PIPELINE_STAGES / WARP_BYTES) as usize;
        // The loads that finish sums take the registers of deeper tiles.
        let is_short = range.end - range.start <= SHORT as u32 * WARP_BYTES;
        match is_short || !finish.is_rounding() {
            true => self.sum_slots::<SHORT>(range, sources, &from, to, &finish),
            false => self.sum_slots::<DEPTH>(range, sources, &from, to, &Rounding),
        }
    }

    /// [`sum_through_pipeline`](Self::sum_through_pipeline), `DEPTH` of a row's vectors a lane at a time,
    /// which fit in a slot.
    #[inline(always)]
    fn sum_slots<const DEPTH: usize>(
        &self,
        range: ByteRange,
        sources: u32,
        from: &impl Fn(u32) -> (Row, f32),
        to: Row,
        finish: &impl Finish<Self>,
    ) {
        let tile_bytes = DEPTH as u32 * WARP_BYTES;
        let (pipeline, target) = (Pipeline::<PIPELINE_STAGES>::of_lane(), self.row(to));
        let lane_start = self.lane_start();
        let next = |slot: u32| (slot + 1) % PIPELINE_STAGES;
        let (mut ahead_start, mut ahead, mut ahead_slot) = (range.start, sources, 0);
        // Begins to load the next tile, if any. Returns the slot that is read next: the one after.
        let mut load = || {
            if ahead != 0 && ahead_start < range.end {
                let (row, _) = from(ahead.trailing_zeros());
                let start = ahead_start + lane_start;
                // SAFETY: the protocol sums whole rows, with the span's bytes on both sides. Only this lane
                // reads and writes its part of the slot, and it has read it earlier in program order: CUDA's
                // own pipelines of one thread (libcu++, `pipeline<thread_scope_thread>`) reuse a stage with
                // nothing in between either.
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
            let mut sums: [[f32; 8]; DEPTH] = finish.begin(self, tile_start, range.end);
            let mut left = sources;
            while left != 0 {
                let slot = load();
                pipeline::wait_for_all_but::<{ PIPELINE_STAGES - 1 }>();
                let tile = pipeline.read::<DEPTH>(slot);
                let (_, weight) = from(left.trailing_zeros());
                left &= left - 1;
                sums = core::array::from_fn(|i| tile::add(sums[i], tile[i], weight));
            }
            self.store_finished(to, target, tile_start, range.end, sums, finish);
            tile_start += tile_bytes;
        }
    }
}
