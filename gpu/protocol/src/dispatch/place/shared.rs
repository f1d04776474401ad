//! The shared expert: this rank's own tokens are the first group of the outputs. They do not travel.

use ferry_layout::{SharedTokens, Table};

use crate::dispatch::launch::Dispatch;
use crate::machine::Machine;
use crate::machine::rows::{ByteRange, OutputRow, TokenPart};
use crate::sync::launch::Launch;
use crate::work::partition::Partition;

/// The group of the shared expert, which precedes those of the local experts, if there is one.
#[derive(Clone, Copy)]
pub struct SharedGroup {
    /// Groups before those of the local experts.
    pub groups: u32,
    /// Rows before those of the local experts, padding included.
    pub rows: u32,
    tokens: SharedTokens,
}

impl<M: Machine> Dispatch<'_, M> {
    /// Shared group of a rank with `tokens` tokens.
    #[inline(always)]
    pub fn shared_group(&self, tokens: u32) -> SharedGroup {
        let tokens = self.options.shared(tokens);
        match self.options.has_shared_expert() {
            true => SharedGroup {
                groups: 1,
                rows: self.common.row.padded(tokens.count),
                tokens,
            },
            // Constants, if the kernel has no options.
            false => SharedGroup {
                groups: 0,
                rows: 0,
                tokens,
            },
        }
    }
}

impl SharedGroup {
    /// Rows of the group, without padding.
    #[inline(always)]
    pub const fn tokens(&self) -> u32 {
        self.tokens.count
    }

    /// Token of the first row.
    #[inline(always)]
    pub const fn first_token(&self) -> u32 {
        self.tokens.start
    }

    /// Writes the group's entries of the user's tables, except its end. For one lane.
    #[inline(always)]
    pub fn describe<M: Machine>(self, launch: &Launch<M>) {
        if self.groups == 0 {
            return;
        }
        let machine = launch.machine;
        machine.write(Table::RowOffsets, 0, 0);
        machine.write(Table::ExpertIds, 0, 0);
        if launch.common.shape.has_tiled_scales() {
            machine.write(Table::ScalesOffsets, 0, 0);
        }
    }

    /// Writes this warp's partition of the rows, which fit in the outputs.
    #[inline(always)]
    pub fn write<M: Machine>(self, dispatch: &Dispatch<M>, partition: Partition) {
        if self.groups == 0 {
            return;
        }
        let common = dispatch.common;
        let SharedTokens { start, count } = self.tokens;
        let parts = common.row.parts(count);
        for index in partition.tasks(count * parts) {
            let (row, part) = (index >> parts.trailing_zeros(), index & (parts - 1));
            let range = ByteRange::part(common.row.payload_bytes, part, parts);
            let scales = common.row.first_scale_word(common.shape.format(), row, row);
            let to = OutputRow { row, scales };
            let token = start + row;
            let part = TokenPart { token, range };
            let (format, stride) = (common.shape.format(), dispatch.scale_stride());
            match dispatch.is_encoded() {
                true => dispatch.place_encoded(part, stride, 1, |_| to),
                false => (dispatch.machine).write_token(format, part, stride, 1, |_| to),
            }
        }
    }
}
