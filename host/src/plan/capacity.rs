//! Capacities of a dispatch's outputs.

use ferry_layout::{ReceiveLayout, scale_placement};

use crate::error::{Error, Problem};
use crate::plan::Plan;
use crate::plan::check::MAX_ROWS;
use crate::plan::scale_form::ScaleForm;

/// Capacity of the outputs of a dispatch on one rank.
///
/// Views and strided rows have exactly [`Plan::max_rows`] rows, one for each source rank and token, and so
/// have padded blocks, for each local expert. For
/// compact rows any number will do: if more come, the first ones are kept
/// ([`FaultKind::OutputTooSmall`](crate::FaultKind)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Number of rows, including those that pad experts. By expert a multiple of
    /// [`Plan::row_alignment`]: of 4 in blockwise FP8, or of [`expert_alignment`](crate::Config). For
    /// transposed scales of compact rows it need not be one, but TMA takes only such tensors.
    pub rows: usize,
    /// Number of blocks of 128 rows of [tiled scales](crate::ScaleTensor::Tiled): at least 1 if there are
    /// rows. Without effect if scales are not tiled.
    pub scale_blocks: usize,
    /// Whether received ids are i64, as the `topk_ids` of the call must then be; else both are i32. Without
    /// effect by expert, where no ids are received.
    pub wide_ids: bool,
}

impl Capacity {
    /// Capacity of `rows` rows, and of the most blocks that they can take: each group begins a block.
    pub const fn of_rows(plan: &Plan, rows: usize) -> Self {
        let blocks = match plan.block_rows() {
            0 => scale_placement::max_blocks(rows as u64, plan.groups() as u32),
            _ => plan.max_scale_blocks() as u64,
        };
        Self {
            rows,
            scale_blocks: blocks as usize,
            wide_ids: false,
        }
    }

    /// Capacity that always suffices: [`Plan::max_rows`] and [`Plan::max_scale_blocks`].
    pub const fn max(plan: &Plan) -> Self {
        Self {
            rows: plan.max_rows(),
            scale_blocks: plan.max_scale_blocks(),
            wide_ids: false,
        }
    }

    /// Capacity that suffices if no token names an expert twice: [`Plan::max_rows_distinct`] and
    /// [`Plan::max_scale_blocks_distinct`].
    pub const fn max_distinct(plan: &Plan) -> Self {
        Self {
            rows: plan.max_rows_distinct(),
            scale_blocks: plan.max_scale_blocks_distinct(),
            wide_ids: false,
        }
    }

    pub(crate) fn check(self, plan: &Plan) -> Result<(), Error> {
        self.fits(plan)?;
        if plan.scale_form() == ScaleForm::Tiled && self.scale_blocks == 0 && self.rows > 0 {
            return Err(Error::Capacity(Problem {
                field: "scale_blocks",
                value: 0.to_string(),
                rule: format!("{} rows take at least 1 block of scales", self.rows),
            }));
        }
        Ok(())
    }

    /// Checks a capacity of outputs, which may have no block of scales if no row comes.
    pub(crate) fn fits(self, plan: &Plan) -> Result<(), Error> {
        let refused = |field, value: usize, rule| {
            let value = value.to_string();
            Err(Error::Capacity(Problem { field, value, rule }))
        };
        let (shape, alignment) = (plan.shape(), plan.row_alignment());
        for (field, value) in [("rows", self.rows), ("scale_blocks", self.scale_blocks)] {
            if value as u128 > MAX_ROWS {
                return refused(field, value, format!("it must be at most {MAX_ROWS}"));
            }
        }
        if let Some(rule) = plan.fixed_rows(self.rows) {
            return refused("rows", self.rows, rule);
        }
        if !self.rows.is_multiple_of(alignment as usize) {
            return refused("rows", self.rows, plan.multiple());
        }
        if let Some(rule) = plan.fixed_blocks(self.scale_blocks) {
            return refused("scale_blocks", self.scale_blocks, rule);
        }
        plan.scale_form()
            .countable(shape, self.rows, self.scale_blocks)
    }
}

impl Plan {
    /// The rule that outputs break whose rows are no multiple of the alignment.
    pub(crate) fn multiple(&self) -> String {
        let (alignment, config) = (self.row_alignment(), self.config());
        if self.counts_groups() {
            let given = config.receive.fields().expert_alignment;
            return format!("it must be a multiple of {alignment}, as expert_alignment is {given}");
        }
        format!(
            "it must be a multiple of {alignment} in {:?}",
            config.format
        )
    }

    /// The rule that so many blocks of tiled scales break, if rows are in padded blocks, whose scales have
    /// fixed places, too.
    pub(crate) fn fixed_blocks(&self, blocks: usize) -> Option<String> {
        let has_places = self.block_rows() > 0 && self.scale_form() == ScaleForm::Tiled;
        let wanted = self.max_scale_blocks();
        (has_places && blocks < wanted)
            .then(|| format!("padded blocks of experts take at least {wanted}, whatever arrives"))
    }

    /// The rule that outputs of `rows` rows break, if rows have fixed places.
    pub(crate) fn fixed_rows(&self, rows: usize) -> Option<String> {
        let receive = self.config().receive.layout();
        let of_each = match receive {
            ReceiveLayout::View | ReceiveLayout::Strided => "",
            ReceiveLayout::Padded => "local experts * ",
            ReceiveLayout::ByExpert | ReceiveLayout::Compact => return None,
        };
        let most = self.max_rows();
        (rows != most).then(|| {
            format!("receive is {receive}, with {most} rows: {of_each}ranks * max_tokens_per_rank")
        })
    }
}
