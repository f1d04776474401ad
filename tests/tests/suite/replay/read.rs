//! Files that a replay wrote, as the outputs that the verifier compares with the oracle.

use bytemuck::{AnyBitPattern, pod_read_unaligned};
use ferry::{Capacity, ReceiveLayout, ScaleLayout, TokenFormat};
use ferry_rig::formats::{self, Blocks, Layout};
use ferry_rig::verify::{Contents, Groups, RankOutputs, Received, RowLayout, Rows, Tables};
use ferry_rig::{Case, Return};
use safetensors::{Dtype, SafeTensors};

/// Tensors of a rank in a file.
struct Reader<'a> {
    file: &'a SafeTensors<'a>,
    rank: usize,
    /// Tensors that were read.
    read: usize,
}

impl Reader<'_> {
    /// Reads a tensor, which must have this type and shape.
    fn get<T: AnyBitPattern>(&mut self, name: &str, dtype: Dtype, dims: &[usize]) -> Vec<T> {
        let name = format!("{name}.{}", self.rank);
        let view = self.file.tensor(&name).unwrap();
        assert_eq!((view.dtype(), view.shape()), (dtype, dims), "{name}");
        self.read += 1;
        let values = view.data().chunks_exact(size_of::<T>());
        values.map(pod_read_unaligned).collect()
    }

    /// Reads a tensor that is there on a condition.
    fn get_if<T: AnyBitPattern>(
        &mut self,
        is_there: bool,
        name: &str,
        dtype: Dtype,
        dims: &[usize],
    ) -> Vec<T> {
        match is_there {
            true => self.get(name, dtype, dims),
            false => Vec::new(),
        }
    }

    /// Reads codes, or elements of BF16, of rows.
    fn tokens(&mut self, format: TokenFormat, rows: usize, hidden: usize) -> Vec<u8> {
        match format {
            TokenFormat::Bf16 => self.get("tokens", Dtype::BF16, &[rows, hidden]),
            _ => self.get(
                "tokens",
                Dtype::U8,
                &[rows, formats::row_bytes(format, hidden)],
            ),
        }
    }

    /// Requires that nothing else of the rank is in the file.
    fn end(self) {
        let end = format!(".{}", self.rank);
        let own = self
            .file
            .names()
            .into_iter()
            .filter(|name| name.ends_with(&end));
        assert_eq!(self.read, own.count(), "{:?}", self.file.names());
    }

    fn by_expert(&mut self, case: &Case) -> Received {
        let (config, format) = (case.config(), case.format);
        let (groups, sizes) = (Groups::of(&config), format.sizes());
        let here = case.experts / case.ranks;
        let experts = here + usize::from(case.shared_expert);
        let row_offsets: Vec<u32> = self.get("row_offsets", Dtype::U32, &[experts + 1]);
        let rows = row_offsets[experts] as usize;
        let is_tiled = format.scale_layout() == Some(ScaleLayout::Tiled);
        let first_blocks = formats::first_blocks(&row_offsets);
        let scale_blocks = if is_tiled { first_blocks[experts] } else { 0 };
        let blocks = groups.block(case.ranks).map(|rows| Blocks {
            rows,
            transposed: case.transposed_scales,
        });
        let layout = Layout {
            format,
            hidden: case.hidden,
            capacity: Capacity {
                rows,
                scale_blocks,
                ..Capacity::default()
            },
            blocks,
        };
        let of_row = layout.groups();
        let (dtype, dims) = match (format.scale_layout(), blocks) {
            (None, None) => (Dtype::F32, vec![of_row, rows]),
            (None, Some(of)) if of.transposed => (Dtype::F32, vec![experts * of_row, of.rows]),
            (None, Some(_)) => (Dtype::F32, vec![rows, of_row]),
            (Some(ScaleLayout::RowMajor), _) => (Dtype::U8, vec![rows, of_row]),
            (Some(ScaleLayout::Tiled), _) => (Dtype::U8, vec![scale_blocks, of_row / 4, 32, 4, 4]),
        };
        let (counts, tables) = (groups.counts_groups(), groups.row_sources);
        let ranges = [here, case.ranks];
        Received {
            layout,
            tokens: self.tokens(format, rows, case.hidden),
            scales: self.get_if(of_row > 0, "scales", dtype, &dims),
            scales_offsets: self.get_if(is_tiled, "scales_offsets", Dtype::U32, &[experts]),
            row_scales: self.get_if(sizes.has_row_scale, "row_scales", Dtype::BF16, &[rows]),
            row_offsets,
            expert_ids: self.get("expert_ids", Dtype::I32, &[experts]),
            src_info: self.get_if(!tables, "src_info", Dtype::I32, &[rows, 2]),
            tables: Tables {
                expert_counts: self.get_if(counts, "expert_counts", Dtype::I32, &[experts]),
                row_ends: self.get_if(counts, "row_ends", Dtype::U32, &[experts]),
                sources: self.get_if(tables, "src_info", Dtype::I32, &[rows, 3]),
                weights: self.get_if(tables, "weights", Dtype::F32, &[rows, 1]),
                m_indices: self.get_if(groups.m_indices, "m_indices", Dtype::I32, &[rows]),
                ranges: self.get_if(blocks.is_some(), "source_ranges", Dtype::I64, &ranges),
            },
        }
    }

    fn rows(&mut self, case: &Case) -> Rows {
        let config = case.config();
        let rows = match case.receive {
            ReceiveLayout::Compact => {
                let info = self.file.tensor(&format!("src_info.{}", self.rank));
                info.unwrap().shape()[0]
            }
            _ => case.ranks * config.max_tokens_per_rank,
        };
        let layout = RowLayout::of(&config, rows);
        let (of_row, slots) = (layout.groups(), [rows, case.top_k]);
        let dtype = match case.format {
            TokenFormat::BlockwiseFp8 => Dtype::F32,
            _ => Dtype::U8,
        };
        let dims = match layout.transposed_scales {
            true => [of_row, rows],
            false => [rows, of_row],
        };
        let has_own = layout.row_scale_bytes() > 0;
        let ids = match case.has_wide_ids(0) {
            true => self.get("ids", Dtype::I64, &slots),
            false => {
                let ids: Vec<i32> = self.get("ids", Dtype::I32, &slots);
                ids.into_iter().map(i64::from).collect()
            }
        };
        Rows {
            layout,
            is_read: true,
            tokens: self.tokens(case.format, rows, case.hidden),
            scales: self.get_if(of_row > 0, "scales", dtype, &dims),
            row_scales: self.get_if(has_own, "row_scales", Dtype::BF16, &[rows]),
            ids,
            weights: self.get("weights", Dtype::F32, &slots),
            src_info: self.get("src_info", Dtype::I32, &[rows, 2]),
            source_counts: self.get("source_counts", Dtype::I32, &[case.ranks]),
            expert_counts: self.get("expert_counts", Dtype::I32, &[case.experts / case.ranks]),
        }
    }
}

/// Reads what a round of a case left on each of its ranks. Every tensor has the type and the shape that the
/// command's help says, and there are no others.
pub(super) fn outputs(file: &SafeTensors<'_>, case: &Case) -> Vec<RankOutputs> {
    let outputs = (0..case.ranks).map(|rank| {
        let mut reader = Reader {
            file,
            rank,
            read: 0,
        };
        let tokens = case.tokens[0][rank];
        let slots = [tokens, case.top_k];
        let dims = match case.how {
            Return::Apart => vec![tokens, case.top_k, case.hidden],
            _ => vec![tokens, case.hidden],
        };
        let returned = case.combine_weights;
        let outputs = RankOutputs {
            rank,
            received: match case.receive.keeps_rows() {
                true => Contents::Rows(reader.rows(case)),
                false => Contents::ByExpert(reader.by_expert(case)),
            },
            combined: reader.get("combined", Dtype::BF16, &dims),
            combined_weights: reader.get_if(returned, "combined_weights", Dtype::F32, &slots),
            beyond: Vec::new(),
        };
        reader.end();
        outputs
    });
    outputs.collect()
}
