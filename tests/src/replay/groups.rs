//! Tables of rows by expert.

use ferry::Config;
use safetensors::Dtype;

use super::stored::{Stored, bytes_of};
use ferry_rig::verify::{Groups, Received};

/// Tables of `rows` rows that a dispatch of a plan of `config` left, with their names.
pub(super) fn tables(
    received: &Received,
    rows: usize,
    config: &Config,
) -> Vec<(&'static str, Stored)> {
    let (tables, groups) = (&received.tables, Groups::of(config));
    let mut all = Vec::new();
    if groups.row_sources {
        let info = bytes_of(tables.sources[..rows].as_flattened(), i32::to_le_bytes);
        all.push(("src_info", (Dtype::I32, vec![rows, 3], info)));
        let weights = bytes_of(&tables.weights[..rows], u32::to_le_bytes);
        all.push(("weights", (Dtype::F32, vec![rows, 1], weights)));
    } else {
        let info = bytes_of(received.src_info[..rows].as_flattened(), i32::to_le_bytes);
        all.push(("src_info", (Dtype::I32, vec![rows, 2], info)));
    }
    if groups.counts_groups() {
        let (counts, ends) = (&tables.expert_counts, &tables.row_ends);
        let bytes = bytes_of(counts, i32::to_le_bytes);
        all.push(("expert_counts", (Dtype::I32, vec![counts.len()], bytes)));
        let bytes = bytes_of(ends, u32::to_le_bytes);
        all.push(("row_ends", (Dtype::U32, vec![ends.len()], bytes)));
    }
    if groups.padded > 0 {
        let ranges = bytes_of(&tables.ranges, i64::to_le_bytes);
        let experts = tables.expert_counts.len();
        let dims = vec![experts, tables.ranges.len() / experts];
        all.push(("source_ranges", (Dtype::I64, dims, ranges)));
    }
    if groups.m_indices {
        let numbers = bytes_of(&tables.m_indices[..rows], i32::to_le_bytes);
        all.push(("m_indices", (Dtype::I32, vec![rows], numbers)));
    }
    all
}
