//! The fused SiLU kernel on the CPU: one warp does it all, with `ferry-layout`'s arithmetic.

use ferry_layout::{
    Arithmetic, ScaleLayout, SiluArgs, TokenFormat, bf16_bits, f32_of_bf16_bits, scale_placement,
};

use crate::encode::encode;
use crate::store_buffer::Polled;
use crate::warp::Warp;

/// The arithmetic of a CPU, to the same bits as a GPU's.
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

/// Runs the kernel.
pub fn run(warp: &Warp<'_>, args: &SiluArgs) {
    if warp.number != 0 {
        return;
    }
    let offsets: Vec<u32> = (0..=u64::from(args.experts))
        .map(|expert| warp.load_word(args.row_offsets + 4 * expert))
        .collect();
    for (expert, pair) in (0..).zip(offsets.windows(2)) {
        let expert = Expert {
            index: expert,
            start: pair[0],
            rows: pair[1] - pair[0],
            block: first_block(warp, args, expert, pair[0]),
        };
        for row in pair[0]..pair[1].min(args.row_capacity as u32) {
            write_row(warp, args, &expert, row);
        }
        clear_unused(warp, args, &expert);
    }
}

/// An expert and its rows.
struct Expert {
    index: u64,
    /// The first row.
    start: u32,
    rows: u32,
    /// The first block of its tiled scales.
    block: u32,
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
    let first = args.first_scale(format, row, row - expert.start, expert.block);
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

/// Zeros for the scales of the rows that an expert's last block has and the expert has not.
fn clear_unused(warp: &Warp<'_>, args: &SiluArgs, expert: &Expert) {
    let format = TokenFormat::of_number(args.format);
    if format.scale_layout() != Some(ScaleLayout::Tiled) {
        return;
    }
    for row in expert.rows..expert.rows.next_multiple_of(scale_placement::BLOCK_ROWS) {
        let first = args.first_scale(format, expert.start + row, row, expert.block);
        for word in 0..u64::from(format.sizes().scale_words(args.columns)) {
            let index = first + word * u64::from(args.scale_stride(format));
            store_scales(warp, args, index, &[0; 4]);
        }
    }
}
