//! Rows of every token format as they are in dispatch's outputs, by the oracle.

pub mod given;

use std::ops::Range;

use ferry::{Capacity, DataType, DevicePtr, ScaleLayout, ScaleTensor, Tensor, TokenFormat};
use ferry_reference::{bf16, fp8, mxfp4, mxfp8, nvfp4};

/// A token as the oracle encodes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Its elements.
    pub payload: Vec<u8>,
    /// Its scales, in the order of groups.
    pub scales: Vec<u8>,
    /// BF16 bits of the inverse of its own global scale.
    pub row_scale: Option<u16>,
}

/// The global scale that tests give to NVFP4.
pub const INPUT_SCALE: f32 = 0.75;

/// Encodes a token; NVFP4 under [`INPUT_SCALE`].
pub fn encode(format: TokenFormat, row: &[bf16]) -> Encoded {
    encode_with(format, row, INPUT_SCALE)
}

/// Encodes a token.
pub fn encode_with(format: TokenFormat, row: &[bf16], input_scale: f32) -> Encoded {
    match format {
        TokenFormat::Bf16 => Encoded::bf16(row),
        TokenFormat::Nvfp4RowScaled(_) => {
            let (payload, scales, inverse) = nvfp4::encode_by_row(row);
            Encoded {
                payload,
                scales,
                row_scale: Some(inverse.to_bits()),
            }
        }
        _ => encode_groups(format, row, input_scale),
    }
}

/// Encodes a row of an activation's results, in every format but NVFP4 with scales of rows.
pub fn encode_f32(format: TokenFormat, row: &[f32], input_scale: f32) -> Encoded {
    match format {
        TokenFormat::Bf16 => {
            let rounded = row.iter().map(|&x| ferry_reference::round_to_bf16(x));
            Encoded::bf16(&rounded.collect::<Vec<_>>())
        }
        _ => encode_groups(format, row, input_scale),
    }
}

/// Encodes in a format that has scales of groups and no others.
fn encode_groups<T: Into<f64> + Copy>(format: TokenFormat, row: &[T], input_scale: f32) -> Encoded {
    let (payload, scales) = match format {
        TokenFormat::BlockwiseFp8 => {
            let (codes, scales) = fp8::blockwise(row);
            let bytes = scales.iter().flat_map(|scale| scale.to_le_bytes());
            (codes, bytes.collect())
        }
        TokenFormat::Mxfp8(_) => mxfp8::encode(row),
        TokenFormat::Mxfp4(_) => mxfp4::encode(row),
        TokenFormat::Nvfp4(_) => nvfp4::encode(row, input_scale),
        TokenFormat::Bf16 | TokenFormat::Nvfp4RowScaled(_) => unreachable!("{format:?}"),
    };
    Encoded {
        payload,
        scales,
        row_scale: None,
    }
}

impl Encoded {
    /// BF16.
    fn bf16(row: &[bf16]) -> Self {
        Self {
            payload: row.iter().flat_map(|x| x.to_le_bytes()).collect(),
            ..Self::default()
        }
    }
}

/// Bytes of a row of dispatch's output.
pub fn row_bytes(format: TokenFormat, hidden: usize) -> usize {
    format.sizes().payload_bytes(hidden as u32) as usize
}

/// Scales of a row.
pub fn groups(format: TokenFormat, hidden: usize) -> usize {
    hidden
        .checked_div(format.sizes().group as usize)
        .unwrap_or(0)
}

/// So many rows more, or a few more than that, so that their number is a multiple of `alignment`.
#[must_use]
pub const fn with_spare_rows(capacity: Capacity, alignment: usize, rows: usize) -> Capacity {
    Capacity {
        rows: (capacity.rows + rows).next_multiple_of(alignment),
        ..capacity
    }
}

/// Enough for both.
#[must_use]
pub fn larger(one: Capacity, other: Capacity) -> Capacity {
    Capacity {
        rows: one.rows.max(other.rows),
        scale_blocks: one.scale_blocks.max(other.scale_blocks),
        wide_ids: one.wide_ids || other.wide_ids,
    }
}

/// A row's place: the expert's first row and block, and the row within the expert.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// First output row of the expert.
    pub start: usize,
    /// First block of scales of the expert.
    pub block: usize,
    /// Row within the expert.
    pub row: usize,
}

/// Layout of rows in the outputs of a dispatch, or of a fused SiLU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Format of the rows.
    pub format: TokenFormat,
    /// Elements of a row.
    pub hidden: usize,
    /// Number of rows, and of blocks of scales.
    pub capacity: Capacity,
    /// Blocks of experts that the rows are in, if they are.
    pub blocks: Option<Blocks>,
}

/// Blocks of experts, all alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Rows of a block.
    pub rows: usize,
    /// Whether scales of FP8 are transposed in each block; otherwise they are row-major.
    pub transposed: bool,
}

impl Layout {
    /// Bytes of a row without scales.
    pub fn row_bytes(&self) -> usize {
        row_bytes(self.format, self.hidden)
    }

    /// Scales of a row.
    pub fn groups(&self) -> usize {
        groups(self.format, self.hidden)
    }

    /// A row of zeros, with scales of zeros.
    pub fn zeros(&self) -> Encoded {
        let scale_bytes = self.groups() * self.format.sizes().scale_bytes as usize;
        Encoded {
            payload: vec![0; self.row_bytes()],
            scales: vec![0; scale_bytes],
            row_scale: self.format.sizes().has_row_scale.then_some(0),
        }
    }

    /// Bytes of the tensor of scales.
    pub fn scales_bytes(&self) -> usize {
        let groups = self.groups();
        match self.format.scale_layout() {
            None => 4 * groups * self.capacity.rows,
            Some(ScaleLayout::RowMajor) => groups * self.capacity.rows,
            Some(ScaleLayout::Tiled) => groups * 128 * self.capacity.scale_blocks,
        }
    }

    /// Rows that have a scale of their own.
    pub fn scaled_rows(&self) -> usize {
        if self.format.sizes().has_row_scale {
            self.capacity.rows
        } else {
            0
        }
    }

    /// The tensor of scales at `at`, with the offsets of so many experts at `offsets`; `None` for BF16.
    pub fn scale_tensor(
        &self,
        at: DevicePtr,
        offsets: DevicePtr,
        experts: usize,
    ) -> Option<ScaleTensor> {
        let (groups, capacity) = (self.groups(), self.capacity);
        if groups == 0 {
            return None;
        }
        let byte = DataType::of_scales(self.format)?;
        Some(match self.format.scale_layout() {
            None => ScaleTensor::Transposed(Tensor::contiguous(
                at,
                DataType::F32,
                [groups, capacity.rows],
            )),
            Some(ScaleLayout::RowMajor) => {
                ScaleTensor::RowMajor(Tensor::contiguous(at, byte, [capacity.rows, groups]))
            }
            Some(ScaleLayout::Tiled) => ScaleTensor::Tiled {
                scales: Tensor::contiguous(at, byte, [capacity.scale_blocks, groups / 4, 32, 4, 4]),
                offsets: Tensor::contiguous(offsets, DataType::U32, [experts]),
            },
        })
    }

    /// The bytes of a scale in the tensor of scales.
    pub fn scale_at(&self, place: Place, group: usize) -> Range<usize> {
        let groups = self.groups();
        let Place { start, block, row } = place;
        let at = match self.format.scale_layout() {
            None => match self.blocks {
                None => 4 * (group * self.capacity.rows + start + row),
                Some(blocks) if blocks.transposed => {
                    let expert = start / blocks.rows;
                    4 * ((expert * groups + group) * blocks.rows + row)
                }
                Some(_) => 4 * ((start + row) * groups + group),
            },
            Some(ScaleLayout::RowMajor) => (start + row) * groups + group,
            Some(ScaleLayout::Tiled) => {
                // [block, group / 4, row % 32, row % 128 / 32, group % 4]
                let tile = (block + row / 128) * (groups / 4) + group / 4;
                ((tile * 32 + row % 32) * 4 + row % 128 / 32) * 4 + group % 4
            }
        };
        at..at + self.format.sizes().scale_bytes as usize
    }
}

/// First block of scales of each expert, and the end: every expert begins a block.
pub fn first_blocks(row_offsets: &[u32]) -> Vec<usize> {
    let mut blocks = vec![0];
    for pair in row_offsets.windows(2) {
        let rows = (pair[1] - pair[0]) as usize;
        blocks.push(blocks[blocks.len() - 1] + rows.div_ceil(128));
    }
    blocks
}

/// Contents that `scales_offsets` must have.
pub fn scales_offsets(row_offsets: &[u32]) -> Vec<u32> {
    let starts = row_offsets.iter().map(|&row| row as usize / 128);
    first_blocks(row_offsets)
        .iter()
        .zip(starts)
        .take(row_offsets.len() - 1)
        .map(|(&block, start)| (block - start) as u32)
        .collect()
}

/// The bytes of rows and of their scales in the outputs of a dispatch, or of a fused SiLU.
pub struct Images {
    layout: Layout,
    /// Rows.
    pub tokens: Vec<u8>,
    /// Scales.
    pub scales: Vec<u8>,
    /// BF16 bits.
    pub row_scales: Vec<u16>,
}

impl Images {
    /// Outputs that nobody has written, full of `poison`.
    pub fn poisoned(layout: Layout, poison: u8) -> Self {
        Self {
            layout,
            tokens: vec![poison; layout.capacity.rows * layout.row_bytes()],
            scales: vec![poison; layout.scales_bytes()],
            row_scales: vec![u16::from_le_bytes([poison; 2]); layout.scaled_rows()],
        }
    }

    /// Puts a row into its place.
    pub fn put(&mut self, place: Place, row: &Encoded) {
        let (at, bytes) = (place.start + place.row, row.payload.len());
        self.tokens[at * bytes..][..bytes].copy_from_slice(&row.payload);
        let width = self.layout.format.sizes().scale_bytes.max(1);
        for (group, scale) in row.scales.chunks(width as usize).enumerate() {
            self.scales[self.layout.scale_at(place, group)].copy_from_slice(scale);
        }
        if let Some(scale) = row.row_scale {
            self.row_scales[at] = scale;
        }
    }

    /// Zeros for the scales of the rows that the experts' last blocks have and the experts have not.
    pub fn clear_unused(&mut self, row_offsets: &[u32]) {
        let layout = self.layout;
        if layout.format.scale_layout() != Some(ScaleLayout::Tiled) {
            return;
        }
        let blocks = first_blocks(row_offsets);
        for (pair, &block) in row_offsets.windows(2).zip(&blocks) {
            let (start, rows) = (pair[0] as usize, (pair[1] - pair[0]) as usize);
            for row in rows..rows.next_multiple_of(128) {
                for group in 0..layout.groups() {
                    let place = Place { start, block, row };
                    self.scales[layout.scale_at(place, group)].fill(0);
                }
            }
        }
    }
}
