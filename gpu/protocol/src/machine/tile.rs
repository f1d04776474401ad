//! Tiles: a fixed number of vectors of every lane, the unit in which a warp moves a row.

use ferry_layout::ByteOffset;
#[cfg(doc)]
use ferry_layout::Tensor;

use crate::machine::rows::{ByteRange, Row};

/// Operations of a warp on tiles. All lanes take part in each operation, with the same arguments.
///
/// Vector `i` of lane `l` of a tile holds the bytes of a row from `start + i * WARP_BYTES + l * VECTOR_BYTES`
/// on, if the tile begins at `start`.
pub trait Tiles {
    /// Start of a row.
    type Address: Copy;
    /// A vector of each lane: on a GPU, of this one.
    type Vector: Copy + Default;
    /// A sum in f32 for each element of a [`Vector`](Self::Vector).
    type Sums: Copy + Default;
    /// Bytes of one lane's vector.
    const VECTOR_BYTES: u32;
    /// Bytes of all lanes' vectors.
    const WARP_BYTES: u32;
    /// Vectors whose words are all the sentinel.
    const SENTINELS: Self::Vector;

    /// The address of a row.
    fn row(&self, row: Row) -> Self::Address;
    /// The address of a row in the own window.
    fn own_row(&self, at: ByteOffset) -> Self::Address;
    /// Whether a row has `end` bytes, as far as the machine knows. For debug assertions.
    fn has_bytes(&self, _row: Self::Address, _end: u32) -> bool {
        true
    }

    /// Loads the tile from byte `start` of a row. Vectors from byte `end` on repeat the last one before it,
    /// as the assembler serialises conditional loads. `arrives`: whether somebody may be writing the row
    /// meanwhile.
    fn load_tile<const DEPTH: usize>(
        &self,
        row: Self::Address,
        start: u32,
        end: u32,
        arrives: bool,
    ) -> [Self::Vector; DEPTH];
    /// Loads a vector of each lane from byte `start` of a row that somebody may be writing, zeros from byte
    /// `end` on.
    fn load_vector(&self, row: Self::Address, start: u32, end: u32) -> Self::Vector;
    /// Stores the tile from byte `start` of a row, and nothing from byte `end` on.
    fn store_tile<const DEPTH: usize>(
        &self,
        row: Self::Address,
        start: u32,
        end: u32,
        tile: &[Self::Vector; DEPTH],
    );
    /// Stores like [`store_tile`](Self::store_tile), but words that a peer may be polling.
    fn store_polled<const DEPTH: usize>(
        &self,
        row: Self::Address,
        start: u32,
        end: u32,
        tile: &[Self::Vector; DEPTH],
    );
    /// A vote: bit `i` is set if any lane has a word of tile `i` that is the sentinel.
    fn incomplete<const TILES: usize, const DEPTH: usize>(
        &self,
        tiles: [&[Self::Vector; DEPTH]; TILES],
    ) -> u32;

    /// A vector of [`Tensor::Input`] whose words of all ones have become
    /// [`all_ones_of_input`](ferry_layout::Arguments::all_ones_of_input), which travels.
    fn avoid_sentinel(&self, vector: Self::Vector) -> Self::Vector;
    /// Adds BF16 elements. Each sum is rounded to f32.
    fn add_bf16(&self, sums: Self::Sums, vector: Self::Vector) -> Self::Sums;
    /// Rounds sums to BF16.
    fn round_to_bf16(&self, sums: Self::Sums) -> Self::Vector;
}

/// Asserts in debug builds that a tile begins inside its byte range, which the row has; all are whole
/// vectors.
#[inline(always)]
pub fn debug_assert_is_inside<T: Tiles>(
    machine: &T,
    row: T::Address,
    start: u32,
    range: ByteRange,
) {
    let ByteRange { start: first, end } = range;
    debug_assert!(
        [first, start, end]
            .iter()
            .all(|at| at.is_multiple_of(T::VECTOR_BYTES)),
        "bytes {first}..{end} from {start} are not whole vectors of {}",
        T::VECTOR_BYTES
    );
    debug_assert!(
        first <= start && start <= end,
        "byte {start} of bytes {first}..{end}"
    );
    debug_assert!(
        machine.has_bytes(row, end),
        "bytes {first}..{end} leave their row"
    );
}
