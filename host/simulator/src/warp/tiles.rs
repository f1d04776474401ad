//! A warp's tiles, as large as those of a GPU: a few vectors of 16 bytes for each of 32 lanes.

use ferry_layout::{Args, Arguments, ByteOffset, SENTINEL, Tensor, bf16_bits, f32_of_bf16_bits};
use ferry_protocol::{LANES, Row, Tiles};

use super::Warp;
use crate::write::Polled;

/// Words of a lane's vector.
const WORDS: usize = 4;
/// A vector of each lane.
pub type Vector = [[u32; WORDS]; LANES as usize];

/// Address and length of a row.
#[derive(Clone, Copy)]
pub struct Address {
    pub start: u64,
    bytes: u32,
    /// Whether its words may be polled.
    pub polled: Polled,
}

impl Tiles for Warp<'_> {
    type Address = Address;
    type Vector = Vector;
    type Sums = [[f32; 2 * WORDS]; LANES as usize];
    const VECTOR_BYTES: u32 = 4 * WORDS as u32;
    const WARP_BYTES: u32 = LANES * Self::VECTOR_BYTES;
    const SENTINELS: Vector = [[SENTINEL; WORDS]; LANES as usize];

    fn row(&self, row: Row) -> Address {
        let (start, bytes) = match row {
            Row::Window(rank, at) | Row::Inline(rank, at) => {
                let window = self.mapped_window(rank);
                let start = self.within(window, window + at.bytes());
                (start, self.window_row_bytes())
            }
            Row::Tensor(tensor, index) => {
                let (first, stride, bytes) = match &*self.args {
                    Args::Dispatch(args) => place(args, tensor),
                    Args::Combine(args) => place(args, tensor),
                    Args::Counts(args) => place(args, tensor),
                    Args::GiveUp(args) => place(args, tensor),
                    Args::Links(args) => place(args, tensor),
                    Args::Silu(_) => (0, 0, 0),
                };
                let start = first + u64::from(index) * u64::from(stride);
                (self.within(first, start), bytes)
            }
        };
        let polled = match row {
            Row::Inline(..) => Polled::Inline,
            _ => Polled::No,
        };
        Address {
            start,
            bytes,
            polled,
        }
    }

    fn own_row(&self, at: ByteOffset) -> Address {
        self.row(Row::Inline(self.common.rank(), at))
    }

    fn has_bytes(&self, row: Address, end: u32) -> bool {
        end <= row.bytes
    }

    fn load_tile<const DEPTH: usize>(
        &self,
        row: Address,
        start: u32,
        end: u32,
        _arrives: bool,
    ) -> [Vector; DEPTH] {
        let last = end - Self::VECTOR_BYTES;
        let first = start.min(last);
        let tile_end = end.min(start + DEPTH as u32 * Self::WARP_BYTES);
        let vectors = self.load_vectors(row, first, tile_end);
        tile_of(start, |at| {
            vectors[((at.min(last) - first) / Self::VECTOR_BYTES) as usize]
        })
    }

    fn load_vector(&self, row: Address, start: u32, end: u32) -> Vector {
        let vectors = self.load_vectors(row, start, end.min(start + Self::WARP_BYTES));
        let [vector] = tile_of(start, |at| {
            let index = (at - start) / Self::VECTOR_BYTES;
            vectors.get(index as usize).copied().unwrap_or_default()
        });
        vector
    }

    fn store_tile<const DEPTH: usize>(
        &self,
        row: Address,
        start: u32,
        end: u32,
        tile: &[Vector; DEPTH],
    ) {
        self.store_words(row, start, end, tile, Polled::No);
        // Nobody waits for a row that is re-armed.
        if row.polled == Polled::No {
            self.pause();
        }
    }

    fn store_polled<const DEPTH: usize>(
        &self,
        row: Address,
        start: u32,
        end: u32,
        tile: &[Vector; DEPTH],
    ) {
        self.store_words(row, start, end, tile, row.polled);
        self.pause();
    }

    fn incomplete<const TILES: usize, const DEPTH: usize>(
        &self,
        tiles: [&[Vector; DEPTH]; TILES],
    ) -> u32 {
        let lacks_any =
            |tile: &[Vector; DEPTH]| tile.as_flattened().as_flattened().contains(&SENTINEL);
        (0..).zip(tiles).fold(0, |bits, (index, tile)| {
            bits | u32::from(lacks_any(tile)) << index
        })
    }

    fn avoid_sentinel(&self, vector: Vector) -> Vector {
        let all_ones = match &*self.args {
            Args::Dispatch(with) => with.all_ones_of_input(),
            _ => unreachable!("only dispatch has an input"),
        };
        vector.map(|words| words.map(|word| if word < SENTINEL { word } else { all_ones }))
    }

    fn add_bf16(&self, mut sums: Self::Sums, vector: Vector) -> Self::Sums {
        let words = vector.as_flattened().iter();
        for (pair, word) in sums.as_flattened_mut().chunks_mut(2).zip(words) {
            pair[0] += f32_of_bf16_bits(*word as u16);
            pair[1] += f32_of_bf16_bits((word >> 16) as u16);
        }
        sums
    }

    fn round_to_bf16(&self, sums: Self::Sums) -> Vector {
        sums.map(|sums| {
            let bits = |index| u32::from(bf16_bits(sums[index]));
            std::array::from_fn(|word| bits(2 * word) | bits(2 * word + 1) << 16)
        })
    }
}

/// Makes the tile that begins at byte `start` of a row; `vector` returns the vector at a byte.
fn tile_of<const DEPTH: usize>(
    start: u32,
    vector: impl Fn(u32) -> [u32; WORDS],
) -> [Vector; DEPTH] {
    let mut starts = (start..).step_by(4 * WORDS);
    [(); DEPTH].map(|()| [(); LANES as usize].map(|()| starts.next().map_or([0; WORDS], &vector)))
}

impl Warp<'_> {
    /// Bytes of a row in a window that are moved in tiles.
    fn window_row_bytes(&self) -> u32 {
        match &*self.args {
            Args::Dispatch(with) => with.args.common.row.payload_bytes,
            _ => self.common.shape.combine_row_bytes(),
        }
    }

    /// Loads the vectors in bytes `start..end` of a row; none if the range is empty.
    fn load_vectors(&self, row: Address, start: u32, end: u32) -> Vec<[u32; WORDS]> {
        if start >= end {
            return Vec::new();
        }
        let data = self.load_bytes(row.start + u64::from(start), u64::from(end - start));
        let (vectors, _) = data.as_chunks::<{ 4 * WORDS }>();
        vectors.iter().copied().map(bytemuck::must_cast).collect()
    }

    /// Stores the words of a tile in bytes `start..end` of a row.
    fn store_words<const DEPTH: usize>(
        &self,
        row: Address,
        start: u32,
        end: u32,
        tile: &[Vector; DEPTH],
        polled: Polled,
    ) {
        let bytes: &[u8] = bytemuck::must_cast_slice(tile.as_flattened());
        let length = bytes.len().min(end.saturating_sub(start) as usize);
        self.store_bytes(row.start + u64::from(start), &bytes[..length], polled);
    }
}

/// Address of a tensor's first row, and the stride and the bytes of a row.
fn place(args: &impl Arguments, tensor: Tensor) -> (u64, u32, u32) {
    (
        args.tensor(tensor),
        args.row_stride(tensor),
        args.row_bytes(tensor),
    )
}
