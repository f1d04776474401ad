//! Tensors of a replay whose rows stay as they came.

use ferry::ReceiveLayout;
use ferry::TokenFormat;
use safetensors::Dtype;

use super::stored::{Stored, bytes_of};
use ferry_rig::Settings;
use ferry_rig::verify::Rows;

/// Outputs of a dispatch, with their names: of compact rows those that are there, else all.
pub fn tensors(rows: &Rows, settings: &Settings) -> Vec<(&'static str, Stored)> {
    let layout = &rows.layout;
    let count = match layout.receive {
        ReceiveLayout::Compact => rows.present().count(),
        _ => layout.rows,
    };
    let (top_k, groups) = (layout.top_k, layout.groups());
    let ids = &rows.ids[..count * top_k];
    let ids = match settings.wide_ids {
        true => (Dtype::I64, bytes_of(ids, i64::to_le_bytes)),
        false => (Dtype::I32, bytes_of(ids, |id| (id as i32).to_le_bytes())),
    };
    let weights = bytes_of(&rows.weights[..count * top_k], u32::to_le_bytes);
    let info = bytes_of(rows.src_info[..count].as_flattened(), i32::to_le_bytes);
    let counts = |counts: &[i32]| {
        (
            Dtype::I32,
            vec![counts.len()],
            bytes_of(counts, i32::to_le_bytes),
        )
    };
    let payload = rows.tokens[..count * layout.row_bytes()].to_vec();
    let payload = match layout.format {
        TokenFormat::Bf16 => (Dtype::BF16, vec![count, layout.hidden], payload),
        _ => (Dtype::U8, vec![count, layout.row_bytes()], payload),
    };
    let mut all = vec![
        ("tokens", payload),
        ("ids", (ids.0, vec![count, top_k], ids.1)),
        ("weights", (Dtype::F32, vec![count, top_k], weights)),
        ("src_info", (Dtype::I32, vec![count, 2], info)),
        ("source_counts", counts(&rows.source_counts)),
        ("expert_counts", counts(&rows.expert_counts)),
    ];
    if layout.transposed_scales {
        let columns = rows.scales.chunks(4 * layout.rows.max(1));
        let used = columns.flat_map(|column| column[..4 * count].to_vec());
        all.push(("scales", (Dtype::F32, vec![groups, count], used.collect())));
    } else if groups > 0 {
        let dtype = match layout.format {
            TokenFormat::BlockwiseFp8 => Dtype::F32,
            _ => Dtype::U8,
        };
        let used = rows.scales[..count * layout.scale_bytes()].to_vec();
        all.push(("scales", (dtype, vec![count, groups], used)));
    }
    if layout.row_scale_bytes() > 0 {
        let own = rows.row_scales[..2 * count].to_vec();
        all.push(("row_scales", (Dtype::BF16, vec![count], own)));
    }
    all
}
