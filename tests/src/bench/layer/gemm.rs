//! Matrix multiplications of a layer by cuBLASLt: in BF16, and in FP8 with scales of blocks.
//!
//! Matrices are row-major here and column-major in cuBLASLt, which computes the transposed product:
//! `out[rows, n]ᵀ = weights[n, k] · rows[rows, k]ᵀ`.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use anyhow::{Context, Result};
use cudarc::cublaslt::{result as lt, sys};
use ferry::cuda::CudaDevice;
use ferry::{Device, DevicePtr, Stream};

use super::numbers::spread;

/// Bytes that cuBLASLt may work with.
const WORKSPACE: usize = 32 << 20;
/// `CUBLAS_OP_T` (cublas_v2.h).
const TRANSPOSED: i32 = 1;
/// `CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F` (cublasLt.h).
const OF_BLOCKS: i32 = 5;
/// `CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F` (cublasLt.h).
const OF_ROWS: i32 = 4;

/// A product of addresses: BF16 `out[rows, n] = rows · weightsᵀ / √k`.
#[derive(Clone, Copy)]
pub struct Product {
    pub rows: usize,
    pub n: usize,
    pub k: usize,
    /// `[n, k]` and `[rows, k]`, BF16 or e4m3.
    pub weights: u64,
    pub x: u64,
    /// If both are e4m3: f32 `[n / 128, k / 128]` with padded rows, and `[k / 128, rows]`.
    pub scales: Option<[u64; 2]>,
    pub out: u64,
}

/// cuBLASLt on a device.
pub struct Gemm {
    device: Arc<CudaDevice>,
    handle: sys::cublasLtHandle_t,
    preference: sys::cublasLtMatmulPreference_t,
    workspace: DevicePtr,
    /// The algorithm chosen for rows, `n`, `k`, and whether there are scales.
    chosen: HashMap<(usize, usize, usize, bool), sys::cublasLtMatmulAlgo_t>,
}

// SAFETY: cuBLASLt's handles may be used from any thread, and `&mut self` keeps it to one at a time.
unsafe impl Send for Gemm {}

/// Descriptions of a product.
struct Described {
    operation: sys::cublasLtMatmulDesc_t,
    weights: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
}

impl Described {
    fn new(product: &Product) -> Result<Self> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let Product {
            rows, n, k, scales, ..
        } = *product;
        let element = match scales {
            None => sys::cudaDataType::CUDA_R_16BF,
            Some(_) => sys::cudaDataType::CUDA_R_8F_E4M3,
        };
        let out = sys::cudaDataType::CUDA_R_16BF;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let described = Self {
            operation: lt::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F)?,
            weights: lt::create_matrix_layout(element, k as u64, n as u64, k as i64)?,
            x: lt::create_matrix_layout(element, k as u64, rows as u64, k as i64)?,
            out: lt::create_matrix_layout(out, n as u64, rows as u64, n as i64)?,
        };
        described.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, TRANSPOSED)?;
        if let Some([of_weights, of_rows]) = scales {
            described.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, OF_BLOCKS)?;
            described.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, OF_ROWS)?;
            described.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, of_weights)?;
            described.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, of_rows)?;
        }
        Ok(described)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: T) -> Result<()> {
        let (at, bytes) = (ptr::from_ref(&value).cast(), size_of::<T>());
        // SAFETY: the description lives, and `value` has the bytes that are said.
        unsafe { lt::set_matmul_desc_attribute(self.operation, attribute, at, bytes) }
            .with_context(|| format!("{attribute:?}"))
    }
}

impl Drop for Described {
    fn drop(&mut self) {
        // SAFETY: nobody else has them, and cuBLASLt keeps none after a call. If one cannot be destroyed, it
        // is lost with the process.
        unsafe {
            let _ = lt::destroy_matmul_desc(self.operation);
            for layout in [self.weights, self.x, self.out] {
                let _ = lt::destroy_matrix_layout(layout);
            }
        }
    }
}

impl Gemm {
    pub fn new(device: &Arc<CudaDevice>) -> Result<Self> {
        let _current = device.enter()?;
        let preference = lt::create_matmul_pref()?;
        let attribute =
            sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let bytes = ptr::from_ref(&WORKSPACE).cast();
        // SAFETY: the preference lives, and the attribute is a `size_t`.
        unsafe { lt::set_matmul_pref_attribute(preference, attribute, bytes, size_of::<usize>()) }?;
        Ok(Self {
            handle: lt::create_handle()?,
            preference,
            workspace: device.alloc(WORKSPACE as u64)?,
            chosen: HashMap::new(),
            device: device.clone(),
        })
    }

    /// Enqueues a product; of no rows nothing.
    ///
    /// # Safety
    /// The addresses have as many elements as the product says, of this device. Nothing writes or reads them
    /// otherwise until the stream has passed the product, and all products of a `Gemm` are on one stream.
    pub unsafe fn multiply(&mut self, stream: Stream, product: &Product) -> Result<()> {
        let Product { rows, n, k, .. } = *product;
        if rows == 0 {
            return Ok(());
        }
        let _current = self.device.enter()?;
        let of = Described::new(product)?;
        let key = (rows, n, k, product.scales.is_some());
        let algorithm = match self.chosen.get(&key) {
            Some(&chosen) => chosen,
            None => {
                let (handle, preference) = (self.handle, self.preference);
                // SAFETY: all of these live.
                let found = unsafe {
                    lt::get_matmul_algo_heuristic(
                        handle,
                        of.operation,
                        of.weights,
                        of.x,
                        of.out,
                        of.out,
                        preference,
                    )
                };
                let found =
                    found.with_context(|| format!("cuBLASLt, [{n}, {k}] by {rows} rows"))?;
                *self.chosen.entry(key).or_insert(found.algo)
            }
        };
        let (alpha, beta) = (spread(k), 0.0_f32);
        let at = |address: u64| ptr::without_provenance_mut::<c_void>(address as usize);
        // SAFETY: the matrices lie within their memory, by this function's contract; the workspace has so
        // many bytes, and products of one stream use it one after another.
        Ok(unsafe {
            lt::matmul(
                self.handle,
                of.operation,
                ptr::from_ref(&alpha).cast(),
                ptr::from_ref(&beta).cast(),
                at(product.weights),
                of.weights,
                at(product.x),
                of.x,
                at(product.out),
                of.out,
                at(product.out),
                of.out,
                &algorithm,
                at(self.workspace.address()),
                WORKSPACE,
                at(stream.handle()).cast(),
            )
        }?)
    }

    /// Frees the workspace.
    ///
    /// # Safety
    /// No product and no graph of one runs any more.
    pub unsafe fn free(self) -> Result<()> {
        // SAFETY: nobody else has them, and nothing uses them, by this function's contract.
        unsafe {
            lt::destroy_matmul_pref(self.preference)?;
            lt::destroy_handle(self.handle)?;
            Ok(self.device.free(self.workspace)?)
        }
    }
}
