//! The kernels, whose combine takes the steps that Ferry knows.
//!
//! Launch: as those of `ferry-kernels`.

ferry_gpu::kernels_with_epilogue!(ferry_gpu::layout::Steps);
