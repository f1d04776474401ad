//! The shared expert: this rank's own tokens are the first group of the outputs. They do not travel.

use ferry_layout::{Common, DispatchArgs, DispatchOptions, SharedTokens, Table};

use crate::dispatch::{pass_through, scales};
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

impl SharedGroup {
    /// Shared group of a rank with `tokens` tokens.
    #[inline(always)]
    pub fn of(common: &Common, options: &DispatchOptions, tokens: u32) -> Self {
        let tokens = options.shared(tokens);
        match options.has_shared_expert() {
            true => Self {
                groups: 1,
                rows: common.row.padded(tokens.count),
                tokens,
            },
            // Constants, if the kernel has no options.
            false => Self {
                groups: 0,
                rows: 0,
                tokens,
            },
        }
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
    pub fn write<M: Machine>(
        self,
        launch: &Launch<M>,
        args: &DispatchArgs,
        options: &DispatchOptions,
        partition: Partition,
    ) {
        if self.groups == 0 {
            return;
        }
        let common = launch.common;
        let SharedTokens { start, count } = self.tokens;
        let parts = common.row.parts(count);
        for index in partition.tasks(count * parts) {
            let (row, part) = (index >> parts.trailing_zeros(), index & (parts - 1));
            let range = ByteRange::part(common.row.payload_bytes, part, parts);
            let scales = common.row.first_scale_word(common.shape.format(), row, row);
            let to = OutputRow { row, scales };
            let token = start + row;
            let part = TokenPart { token, range };
            let (format, stride) = (common.shape.format(), scales::stride(&common.shape, args));
            match pass_through::is_encoded(format, options) {
                true => pass_through::place(launch, &options.encoded, part, stride, 1, |_| to),
                false => (launch.machine).write_token(format, part, stride, 1, |_| to),
            }
        }
    }
}
