//! A rank's experts: their weights, and the two multiplications.

use std::sync::Arc;

use anyhow::Result;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _};
use half::bf16;

use super::gemm::{Bf16Gemm, Fp8Gemm, Product, Rows};
use super::weights::{Kind, Matrices};
use super::{Format, Job, Shape};

pub struct Experts {
    gemm: Gemm,
    products: [Product; 2],
    /// What the addresses in `products` are of.
    _weights: Vec<Weights>,
}

enum Gemm {
    Bf16(Bf16Gemm),
    Fp8(Fp8Gemm),
}

enum Weights {
    Bf16(CudaSlice<bf16>),
    /// With block scales.
    Fp8(CudaSlice<u8>, CudaSlice<f32>),
}

impl Experts {
    pub fn new(
        stream: &Arc<CudaStream>,
        job: &Job<'_>,
        rank: usize,
        capacity: usize,
    ) -> Result<Self> {
        let Shape {
            hidden,
            intermediate,
            experts,
            ranks,
            ..
        } = job.shape;
        let local = experts / ranks;
        let numbers = rank * local..(rank + 1) * local;
        let of = |kind, rows, columns| Matrices {
            kind,
            numbers: numbers.clone(),
            dims: [rows, columns],
        };
        let matrices = [
            of(Kind::GateUp, 2 * intermediate, hidden),
            of(Kind::Down, hidden, intermediate),
        ];
        let (mut weights, mut products) = (Vec::new(), Vec::new());
        for matrix in &matrices {
            let both = match job.format {
                Format::Bf16 => Weights::Bf16(job.tiles.bf16(stream, matrix)?),
                Format::Fp8 => Weights::Fp8(
                    job.tiles.fp8(stream, matrix)?,
                    job.tiles.scales(stream, matrix)?,
                ),
            };
            let (at, scales) = match &both {
                Weights::Bf16(values) => (values.device_ptr(stream).0, 0),
                Weights::Fp8(codes, scales) => {
                    (codes.device_ptr(stream).0, scales.device_ptr(stream).0)
                }
            };
            let [n, k] = matrix.dims;
            products.push(Product {
                n,
                k,
                weights: at,
                weight_scales: scales,
            });
            weights.push(both);
        }
        let gemm = match job.format {
            Format::Bf16 => Gemm::Bf16(Bf16Gemm::new(stream, local)?),
            Format::Fp8 => Gemm::Fp8(Fp8Gemm::new(stream, capacity, hidden.max(intermediate))?),
        };
        Ok(Self {
            gemm,
            products: [products[0], products[1]],
            _weights: weights,
        })
    }

    /// Enqueues the product with gates and ups: BF16 `[capacity, 2 * intermediate]` at `out`.
    ///
    /// # Safety
    /// `rows` are of the format and the hidden size; with `out`, of the stream's device, unused by
    /// other streams.
    pub unsafe fn gate_up(&mut self, rows: &Rows<'_>, out: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.multiply(0, rows, out) }
    }

    /// Enqueues the product that leads back: BF16 `[capacity, hidden]` at `out`.
    ///
    /// # Safety
    /// As [`gate_up`](Self::gate_up), of the intermediate size.
    pub unsafe fn down(&mut self, rows: &Rows<'_>, out: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.multiply(1, rows, out) }
    }

    /// # Safety
    /// As the two above.
    unsafe fn multiply(&mut self, product: usize, rows: &Rows<'_>, out: u64) -> Result<()> {
        let product = &self.products[product];
        match &mut self.gemm {
            // SAFETY: the weights are of the product's size; the rest is the caller's promise.
            Gemm::Bf16(gemm) => unsafe { gemm.multiply(product, rows, out) },
            // SAFETY: as above.
            Gemm::Fp8(gemm) => unsafe { gemm.multiply(product, rows, out) },
        }
    }
}
