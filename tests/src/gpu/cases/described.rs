//! Cases of aligned experts, of padded blocks, and of tables of their rows.

use anyhow::Result;
use ferry::ScaleLayout::{RowMajor, Tiled};
use ferry::TokenFormat::{Bf16, BlockwiseFp8, Mxfp4, Mxfp8, Nvfp4, Nvfp4RowScaled};
use ferry::{Receive, ReceiveFields, ReceiveLayout};
use ferry_reference::workload::Routing::{Duplicates, Uniform};

use super::Tokens::{Each, First};
use super::{Case, HOLES, SKEW, row};
use ferry_rig::verify::Groups;

/// Padding and tables of rows by expert.
const fn aligned(alignment: usize, clears_padding: bool, tables: bool) -> Groups {
    Groups {
        alignment,
        clears_padding,
        row_sources: tables,
        m_indices: tables,
        padded: 0,
    }
}

/// Cases of aligned experts, with padding that is cleared or not, and with tables or without.
#[rustfmt::skip]
const ALIGNED: [(Groups, Case); 12] = [
    (aligned(128, true, true),
        row("1 token", Each(1), [7168, 256, 8], Uniform, Bf16)),
    (aligned(128, true, true),
        row("128 tokens", Each(128), [7168, 256, 8], Uniform, Bf16)),
    (aligned(128, false, true),
        row("4096 tokens", Each(4096), [7168, 256, 8], Uniform, Bf16)),
    (aligned(8, true, false),
        row("no tokens", Each(0), [3584, 64, 8], Uniform, Bf16)),
    (aligned(64, false, false),
        row("tokens halve", First([64, 32, 16, 8]), [3584, 64, 8], Duplicates, Bf16)),
    (aligned(1, false, true),
        row("1024 tokens, skewed", Each(1024), [3584, 256, 8], SKEW, Bf16)),
    (aligned(128, true, true),
        row("FP8, uneven", First([130, 0, 3, 127]), [3584, 64, 8], SKEW, BlockwiseFp8)),
    (aligned(1, true, true),
        row("FP8, 128 tokens", Each(128), [7168, 256, 8], HOLES, BlockwiseFp8)),
    (aligned(256, true, true),
        row("MXFP8, 128 tokens", Each(128), [7168, 256, 8], HOLES, Mxfp8(Tiled))),
    (aligned(16, true, false),
        row("MXFP4, uneven", First([130, 0, 3, 127]), [3584, 64, 8], SKEW, Mxfp4(Tiled))),
    (aligned(128, true, true),
        row("NVFP4, 1024 tokens", Each(1024), [3584, 256, 8], Uniform, Nvfp4(RowMajor))),
    (aligned(16, true, true),
        row("NVFP4 by row, 128 tokens", Each(128), [2048, 64, 8], HOLES, Nvfp4RowScaled(Tiled))),
];

/// Cases of padded blocks.
#[rustfmt::skip]
const PADDED: [Case; 9] = [
    row("1 token", Each(1), [7168, 256, 8], Uniform, Bf16),
    row("128 tokens", Each(128), [7168, 256, 8], Uniform, Bf16),
    row("1024 tokens, skewed", Each(1024), [3584, 64, 8], SKEW, Bf16),
    row("no tokens", Each(0), [3584, 64, 8], Uniform, Bf16),
    row("tokens halve", First([64, 32, 16, 8]), [3584, 64, 8], HOLES, Bf16),
    row("FP8, 1 token", Each(1), [7168, 256, 8], Uniform, BlockwiseFp8),
    row("FP8, 128 tokens", Each(128), [7168, 256, 8], HOLES, BlockwiseFp8),
    row("MXFP8, 128 tokens", Each(128), [7168, 256, 8], HOLES, Mxfp8(Tiled)),
    row("NVFP4, uneven", First([130, 0, 3, 127]), [3584, 64, 8], SKEW, Nvfp4(RowMajor)),
];

/// These cases, in FP8 also with scales that are transposed in each block, without tables and with.
pub(super) fn padded_cases() -> impl Iterator<Item = Case> {
    PADDED.into_iter().flat_map(|case| {
        let of = |transposed: bool, tables: bool| Case {
            note: format!(
                ", padded blocks{}{}",
                if transposed {
                    ", transposed scales"
                } else {
                    ""
                },
                if tables { ", cleared, tables" } else { "" },
            ),
            receive: ReceiveLayout::Padded,
            transposed,
            groups: aligned(1, tables, tables),
            ..case.clone()
        };
        let is_fp8 = case.format == BlockwiseFp8;
        let all = [of(false, false), of(is_fp8, true)];
        all.into_iter()
    })
}

/// These cases, without a shared expert and with one.
pub(super) fn aligned_cases() -> impl Iterator<Item = Case> {
    ALIGNED.into_iter().flat_map(|(groups, case)| {
        [false, true].map(|shared| Case {
            note: format!(
                ", aligned to {}{}{}{}",
                groups.alignment,
                if groups.clears_padding {
                    ", cleared"
                } else {
                    ""
                },
                if groups.m_indices { ", tables" } else { "" },
                if shared { ", shared expert" } else { "" },
            ),
            shared,
            groups,
            ..case.clone()
        })
    })
}

/// A case's layout with what goes with its calls: rows that stay as they came are cleared where calls are
/// split, and have weights where they are not.
pub(super) fn with_calls(receive: Receive, split: bool) -> Result<Receive> {
    let layout = receive.layout();
    let fields = ReceiveFields {
        clear_absent: layout == ReceiveLayout::Strided && split,
        combine_weights: layout.keeps_rows() && !split,
        ..receive.fields()
    };
    Ok(fields.try_into()?)
}
