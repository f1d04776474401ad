//! Last step of f32 sums before they are stored in a row.

use ferry_layout::{Epilogue, OutputElement};

use crate::machine::rows::Row;
use crate::machine::tile::Tiles;

/// Operations of a warp on the sums of a token. All lanes take part in each operation, with the same
/// arguments.
///
/// `start`, `end`: bytes of the token's row in BF16, as in [`Tiles`], whatever the element type of the
/// result.
pub trait Finishing: Tiles + Sized {
    /// BF16 elements in f32: exact.
    fn widen_bf16(&self, vector: Self::Vector) -> Self::Sums;
    /// Adds sums. Each one is rounded to f32.
    fn add_sums(&self, sums: Self::Sums, others: Self::Sums) -> Self::Sums;
    /// Applies `epilogue` to a token's sums in the vectors from byte `start` on. Results from byte `end` on
    /// are not used.
    fn apply(
        &self,
        epilogue: &impl Epilogue,
        token: u32,
        start: u32,
        end: u32,
        sums: Self::Sums,
    ) -> Self::Sums;
    /// Stores sums as `element`s to the vectors from byte `start` of a row on, and nothing from
    /// byte `end` on.
    fn store_sums(
        &self,
        row: Self::Address,
        start: u32,
        end: u32,
        sums: Self::Sums,
        element: OutputElement,
    );
}

/// Conversion of sums before they are stored.
pub trait Finish<T: Tiles> {
    /// Whether sums are only rounded to BF16. Constant for each type.
    fn is_rounding(&self) -> bool;
    /// Sums with which those of a tile begin: +0, unless there is something to begin with. The tile begins at
    /// byte `start` of a row in BF16, which ends at byte `end`.
    #[inline(always)]
    fn begin<const DEPTH: usize>(&self, machine: &T, start: u32, end: u32) -> [T::Sums; DEPTH] {
        let _ = (machine, start, end);
        [T::Sums::default(); DEPTH]
    }
    /// Stores the sums of a tile that begins at byte `start` of a row in BF16 to the row `to`, and nothing
    /// from byte `end` on. Not called if it [`is_rounding`](Self::is_rounding).
    fn store<const DEPTH: usize>(
        &self,
        machine: &T,
        to: Row,
        start: u32,
        end: u32,
        sums: [T::Sums; DEPTH],
    );
}

/// Rounds sums to BF16.
#[derive(Clone, Copy)]
pub struct Rounding;

impl<T: Tiles> Finish<T> for Rounding {
    #[inline(always)]
    fn is_rounding(&self) -> bool {
        true
    }

    #[inline(always)]
    fn store<const DEPTH: usize>(
        &self,
        machine: &T,
        to: Row,
        start: u32,
        end: u32,
        sums: [T::Sums; DEPTH],
    ) {
        machine.store_tile(
            machine.row(to),
            start,
            end,
            &sums.map(|sum| machine.round_to_bf16(sum)),
        );
    }
}
