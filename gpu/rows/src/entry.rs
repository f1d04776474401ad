//! The kernels, whose combine takes Ferry's own steps.
//!
//! Launch: like those of `ferry-kernels`.

ferry_gpu::kernels_of_rounds!(as_they_came, ferry_gpu::layout::Steps);
ferry_gpu::give_up_kernels!(as_they_came);
ferry_gpu::counts_kernel!(as_they_came);
