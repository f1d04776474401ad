//! Decoding of received rows.

use ferry_layout::{Sizes, TokenFormat, e2m1, e8m0, fp8, scale_placement};
use half::bf16;

use crate::call::buffers::copies::ReceivedRows;
use crate::call::buffers::copies::{require_blocks, require_length, require_offsets};
use crate::error::Error;
use crate::plan::Plan;
use crate::plan::scale_form::ScaleForm;

/// Decodes rows to f32, `[rows, hidden]`: each code times its scales, in f32, rounded once. In
/// `Nvfp4` divided by `input_scale`, the one of the dispatches; `None` is 1. Values of rows that pad an
/// expert or have no token are undefined, NaN for example; combine does not read those rows.
///
/// ```
/// # fn main() -> Result<(), ferry::Error> {
/// use ferry::{CombineBuffers, Config, DispatchBuffers, Communicator, Group, Plan, Stream, decode_rows};
///
/// let group = Group::simulated(1, 7)?;
/// let plan = Plan::new(&group, Config::new(2, 1, 8, 1))?;
/// let mut rank = Communicator::new(&group, &plan)?.remove(0);
/// let mut rows = DispatchBuffers::new(rank.device(), &plan)?;
/// let input = rows.upload(&[0x4000_u16; 8], &[1], None)?; // 2.0
/// rank.dispatch(Stream::DEFAULT, &input, rows.output())?;
/// if let Some(fault) = rank.synchronize(Stream::DEFAULT)?.fault() {
///     eprintln!("{fault}");
/// }
/// assert_eq!(decode_rows(&plan, &rows.download()?, None)?, [2.0; 8]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::UnusedInputScale`]; [`Error::Tensor`] if `rows` are not as long as the plan's format says, or
/// `row_offsets` do not begin with 0 or decrease, or in padded blocks are not those of the blocks.
pub fn decode_rows(
    plan: &Plan,
    rows: &ReceivedRows,
    input_scale: Option<f32>,
) -> Result<Vec<f32>, Error> {
    let format = plan.config().format;
    if input_scale.is_some() && !matches!(format, TokenFormat::Nvfp4(_)) {
        return Err(Error::UnusedInputScale { format });
    }
    let (hidden, sizes) = (plan.config().hidden, format.sizes());
    let by_expert = !plan.config().receive.keeps_rows();
    let count = match by_expert {
        true => rows.row_offsets.last().map_or(0, |&end| end as usize),
        false => rows.src_info.len(),
    };
    let bytes = hidden / 8 * sizes.element_bits as usize;
    let offsets = if by_expert { plan.groups() + 1 } else { 0 };
    require_length("row_offsets", rows.row_offsets.len(), offsets)?;
    match plan.block_rows() {
        0 => require_offsets(&rows.row_offsets)?,
        block => require_blocks(&rows.row_offsets, block)?,
    }
    require_length("tokens", rows.tokens.len(), count * bytes)?;
    let own_scales = if sizes.has_row_scale { count } else { 0 };
    require_length("row_scales", rows.row_scales.len(), own_scales)?;
    let scales = Scales::of(plan, rows, sizes, count)?;
    let mut values = Vec::with_capacity(count * hidden);
    for (row, codes) in rows.tokens.chunks_exact(bytes).enumerate() {
        let at = scales.row(row);
        for element in 0..hidden {
            let group = (element as u32).checked_div(sizes.group).unwrap_or(0);
            let value = match format {
                TokenFormat::Bf16 => {
                    bf16::from_le_bytes([codes[2 * element], codes[2 * element + 1]]).to_f32()
                }
                TokenFormat::BlockwiseFp8 => {
                    fp8::f32_of_e4m3_bits(codes[element]) * scales.word(&at, group)
                }
                TokenFormat::Mxfp8(_) => {
                    let scale = e8m0::f32_of_e8m0_bits(scales.byte(&at, group));
                    fp8::f32_of_e4m3_bits(codes[element]) * scale
                }
                TokenFormat::Mxfp4(_) => {
                    e2m1_at(codes, element) * e8m0::f32_of_e8m0_bits(scales.byte(&at, group))
                }
                TokenFormat::Nvfp4(_) => {
                    let scale = fp8::f32_of_e4m3_bits(scales.byte(&at, group));
                    e2m1_at(codes, element) * scale / input_scale.unwrap_or(1.0)
                }
                TokenFormat::Nvfp4RowScaled(_) => {
                    let scale = fp8::f32_of_e4m3_bits(scales.byte(&at, group));
                    e2m1_at(codes, element) * scale * rows.row_scales[row].to_f32()
                }
            };
            values.push(value);
        }
    }
    Ok(values)
}

/// Decodes an element of 4 bits, of which the even one is in the low half.
fn e2m1_at(codes: &[u8], element: usize) -> f32 {
    e2m1::f32_of_e2m1_bits(codes[element / 2] >> (element % 2 * 4))
}

/// Finds the scales of rows.
struct Scales<'a> {
    rows: &'a ReceivedRows,
    form: ScaleForm,
    /// Number of scales of a row.
    groups: u32,
    /// Rows that transposed scales have, in blocks those of a block.
    capacity: usize,
}

/// Position of a row, and within its expert if scales are tiled.
#[derive(Default)]
struct RowPlace {
    row: usize,
    /// The expert's first block of tiles, or its block of transposed scales, and the row within the expert.
    first_block: u32,
    local: u32,
}

impl<'a> Scales<'a> {
    fn of(plan: &Plan, rows: &'a ReceivedRows, sizes: Sizes, count: usize) -> Result<Self, Error> {
        let groups = (plan.config().hidden as u32)
            .checked_div(sizes.group)
            .unwrap_or(0);
        let form = match plan.scale_form() {
            // Those of a view were copied row by row.
            ScaleForm::None if groups > 0 => ScaleForm::RowMajor,
            form => form,
        };
        let (given, of_row) = (rows.scales.len(), groups as usize);
        let tiled = form == ScaleForm::Tiled;
        let offsets = if tiled { plan.groups() } else { 0 };
        require_length("scale_offsets", rows.scale_offsets.len(), offsets)?;
        let capacity = given.checked_div(4 * of_row).unwrap_or(0);
        let wanted = match form {
            ScaleForm::None => 0,
            ScaleForm::Transposed { .. } => 4 * of_row * capacity.max(count),
            ScaleForm::TransposedBlocks => 4 * of_row * count,
            ScaleForm::RowMajor => of_row * sizes.scale_bytes as usize * count,
            ScaleForm::Tiled => {
                let starts = rows.row_offsets.windows(2).zip(&rows.scale_offsets);
                let ends = starts.map(|(range, &offset)| {
                    let first = scale_placement::first_block(range[0], offset);
                    let blocks = scale_placement::blocks(range[1].saturating_sub(range[0]));
                    u64::from(first) * u64::from(blocks.min(1)) + u64::from(blocks)
                });
                scale_placement::bytes(ends.max().unwrap_or(0), groups) as usize
            }
        };
        // An engine may have copied more blocks than have rows.
        require_length(
            "scales",
            if tiled { given.min(wanted) } else { given },
            wanted,
        )?;
        Ok(Self {
            rows,
            form,
            groups,
            capacity: match form {
                ScaleForm::TransposedBlocks => plan.block_rows(),
                _ => capacity,
            },
        })
    }

    fn row(&self, row: usize) -> RowPlace {
        let offsets = &self.rows.row_offsets;
        if self.form == ScaleForm::TransposedBlocks {
            let block = self.capacity;
            return RowPlace {
                row,
                first_block: (row / block) as u32,
                local: (row % block) as u32,
            };
        }
        if self.form != ScaleForm::Tiled {
            return RowPlace {
                row,
                ..RowPlace::default()
            };
        }
        let expert = offsets.partition_point(|&first| first as usize <= row) - 1;
        let offset = self.rows.scale_offsets.get(expert).copied().unwrap_or(0);
        RowPlace {
            row,
            first_block: scale_placement::first_block(offsets[expert], offset),
            local: row as u32 - offsets[expert],
        }
    }

    /// Returns a one-byte scale.
    fn byte(&self, at: &RowPlace, group: u32) -> u8 {
        self.rows.scales[match self.form {
            ScaleForm::Tiled => {
                scale_placement::offset(at.first_block, at.local, group, self.groups) as usize
            }
            _ => at.row * self.groups as usize + group as usize,
        }]
    }

    /// Returns an f32 scale.
    fn word(&self, at: &RowPlace, group: u32) -> f32 {
        let start = 4 * match self.form {
            ScaleForm::RowMajor => at.row * self.groups as usize + group as usize,
            ScaleForm::TransposedBlocks => {
                let group = (at.first_block * self.groups + group) as usize;
                group * self.capacity + at.local as usize
            }
            _ => group as usize * self.capacity + at.row,
        };
        let bytes = &self.rows.scales[start..start + 4];
        f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}
