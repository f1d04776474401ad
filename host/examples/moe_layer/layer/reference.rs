//! The layer of one token in f64.

use std::thread;

use super::weights::{Kind, Tiles, spread};
use super::{Format, Shape};

/// A token whose result is compared.
#[derive(Clone)]
pub struct Sample {
    pub rank: usize,
    pub token: usize,
    pub experts: Vec<i32>,
    pub weights: Vec<f32>,
    /// What the GPUs made of it.
    pub y: Vec<f64>,
}

/// The largest ‖y − reference‖ / ‖reference‖ of the samples; NaN where one is not a number.
pub fn worst(tiles: &Tiles, shape: &Shape, format: Format, samples: &[Sample]) -> f64 {
    let threads = thread::available_parallelism().map_or(1, |count| count.get());
    let each = samples.len().div_ceil(threads).max(1);
    let of_chunk = |chunk: &[Sample]| {
        let errors = chunk
            .iter()
            .map(|sample| error(tiles, shape, format, sample));
        errors.fold(0.0, larger)
    };
    let of_chunk = &of_chunk;
    thread::scope(|scope| {
        let chunks = samples.chunks(each);
        let threads: Vec<_> = chunks
            .map(|chunk| scope.spawn(move || of_chunk(chunk)))
            .collect();
        let errors = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or(f64::NAN));
        errors.fold(0.0, larger)
    })
}

/// The larger one, and NaN if either is.
fn larger(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

fn error(tiles: &Tiles, shape: &Shape, format: Format, sample: &Sample) -> f64 {
    let wanted = layer(tiles, shape, format, sample);
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let apart = norm(&mut sample.y.iter().zip(&wanted).map(|(y, wanted)| y - wanted));
    apart / norm(&mut wanted.iter().copied())
}

/// A matrix of the experts, as the GPUs have it.
struct Weights<'a> {
    tiles: &'a Tiles,
    format: Format,
}

impl Weights<'_> {
    /// The product of an expert's matrix of `rows` rows and a vector.
    fn times(&self, kind: Kind, expert: usize, rows: usize, x: &[f64]) -> Vec<f64> {
        let divided = f64::from(spread(x.len()));
        let row = |row: usize| {
            let weights = match self.format {
                Format::Bf16 => self.tiles.bf16_row(kind, expert, row, x.len()),
                Format::Fp8 => self.tiles.fp8_row(kind, expert, row, x.len()),
            };
            divided * weights.iter().zip(x).map(|(w, x)| w * x).sum::<f64>()
        };
        (0..rows).map(row).collect()
    }
}

fn layer(tiles: &Tiles, shape: &Shape, format: Format, sample: &Sample) -> Vec<f64> {
    let weights = Weights { tiles, format };
    let x = tiles.bf16_row(Kind::X, sample.rank, sample.token, shape.hidden);
    let mut y = vec![0.0; shape.hidden];
    for (&expert, &weight) in sample.experts.iter().zip(&sample.weights) {
        let expert = expert as usize;
        let gate_up = weights.times(Kind::GateUp, expert, 2 * shape.intermediate, &x);
        let (gates, ups) = gate_up.split_at(shape.intermediate);
        let activated = gates
            .iter()
            .zip(ups)
            .map(|(g, u)| g / (1.0 + (-g).exp()) * u);
        let activated: Vec<_> = activated.collect();
        let outputs = weights.times(Kind::Down, expert, shape.hidden, &activated);
        for (sum, output) in y.iter_mut().zip(outputs) {
            *sum += f64::from(weight) * output;
        }
    }
    y
}
