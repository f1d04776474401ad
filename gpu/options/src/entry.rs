//! The kernels, whose combine takes Ferry's own steps.
//!
//! Launch: like those of `ferry-kernels`.

ferry_gpu::kernels_with_epilogue!(ferry_gpu::layout::Steps);
