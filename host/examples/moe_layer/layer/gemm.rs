//! The experts' matrix multiplications: cuBLAS in BF16, cuBLASLt in FP8.
//!
//! Both want the number of each expert's rows on the host. Matrices are row-major here and
//! column-major in cuBLAS, which so computes the transposed product: `out[rows, n]ᵀ = weights[n, k]
//! · rows[rows, k]ᵀ`.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use anyhow::{Context, Result};
use cudarc::cublas::{CudaBlas, sys as blas_sys};
use cudarc::cublaslt::{result as lt, sys as lt_sys};
use cudarc::driver::sys::{self as cuda, CUDA_MEMCPY2D_st, CUmemorytype};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _, DevicePtrMut as _};

use super::weights::{BLOCK, scale_columns, spread};

/// Bytes that cuBLASLt may work with.
const WORKSPACE: usize = 32 << 20;

/// One of the two multiplications: every expert's `[n, k]`.
#[derive(Clone, Copy)]
pub struct Product {
    pub n: usize,
    pub k: usize,
    /// `[experts, n, k]`.
    pub weights: u64,
    /// FP8: f32 `[experts, n / 128, k / 128]`, rows padded.
    pub weight_scales: u64,
}

/// Rows by expert.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// `[capacity, k]`.
    pub at: u64,
    /// FP8: f32 `[k / 128, capacity]`.
    pub scales: u64,
    pub capacity: usize,
    /// The first row of each expert, and the end of the last.
    pub offsets: &'a [u32],
}

impl Rows<'_> {
    /// Number, first row and rows of each expert that has some.
    fn experts(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let ends = self.offsets.windows(2).enumerate();
        let rows =
            ends.map(|(expert, ends)| (expert, ends[0] as usize, (ends[1] - ends[0]) as usize));
        rows.filter(|&(_, _, rows)| rows > 0)
    }
}

fn address<T>(slice: &CudaSlice<T>, stream: &Arc<CudaStream>) -> u64 {
    slice.device_ptr(stream).0
}

/// BF16: all experts in one call.
pub struct Bf16Gemm {
    stream: Arc<CudaStream>,
    blas: CudaBlas,
    /// Addresses of all experts' weights, rows and outputs, which cuBLAS reads on the device.
    pointers: CudaSlice<u64>,
}

impl Bf16Gemm {
    pub fn new(stream: &Arc<CudaStream>, experts: usize) -> Result<Self> {
        Ok(Self {
            blas: CudaBlas::new(stream.clone())?,
            pointers: stream.alloc_zeros(3 * experts)?,
            stream: stream.clone(),
        })
    }

    /// Enqueues `out[rows, n] = rows · weightsᵀ / √k`, BF16.
    ///
    /// # Safety
    /// The addresses are of as many values of BF16, of the stream's device, unused by other streams.
    pub unsafe fn multiply(&mut self, product: &Product, rows: &Rows<'_>, out: u64) -> Result<()> {
        let Product { n, k, weights, .. } = *product;
        let experts: Vec<_> = rows.experts().collect();
        let count = experts.len();
        if count == 0 {
            return Ok(());
        }
        let of = |address: &dyn Fn(usize, usize) -> u64| -> Vec<u64> {
            experts
                .iter()
                .map(|&(expert, first, _)| address(expert, first))
                .collect()
        };
        let pointers = [
            of(&|expert, _| weights + (expert * n * k * 2) as u64),
            of(&|_, first| rows.at + (first * k * 2) as u64),
            of(&|_, first| out + (first * n * 2) as u64),
        ]
        .concat();
        self.stream
            .memcpy_htod(&pointers, &mut self.pointers.slice_mut(..3 * count))?;
        let base = ptr::without_provenance::<u64>(address(&self.pointers, &self.stream) as usize);
        let list = |index: usize| base.wrapping_add(index * count);
        let all = |value: usize| vec![value as c_int; count];
        let (ns, ks, ones) = (all(n), all(k), all(1));
        let counts: Vec<_> = experts.iter().map(|&(_, _, rows)| rows as c_int).collect();
        let (alpha, beta) = (vec![spread(k); count], vec![0.0_f32; count]);
        let transposed = vec![blas_sys::cublasOperation_t::CUBLAS_OP_T; count];
        let as_is = vec![blas_sys::cublasOperation_t::CUBLAS_OP_N; count];
        let bf16 = blas_sys::cudaDataType_t::CUDA_R_16BF;
        // SAFETY: the lists on the host have `count` entries, as have those on the device, which this
        // stream wrote. Each matrix lies within its tensor: the caller's promise.
        let status = unsafe {
            blas_sys::cublasGemmGroupedBatchedEx(
                *self.blas.handle(),
                transposed.as_ptr(),
                as_is.as_ptr(),
                ns.as_ptr(),
                counts.as_ptr(),
                ks.as_ptr(),
                alpha.as_ptr().cast(),
                list(0).cast(),
                bf16,
                ks.as_ptr(),
                list(1).cast(),
                bf16,
                ks.as_ptr(),
                beta.as_ptr().cast(),
                list(2).cast(),
                bf16,
                ns.as_ptr(),
                count as c_int,
                ones.as_ptr(),
                blas_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            )
        };
        status.result().context("cublasGemmGroupedBatchedEx")
    }

    /// Enqueues `out[rows, n] = x[rows, k] · weights[n, k]ᵀ / √k`, f32.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply); `out` is f32.
    pub unsafe fn logits(&self, product: &Product, rows: usize, x: u64, out: u64) -> Result<()> {
        let Product { n, k, weights, .. } = *product;
        let (alpha, beta) = (spread(k), 0.0_f32);
        let bf16 = blas_sys::cudaDataType_t::CUDA_R_16BF;
        let at = |address: u64| ptr::without_provenance_mut::<c_void>(address as usize);
        // SAFETY: the matrices lie within their tensors: the caller's promise.
        unsafe {
            cudarc::cublas::result::gemm_ex(
                *self.blas.handle(),
                blas_sys::cublasOperation_t::CUBLAS_OP_T,
                blas_sys::cublasOperation_t::CUBLAS_OP_N,
                n as c_int,
                rows as c_int,
                k as c_int,
                ptr::from_ref(&alpha).cast(),
                at(weights),
                bf16,
                k as c_int,
                at(x),
                bf16,
                k as c_int,
                ptr::from_ref(&beta).cast(),
                at(out),
                blas_sys::cudaDataType_t::CUDA_R_32F,
                n as c_int,
                blas_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                blas_sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        }
        .context("cublasGemmEx")
    }
}

/// FP8 with a scale for 128 columns of a row and for 128 × 128 weights: a call an expert.
pub struct Fp8Gemm {
    stream: Arc<CudaStream>,
    handle: lt_sys::cublasLtHandle_t,
    description: lt_sys::cublasLtMatmulDesc_t,
    preference: lt_sys::cublasLtMatmulPreference_t,
    workspace: CudaSlice<u8>,
    /// Each expert's scales without gaps, as cuBLASLt wants them: f32 `[k / 128, rows of the expert]`.
    packed: CudaSlice<f32>,
    /// What cuBLASLt chose for `n`, rows and `k`.
    chosen: HashMap<(usize, usize, usize), lt_sys::cublasLtMatmulAlgo_t>,
}

/// Sets an attribute of a description.
macro_rules! describe {
    ($description:expr, $attribute:ident, $value:expr) => {{
        let value = $value;
        let attribute = lt_sys::cublasLtMatmulDescAttributes_t::$attribute;
        let (at, bytes) = (ptr::from_ref(&value).cast(), size_of_val(&value));
        // SAFETY: the description lives, and `value` is of the attribute's type.
        unsafe { lt::set_matmul_desc_attribute($description, attribute, at, bytes) }
            .context(stringify!($attribute))
    }};
}

impl Fp8Gemm {
    /// `rows` of at most `columns` values.
    pub fn new(stream: &Arc<CudaStream>, rows: usize, columns: usize) -> Result<Self> {
        let (transposed, as_is) = (
            blas_sys::cublasOperation_t::CUBLAS_OP_T,
            blas_sys::cublasOperation_t::CUBLAS_OP_N,
        );
        let description = lt::create_matmul_desc(
            lt_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            lt_sys::cudaDataType::CUDA_R_32F,
        )?;
        // `CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F`, and `_VEC128_32F` (cublasLt.h).
        let (of_blocks, of_rows) = (5_i32, 4_i32);
        describe!(description, CUBLASLT_MATMUL_DESC_TRANSA, transposed)?;
        describe!(description, CUBLASLT_MATMUL_DESC_TRANSB, as_is)?;
        describe!(description, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, of_blocks)?;
        describe!(description, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, of_rows)?;
        let preference = lt::create_matmul_pref()?;
        let attribute =
            lt_sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let bytes = ptr::from_ref(&WORKSPACE).cast();
        // SAFETY: the preference lives, and the attribute is a `size_t`.
        unsafe { lt::set_matmul_pref_attribute(preference, attribute, bytes, size_of::<usize>()) }?;
        Ok(Self {
            handle: lt::create_handle()?,
            description,
            preference,
            workspace: stream.alloc_zeros(WORKSPACE)?,
            packed: stream.alloc_zeros(rows * columns.div_ceil(BLOCK))?,
            chosen: HashMap::new(),
            stream: stream.clone(),
        })
    }

    /// Enqueues `out[rows, n] = rows · weightsᵀ / √k`, BF16.
    ///
    /// # Safety
    /// The addresses are of as many values of their types, of the stream's device, unused by other streams.
    pub unsafe fn multiply(&mut self, product: &Product, rows: &Rows<'_>, out: u64) -> Result<()> {
        let groups = product.k / BLOCK;
        let packed = address(&self.packed, &self.stream);
        for (_, first, count) in rows.experts() {
            let copy = CUDA_MEMCPY2D_st {
                srcXInBytes: 0,
                srcY: 0,
                srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
                srcHost: ptr::null(),
                srcDevice: rows.scales + (first * 4) as u64,
                srcArray: ptr::null_mut(),
                srcPitch: rows.capacity * 4,
                dstXInBytes: 0,
                dstY: 0,
                dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
                dstHost: ptr::null_mut(),
                dstDevice: packed + (first * groups * 4) as u64,
                dstArray: ptr::null_mut(),
                dstPitch: count * 4,
                WidthInBytes: count * 4,
                Height: groups,
            };
            // SAFETY: columns `first` to `first + count` of the scales, and as much packed memory.
            unsafe { cuda::cuMemcpy2DAsync_v2(&copy, self.stream.cu_stream()) }.result()?;
        }
        for (expert, first, count) in rows.experts() {
            let block_scales = product.n / BLOCK * scale_columns(product.k);
            let one = Expert {
                weights: product.weights + (expert * product.n * product.k) as u64,
                weight_scales: product.weight_scales + (expert * block_scales * 4) as u64,
                rows: rows.at + (first * product.k) as u64,
                row_scales: packed + (first * groups * 4) as u64,
                out: out + (first * product.n * 2) as u64,
                count,
            };
            // SAFETY: the caller's promise; `packed` has these rows' scales.
            unsafe { self.multiply_one(product, &one) }.with_context(|| {
                format!(
                    "cuBLASLt, FP8 [{}, {}] by {count} rows",
                    product.n, product.k
                )
            })?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`multiply`](Self::multiply), for one expert.
    unsafe fn multiply_one(&mut self, product: &Product, one: &Expert) -> Result<()> {
        let Product { n, k, .. } = *product;
        describe!(
            self.description,
            CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
            one.weight_scales
        )?;
        describe!(
            self.description,
            CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
            one.row_scales
        )?;
        let e4m3 = lt_sys::cudaDataType::CUDA_R_8F_E4M3;
        let weights = lt::create_matrix_layout(e4m3, k as u64, n as u64, k as i64)?;
        let rows = lt::create_matrix_layout(e4m3, k as u64, one.count as u64, k as i64)?;
        let bf16 = lt_sys::cudaDataType::CUDA_R_16BF;
        let out = lt::create_matrix_layout(bf16, n as u64, one.count as u64, n as i64)?;
        let key = (n, one.count, k);
        if !self.chosen.contains_key(&key) {
            // SAFETY: all of these live.
            let found = unsafe {
                let (handle, description) = (self.handle, self.description);
                lt::get_matmul_algo_heuristic(
                    handle,
                    description,
                    weights,
                    rows,
                    out,
                    out,
                    self.preference,
                )
            }?;
            self.chosen.insert(key, found.algo);
        }
        let (alpha, beta) = (spread(k), 0.0_f32);
        let at = |address: u64| ptr::without_provenance_mut::<c_void>(address as usize);
        // SAFETY: the matrices lie within their tensors: the caller's promise. The layouts are destroyed
        // after the call, which keeps none.
        unsafe {
            let workspace = self.workspace.device_ptr_mut(&self.stream).0;
            lt::matmul(
                self.handle,
                self.description,
                ptr::from_ref(&alpha).cast(),
                ptr::from_ref(&beta).cast(),
                at(one.weights),
                weights,
                at(one.rows),
                rows,
                at(one.out),
                out,
                at(one.out),
                out,
                &self.chosen[&key],
                at(workspace),
                WORKSPACE,
                self.stream.cu_stream().cast(),
            )?;
            for layout in [weights, rows, out] {
                lt::destroy_matrix_layout(layout)?;
            }
        }
        Ok(())
    }
}

impl Drop for Fp8Gemm {
    fn drop(&mut self) {
        // SAFETY: nobody else has them. What fails is lost with the process.
        unsafe {
            let _ = lt::destroy_matmul_desc(self.description);
            let _ = lt::destroy_matmul_pref(self.preference);
            let _ = lt::destroy_handle(self.handle);
        }
    }
}

/// Addresses of one expert's multiplication.
struct Expert {
    weights: u64,
    weight_scales: u64,
    rows: u64,
    row_scales: u64,
    out: u64,
    count: usize,
}
