//! The fused SiLU kernel on the CPU, in one warp, with `ferry-layout`'s arithmetic.

use ferry_layout::{
    Arithmetic, ScaleLayout, SiluArgs, TokenFormat, bf16_bits, f32_of_bf16_bits, scale_placement,
};

use crate::encode::encode;
use crate::warp::Warp;
use crate::write::Polled;

/// Arithmetic on a CPU with the same bits as on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

impl Arithmetic for Portable {
    fn multiply_add(self, a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    fn reciprocal(self, d: f32) -> f32 {
        if d > 2f32.powi(126) { 0.0 } else { 1.0 / d }
    }
}

/// Runs the kernel. The last row offset and the capacity limit the rows, whatever the other offsets are.
pub fn run(warp: &Warp<'_>, args: &SiluArgs) {
    if warp.number != 0 {
        return;
    }
    let experts = u64::from(args.experts);
    let rows = row_offset(warp, args, experts).min(args.row_capacity as u32);
    let mut expert = Expert::of(warp, args, 0);
    for row in 0..rows {
        while row >= expert.end && expert.index + 1 < experts {
            expert = Expert::of(warp, args, expert.index + 1);
        }
        write_row(warp, args, &expert, row);
    }
    (0..experts).for_each(|index| clear_unused(warp, args, &Expert::of(warp, args, index)));
}

/// An expert and its rows. If offsets do not ascend, it ends before it starts, and numbers of rows wrap
/// around, as on a GPU.
struct Expert {
    index: u64,
    /// The first row.
    start: u32,
    end: u32,
    /// The first block of its tiled scales.
    block: u32,
}

impl Expert {
    fn of(warp: &Warp<'_>, args: &SiluArgs, index: u64) -> Self {
        let [start, end] = [index, index + 1].map(|expert| row_offset(warp, args, expert));
        let block = first_block(warp, args, index, start);
        Self {
            index,
            start,
            end,
            block,
        }
    }
}

fn row_offset(warp: &Warp<'_>, args: &SiluArgs, expert: u64) -> u32 {
    warp.load_word(args.row_offsets + 4 * expert)
}

fn first_block(warp: &Warp<'_>, args: &SiluArgs, expert: u64, start: u32) -> u32 {
    match args.scales_offsets {
        0 => 0,
        at => scale_placement::first_block(start, warp.load_word(at + 4 * expert)),
    }
}

fn write_row(warp: &Warp<'_>, args: &SiluArgs, expert: &Expert, row: u32) {
    let (columns, row_at) = (args.columns as usize, u64::from(row));
    let bytes = 4 * u64::from(args.columns);
    let data = warp.load_bytes(args.input + row_at * bytes, bytes);
    let value =
        |index: usize| f32_of_bf16_bits(u16::from_le_bytes([data[2 * index], data[2 * index + 1]]));
    let values: Vec<f32> = (0..columns)
        .map(|column| {
            let (gate, up) = match args.interleaved {
                0 => (column, columns + column),
                _ => (2 * column, 2 * column + 1),
            };
            args.activation().apply(value(gate), value(up), Portable)
        })
        .collect();
    let format = TokenFormat::of_number(args.format);
    if format == TokenFormat::Bf16 {
        let bits = values.iter().flat_map(|&y| bf16_bits(y).to_le_bytes());
        let bits: Vec<u8> = bits.collect();
        return warp.store_bytes(args.output + row_at * bits.len() as u64, &bits, Polled::No);
    }
    let global = match args.input_scales {
        0 => 1.0,
        at => f32::from_bits(warp.load_word(at + 4 * expert.index)),
    };
    let encoded = encode(format, &values, global);
    let at = args.output + row_at * encoded.payload.len() as u64;
    warp.store_bytes(at, &encoded.payload, Polled::No);
    let first = args.first_scale(format, row, row.wrapping_sub(expert.start), expert.block);
    for (word, bytes) in (0..).zip(encoded.scales.chunks(4)) {
        let index = first + word * u64::from(args.scale_stride(format));
        store_scales(warp, args, index, bytes);
    }
}

fn store_scales(warp: &Warp<'_>, args: &SiluArgs, index: u64, bytes: &[u8]) {
    if index < args.scale_words {
        warp.store_bytes(args.scales + 4 * index, bytes, Polled::No);
    }
}

/// Sets the scales of rows after an expert's last one to zero, up to the end of their block.
fn clear_unused(warp: &Warp<'_>, args: &SiluArgs, expert: &Expert) {
    let format = TokenFormat::of_number(args.format);
    if format.scale_layout() != Some(ScaleLayout::Tiled) {
        return;
    }
    let rows = expert.end.wrapping_sub(expert.start);
    let end = rows.checked_next_multiple_of(scale_placement::BLOCK_ROWS);
    for row in rows..end.unwrap_or(0) {
        let first = args.first_scale(format, expert.start.wrapping_add(row), row, expert.block);
        for word in 0..u64::from(format.sizes().scale_words(args.columns)) {
            let index = first + word * u64::from(args.scale_stride(format));
            store_scales(warp, args, index, &[0; 4]);
        }
    }
}
