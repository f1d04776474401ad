//! Tokens that are loaded through the warp's pipeline, before their destinations are known.

use ferry_layout::{Arguments, PIPELINE_BYTES, Tensor, TokenFormat, avoid_sentinel};
use ferry_protocol::{Bits, ByteRange, OutputRow, Row, Tiles, TokenPart};

use super::{Gpu, tile};
use crate::elements::{Elements, LANE_ELEMENTS, TILE_ELEMENTS};
use crate::ptx::memory::{Vector, WARP_BYTES};
use crate::ptx::pipeline::{self, Pipeline};
use crate::ptx::thread;

/// Vectors of a lane in a tile, which it encodes at a time.
const DEPTH: usize = 2;
/// Bytes of a tile.
const TILE_BYTES: u32 = DEPTH as u32 * WARP_BYTES;
/// Tiles that fit in the pipeline.
const SLOTS: u32 = PIPELINE_BYTES / TILE_BYTES;

const _: () = assert!(
    TILE_BYTES == 2 * TILE_ELEMENTS && LANE_ELEMENTS as usize * 2 == DEPTH * size_of::<Vector>(),
    "what a lane encodes at a time"
);

/// Tiles in flight in addition to the one that is awaited.
const AHEAD: u32 = SLOTS - 1;

/// Addresses of bytes of the input.
#[derive(Clone, Copy)]
struct AddressRange {
    start: u64,
    end: u64,
}

impl AddressRange {
    /// No bytes.
    const NONE: Self = Self { start: 0, end: 0 };
}

/// Bytes of the input that go through the pipeline, and those that follow them.
struct Stream {
    pipeline: Pipeline<SLOTS>,
    /// This lane.
    lane: u32,
    /// The slot of the next tile.
    slot: u32,
    /// Bytes that are still to be loaded.
    left: AddressRange,
    /// Bytes to load after those.
    next: AddressRange,
}

impl Stream {
    /// Begins to load a tile of the remaining bytes, if there are any.
    ///
    /// # Safety
    /// The addresses are of the input, and all lanes have read the slot's earlier contents.
    #[inline(always)]
    unsafe fn load(&mut self, slot: u32) {
        // SAFETY: addresses of the input, into a slot that all lanes have read: documented above.
        unsafe {
            self.pipeline
                .load_addresses::<DEPTH>(slot, self.left.start, self.left.end, self.lane)
        };
        pipeline::commit();
        self.left.start += TILE_BYTES as u64;
        if self.left.start >= self.left.end {
            self.left = self.next;
            self.next = AddressRange::NONE;
        }
    }

    /// Begins to load as many tiles as may be in flight. All lanes.
    ///
    /// # Safety
    /// The addresses are of the input, and nothing is in flight.
    #[inline(always)]
    unsafe fn begin(&mut self) {
        // All lanes have read the slots' earlier contents.
        thread::converge();
        for slot in 0..AHEAD {
            // SAFETY: addresses of the input (documented above), into slots that all lanes have read.
            unsafe { self.load(slot) };
        }
    }

    /// Waits for the next tile, and begins to load another. Returns the tile's slot. All lanes.
    ///
    /// # Safety
    /// The addresses are of the input.
    #[inline(always)]
    unsafe fn next(&mut self) -> u32 {
        let slot = self.slot;
        // All lanes have read the slot before this one.
        thread::converge();
        // SAFETY: addresses of the input (documented above), into a slot that all lanes have read.
        unsafe { self.load((slot + AHEAD) % SLOTS) };
        pipeline::wait_for_all_but::<AHEAD>();
        // Lanes read vectors that other lanes loaded.
        thread::converge();
        self.slot = (slot + 1) % SLOTS;
        slot
    }
}

impl Elements for &mut Stream {
    /// Does nothing: the loads began with the token.
    #[inline(always)]
    unsafe fn begin(&mut self, _tile: u32, _end: u32) {}

    #[inline(always)]
    unsafe fn take(&mut self, _tile: u32, _end: u32) -> [Vector; 2] {
        // SAFETY: the addresses of a stream are of the input: `write_stream` made them.
        let slot = unsafe { self.next() };
        self.pipeline.read_pair(slot, self.lane)
    }
}

impl<A: Arguments, const SHMEM: bool> Gpu<'_, A, SHMEM> {
    /// Whether tokens of a format go through the pipeline: not if they are read twice.
    #[inline(always)]
    pub fn streams(format: TokenFormat) -> bool {
        !matches!(format, TokenFormat::Nvfp4RowScaled(_))
    }

    /// Addresses of the elements of a part of a token's payload.
    #[inline(always)]
    fn addresses(&self, format: TokenFormat, part: TokenPart) -> AddressRange {
        let TokenPart { token, range } = part;
        let row = self.row(Row::Tensor(Tensor::Input, token));
        let at = |payload: u32| match format {
            TokenFormat::Bf16 => row + payload as u64,
            _ => row + (payload * (16 / format.sizes().element_bits)) as u64,
        };
        AddressRange {
            start: at(range.start),
            end: at(range.end),
        }
    }

    /// [`Machine::load_token`](ferry_protocol::Machine::load_token) through the pipeline.
    #[inline(always)]
    pub fn begin_stream(&self, format: TokenFormat, part: TokenPart) {
        let mut stream = Stream {
            pipeline: Pipeline::of_lane(),
            lane: self.lane,
            slot: 0,
            left: self.addresses(format, part),
            next: AddressRange::NONE,
        };
        // SAFETY: the protocol loads whole tokens.
        unsafe { stream.begin() };
        self.slot.set(0);
    }

    /// [`Machine::write_loaded`](ferry_protocol::Machine::write_loaded) of a token that comes through the
    /// pipeline.
    #[inline(always)]
    pub fn write_stream(
        &self,
        format: TokenFormat,
        part: TokenPart,
        next: Option<TokenPart>,
        stride: u64,
        targets: u32,
        to: impl Fn(u32) -> OutputRow,
    ) {
        let range_of_part = self.addresses(format, part);
        let begun = AddressRange {
            start: range_of_part.start + (AHEAD * TILE_BYTES) as u64,
            end: range_of_part.end,
        };
        // The loads after a short part would take slots out of turn.
        let is_long = begun.start <= begun.end;
        let next_range = match next {
            Some(next) if is_long => self.addresses(format, next),
            _ => AddressRange::NONE,
        };
        let (left, next_range) = match begun.start < begun.end {
            true => (begun, next_range),
            false => (next_range, AddressRange::NONE),
        };
        let mut stream = Stream {
            pipeline: Pipeline::of_lane(),
            lane: self.lane,
            slot: self.slot.get(),
            left,
            next: next_range,
        };
        let TokenPart { token, range } = part;
        match format {
            TokenFormat::Bf16 => self.copy_stream(&mut stream, range, targets, to),
            _ => self.encode_elements(range, token, &mut stream, targets as u64, |index| {
                self.output_target(to(index), stride)
            }),
        }
        self.slot.set(stream.slot);
        if let (false, Some(next)) = (is_long, next) {
            self.begin_stream(format, next);
        }
    }

    /// Copies a byte range of BF16 to all of its rows.
    #[inline(always)]
    fn copy_stream(
        &self,
        stream: &mut Stream,
        range: ByteRange,
        targets: u32,
        to: impl Fn(u32) -> OutputRow,
    ) {
        let mut tile_start = range.start;
        while tile_start < range.end {
            // SAFETY: the protocol loads whole tokens.
            let slot = unsafe { stream.next() };
            let tile = stream.pipeline.read::<DEPTH>(slot);
            let tile = tile.map(|vector| vector.map(avoid_sentinel));
            let mut left = targets;
            while let Some(target) = left.take_lowest() {
                let row = self.row(Row::Tensor(Tensor::Output, to(target).row));
                let start = tile_start + self.lane_start();
                // SAFETY: the rows have the range's bytes.
                unsafe { tile::store(row, start, range.end, &tile) };
            }
            tile_start += TILE_BYTES;
        }
    }
}
