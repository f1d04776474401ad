//! The kernels, whose combine takes Ferry's own steps.
//!
//! Launch: like those of `ferry-kernels`.

ferry_gpu::kernels_of_rounds!(as_they_came, ferry_gpu::layout::Steps);
