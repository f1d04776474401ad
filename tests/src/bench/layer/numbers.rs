//! Weights and tokens that GPUs and the host work out alike, and the layer of a token in f64.

use std::cmp::Ordering;

use ferry::TokenFormat;
use ferry_reference::fp8;
use half::bf16;

use super::settings::{BLOCK, Settings};

/// A matrix, row by row.
#[derive(Clone, Copy)]
pub enum Matrix {
    /// `[ranks * tokens, hidden]`.
    X,
    /// `[experts, hidden]`.
    Router,
    /// `[experts, 2 * intermediate, hidden]`: gates, then ups.
    GateUp,
    /// `[experts, hidden, intermediate]`.
    Down,
    /// Scales of blocks of the two above, [`scale_columns`] a row.
    GateUpScales,
    DownScales,
}

impl Matrix {
    /// Index of an element among all numbers of a seed.
    pub const fn index(self, seed: u64, element: usize) -> u64 {
        (seed << 48 | (self as u64) << 44) + element as u64
    }
}

/// Scales of a row of blocks, with those that cuBLASLt wants the row padded with.
pub const fn scale_columns(columns: usize) -> usize {
    columns.div_ceil(BLOCK).next_multiple_of(4)
}

/// Factor of every product of `columns` values, so that sums stay about as large as these.
pub fn spread(columns: usize) -> f32 {
    1.0 / (columns as f32).sqrt()
}

/// Random bits of an index (SplitMix64), as the kernel `fill` makes them.
const fn bits(index: u64) -> u64 {
    let bits = index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

fn bf16_at(index: u64) -> f64 {
    bf16::from_bits(0x3f00 | (bits(index) & 0x80ff) as u16).to_f64()
}

fn e4m3_at(index: u64) -> f64 {
    fp8::value_of_code(0x30 | (bits(index) & 0x8f) as u8)
}

fn scale_at(index: u64) -> f64 {
    f64::from(f32::from_bits(
        0x3f00_0000 | (bits(index) & 0x7f_ffff) as u32,
    ))
}

/// A token's result on the GPUs.
pub struct Sample {
    /// Index of the token among those of all ranks.
    pub token: usize,
    /// The router's, `[experts]`.
    pub logits: Vec<bf16>,
    pub experts: Vec<i32>,
    pub weights: Vec<f32>,
    pub y: Vec<bf16>,
}

impl Sample {
    /// Whether these are the experts with the largest logits, weighted with their sigmoids.
    pub fn is_routed(&self) -> bool {
        let mut order: Vec<usize> = (0..self.logits.len()).collect();
        // Of equal logits the first, and zeros of either sign are equal.
        order.sort_by(|&a, &b| {
            let larger = self.logits[b].partial_cmp(&self.logits[a]);
            larger.unwrap_or(Ordering::Equal)
        });
        order.truncate(self.experts.len());
        let sigmoid = |expert: usize| 1.0 / (1.0 + (-self.logits[expert].to_f64()).exp());
        let sum: f64 = order.iter().map(|&expert| sigmoid(expert)).sum();
        let mut each = order.iter().zip(&self.experts).zip(&self.weights);
        each.all(|((&expert, &id), &weight)| {
            id == expert as i32 && (f64::from(weight) - sigmoid(expert) / sum).abs() < 1e-5
        })
    }

    /// `|y - f64| / |f64|`.
    pub fn error(&self, settings: &Settings) -> f64 {
        let wanted = self.layer(settings);
        let square: f64 = wanted.iter().map(|wanted| wanted * wanted).sum();
        let apart = self.y.iter().zip(&wanted).map(|(y, f64)| y.to_f64() - f64);
        (apart.map(|apart| apart * apart).sum::<f64>() / square).sqrt()
    }

    /// The layer in f64, with the experts and weights that the GPUs chose.
    fn layer(&self, settings: &Settings) -> Vec<f64> {
        let Settings {
            hidden,
            intermediate,
            seed,
            ..
        } = *settings;
        let times = |matrix: Matrix, scales: Matrix, row: usize, x: &[f64]| -> f64 {
            let weight = |column: usize| {
                let at = matrix.index(seed, row * x.len() + column);
                if settings.format == TokenFormat::Bf16 {
                    return bf16_at(at);
                }
                let block = row / BLOCK * scale_columns(x.len()) + column / BLOCK;
                e4m3_at(at) * scale_at(scales.index(seed, block))
            };
            let products = x.iter().enumerate().map(|(column, x)| weight(column) * x);
            products.sum::<f64>() * f64::from(spread(x.len()))
        };
        let x = |i| bf16_at(Matrix::X.index(seed, self.token * hidden + i));
        let x: Vec<f64> = (0..hidden).map(x).collect();
        let mut y = vec![0.0; hidden];
        for (&expert, &weight) in self.experts.iter().zip(&self.weights) {
            let first = expert as usize * 2 * intermediate;
            let gate_up = |row| times(Matrix::GateUp, Matrix::GateUpScales, row, &x);
            let silu = |row| {
                let gate = gate_up(row);
                gate / (1.0 + (-gate).exp()) * gate_up(row + intermediate)
            };
            let silu: Vec<f64> = (first..first + intermediate).map(silu).collect();
            for (i, y) in y.iter_mut().enumerate() {
                let row = expert as usize * hidden + i;
                *y += f64::from(weight) * times(Matrix::Down, Matrix::DownScales, row, &silu);
            }
        }
        y
    }
}
