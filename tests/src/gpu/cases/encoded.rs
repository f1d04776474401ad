//! Cases of tokens that are given encoded, in each layout of received rows.

use ferry::{ReceiveLayout, ScaleLayout};

use super::{
    BlockwiseFp8, Case, Each, First, HOLES, Mxfp4, Mxfp8, Nvfp4, RowMajor, SKEW, Tiled, Uniform,
    row,
};
use ferry_rig::ROW_LAYOUTS;
use ferry_rig::formats::given::Given::{self, AnyBits, Packed};
use ferry_rig::formats::given::Strides::{self, Gaps, Transposed};

#[rustfmt::skip]
const ENCODED: [(Given, Strides, Case); 11] = [
    (AnyBits, Strides::RowMajor, row("FP8, 1 token", Each(1), [7168, 256, 8], Uniform, BlockwiseFp8)),
    (AnyBits, Strides::RowMajor, row("FP8, 128 tokens", Each(128), [7168, 256, 8], Uniform, BlockwiseFp8)),
    (AnyBits, Strides::RowMajor, row("FP8, 4096 tokens", Each(4096), [7168, 256, 8], Uniform, BlockwiseFp8)),
    (AnyBits, Transposed, row("FP8, uneven", First([130, 0, 3, 127]), [3584, 64, 8], SKEW, BlockwiseFp8)),
    (AnyBits, Gaps, row("FP8, 64 tokens", Each(64), [7168, 64, 8], HOLES, BlockwiseFp8)),
    (Packed, Strides::RowMajor, row("FP8, 128 tokens", Each(128), [7168, 256, 8], Uniform, BlockwiseFp8)),
    (Packed, Transposed, row("FP8, uneven", First([130, 0, 3, 127]), [3584, 64, 8], SKEW, BlockwiseFp8)),
    (AnyBits, Strides::RowMajor, row("MXFP8, 128 tokens", Each(128), [7168, 256, 8], HOLES, Mxfp8(Tiled))),
    (AnyBits, Gaps, row("MXFP8, 1 token", Each(1), [7168, 256, 8], Uniform, Mxfp8(RowMajor))),
    (AnyBits, Strides::RowMajor, row("NVFP4, 1024 tokens", Each(1024), [3584, 256, 8], HOLES, Nvfp4(Tiled))),
    (AnyBits, Gaps, row("MXFP4, uneven", First([130, 0, 3, 127]), [3584, 64, 8], SKEW, Mxfp4(RowMajor))),
];

/// Each case by expert, some with a shared expert, and in each layout whose rows stay as they came.
pub(super) fn cases() -> impl Iterator<Item = Case> {
    let layouts = [ReceiveLayout::ByExpert].into_iter().chain(ROW_LAYOUTS);
    layouts.flat_map(|receive| {
        let all = ENCODED.into_iter().enumerate();
        all.map(move |(index, (given, strides, case))| {
            let by_expert = receive == ReceiveLayout::ByExpert;
            let format = match by_expert {
                true => case.format,
                false => case.format.with_scale_layout(ScaleLayout::RowMajor),
            };
            let (shared, transposed) = (
                by_expert && index % 3 == 1,
                !by_expert && format == BlockwiseFp8 && index % 2 == 1,
            );
            Case {
                note: format!(
                    ", given encoded ({given:?}, {strides:?}), received {receive}{}{}",
                    if shared { ", shared expert" } else { "" },
                    if transposed {
                        ", transposed scales"
                    } else {
                        ""
                    },
                ),
                given,
                strides,
                shared,
                receive,
                transposed,
                format,
                ..case
            }
        })
    })
}
