//! Numbers that the host knows and a GPU gets by copies: everything repeats one tile of random values.
//!
//! A set of weights of DeepSeek-V3's shape has 11 billion values. A GPU copies the tile again and again, from
//! another place for each matrix, and the host looks values up in it.

use std::sync::Arc;

use anyhow::Result;
use cudarc::driver::{CudaSlice, CudaStream, DeviceRepr};
use half::bf16;

/// Values of a tile: a prime, so that no row of a matrix begins where another does.
const TILE: usize = 4_194_301;
/// Values of the tile of block scales.
const SCALES: usize = 65_521;
/// Rows and columns that share a block scale.
pub const BLOCK: usize = 128;

/// A sequence of numbers that looks random (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 to 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u32 << 24) as f32
    }

    /// About normal, with a standard deviation of 1.
    fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.unit()).sum();
        (sum - 2.0) * 3.0_f32.sqrt()
    }
}

/// What a matrix is for. Its number takes part in where in the tile it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Tokens: a row each.
    X = 0,
    /// `[experts, hidden]`.
    Router = 1,
    /// `[2 * intermediate, hidden]`: gates, then ups.
    GateUp = 2,
    /// `[hidden, intermediate]`.
    Down = 3,
}

/// Where in a tile of `values` the matrix begins.
fn start(kind: Kind, number: usize, values: usize) -> usize {
    let mut random = Random((kind as u64) << 32 | number as u64);
    (random.next() % values as u64) as usize
}

/// The tiles, with values of e4m3 and of BF16.
pub struct Tiles {
    bf16: Vec<bf16>,
    fp8: Vec<u8>,
    scales: Vec<f32>,
    /// What each code of e4m3 stands for.
    e4m3: [f32; 256],
}

/// e4m3's value of a code: a sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa / 8.0 * 2.0_f32.powi(-6),
        15 if code & 7 == 7 => f32::NAN,
        _ => (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

impl Tiles {
    pub fn new(seed: u64) -> Self {
        let e4m3: [f32; 256] = std::array::from_fn(|code| e4m3(code as u8));
        let mut random = Random(seed);
        let normals: Vec<f32> = (0..TILE).map(|_| random.normal()).collect();
        // A weight is a code times a scale of about 1/64.
        let code = |&value: &f32| {
            let magnitude = (value.abs() * 64.0).min(448.0);
            let below = e4m3[..0x7f].partition_point(|&other| other <= magnitude) as u8 - 1;
            below | if value < 0.0 { 0x80 } else { 0 }
        };
        Self {
            bf16: normals.iter().map(|&value| bf16::from_f32(value)).collect(),
            fp8: normals.iter().map(code).collect(),
            scales: (0..SCALES)
                .map(|_| (0.75 + 0.5 * random.unit()) / 64.0)
                .collect(),
            e4m3,
        }
    }

    /// A row of `columns` values of a BF16 matrix, not yet divided by [`spread`].
    pub fn bf16_row(&self, kind: Kind, number: usize, row: usize, columns: usize) -> Vec<f64> {
        let first = start(kind, number, TILE) + row * columns;
        (0..columns)
            .map(|i| f64::from(self.bf16[(first + i) % TILE].to_f32()))
            .collect()
    }

    /// A row of an FP8 matrix.
    pub fn fp8_row(&self, kind: Kind, number: usize, row: usize, columns: usize) -> Vec<f64> {
        let first = start(kind, number, TILE) + row * columns;
        let scale = start(kind, number, SCALES) + row / BLOCK * scale_columns(columns);
        let value = |i: usize| {
            let scale = self.scales[(scale + i / BLOCK) % SCALES];
            f64::from(self.e4m3[usize::from(self.fp8[(first + i) % TILE])]) * f64::from(scale)
        };
        (0..columns).map(value).collect()
    }

    /// BF16 matrices of `values` values each, one behind the other.
    pub fn bf16(&self, stream: &Arc<CudaStream>, of: &Matrices) -> Result<CudaSlice<bf16>> {
        copies(stream, &self.bf16, of)
    }

    /// The same of e4m3 codes.
    pub fn fp8(&self, stream: &Arc<CudaStream>, of: &Matrices) -> Result<CudaSlice<u8>> {
        copies(stream, &self.fp8, of)
    }

    /// The block scales of such matrices, f32.
    pub fn scales(&self, stream: &Arc<CudaStream>, of: &Matrices) -> Result<CudaSlice<f32>> {
        let [rows, columns] = of.dims;
        let dims = [rows / BLOCK, scale_columns(columns)];
        copies(stream, &self.scales, &Matrices { dims, ..of.clone() })
    }
}

/// Scales of a row of blocks, with those that cuBLASLt wants it padded with.
pub const fn scale_columns(columns: usize) -> usize {
    columns.div_ceil(BLOCK).next_multiple_of(4)
}

/// What sums of BF16 products are divided by, so that they stay about as large as the values are.
pub fn spread(columns: usize) -> f32 {
    1.0 / (columns as f32).sqrt()
}

/// Matrices with consecutive numbers.
#[derive(Clone)]
pub struct Matrices {
    pub kind: Kind,
    pub numbers: std::ops::Range<usize>,
    pub dims: [usize; 2],
}

/// Memory filled with matrices that repeat `tile`.
fn copies<T: DeviceRepr + Copy>(
    stream: &Arc<CudaStream>,
    tile: &[T],
    of: &Matrices,
) -> Result<CudaSlice<T>> {
    let values = of.dims[0] * of.dims[1];
    let source = stream.clone_htod(tile)?;
    // SAFETY: every value is written below.
    let mut all = unsafe { stream.alloc::<T>(values * of.numbers.len())? };
    for (index, number) in of.numbers.clone().enumerate() {
        let (mut from, mut done) = (start(of.kind, number, tile.len()), 0);
        while done < values {
            let count = (tile.len() - from).min(values - done);
            let at = index * values + done;
            stream.memcpy_dtod(
                &source.slice(from..from + count),
                &mut all.slice_mut(at..at + count),
            )?;
            (from, done) = (0, done + count);
        }
    }
    Ok(all)
}
