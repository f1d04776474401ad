//! Capacities of a dispatch's outputs.

use ferry_layout::{ScaleLayout, Shape, scale_placement};

use crate::error::{Error, Problem};
use crate::plan::MAX_ROWS;
use crate::plan::Plan;

/// Capacity of the outputs of a dispatch on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Number of rows, including those that pad experts. In blockwise FP8 a multiple of 4.
    pub rows: usize,
    /// Number of blocks of 128 rows of [tiled scales](crate::ScaleTensor::Tiled): at least 1 if there are
    /// rows. Without effect if scales are not tiled.
    pub scale_blocks: usize,
}

impl Capacity {
    /// Capacity of `rows` rows, and of the most blocks that they can take: each group begins a block.
    pub const fn of_rows(plan: &Plan, rows: usize) -> Self {
        let blocks = scale_placement::max_blocks(rows as u64, plan.groups() as u32);
        Self {
            rows,
            scale_blocks: blocks as usize,
        }
    }

    /// Capacity that always suffices: [`Plan::max_rows`] and [`Plan::max_scale_blocks`].
    pub const fn max(plan: &Plan) -> Self {
        Self {
            rows: plan.max_rows(),
            scale_blocks: plan.max_scale_blocks(),
        }
    }

    /// Capacity that suffices if no token names an expert twice: [`Plan::max_rows_distinct`] and
    /// [`Plan::max_scale_blocks_distinct`].
    pub const fn max_distinct(plan: &Plan) -> Self {
        Self {
            rows: plan.max_rows_distinct(),
            scale_blocks: plan.max_scale_blocks_distinct(),
        }
    }

    pub(crate) fn check(self, shape: &Shape) -> Result<(), Error> {
        let refused = |field, value: usize, rule| {
            let value = value.to_string();
            Err(Error::Capacity(Problem { field, value, rule }))
        };
        let alignment = shape.row_alignment();
        for (field, value) in [("rows", self.rows), ("scale_blocks", self.scale_blocks)] {
            if value as u128 > MAX_ROWS {
                return refused(field, value, format!("it must be at most {MAX_ROWS}"));
            }
        }
        if !self.rows.is_multiple_of(alignment as usize) {
            let rule = format!(
                "it must be a multiple of {alignment} in {:?}",
                shape.format()
            );
            return refused("rows", self.rows, rule);
        }
        let is_tiled = shape.format().scale_layout() == Some(ScaleLayout::Tiled);
        if is_tiled && self.scale_blocks == 0 && self.rows > 0 {
            let rule = format!("{} rows take at least 1 block of scales", self.rows);
            return refused("scale_blocks", 0, rule);
        }
        countable(shape, self.rows, self.scale_blocks)
    }
}

/// Checks that kernels can number the words of the scales of `rows` rows (row-major) or `blocks` blocks
/// (tiled).
pub(crate) fn countable(shape: &Shape, rows: usize, blocks: usize) -> Result<(), Error> {
    let (unit, given, max) = match shape.format().scale_layout() {
        None => return Ok(()),
        Some(ScaleLayout::RowMajor) => ("rows", rows, shape.most_scaled_rows()),
        Some(ScaleLayout::Tiled) => ("blocks", blocks, shape.most_scale_blocks()),
    };
    if given as u64 <= max {
        return Ok(());
    }
    Err(Error::TooManyScales { unit, given, max })
}
