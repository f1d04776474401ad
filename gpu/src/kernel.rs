//! Declaration of kernels.

/// Declares a kernel: the host launches it by its name, and passes its one argument by value.
///
/// ```text
/// ferry_gpu::kernel! {
///     /// Adds one to a word.
///     ///
///     /// # Safety
///     /// The word is this kernel's alone.
///     add_one(word: Word) { .. }
/// }
/// ```
#[cfg(not(ferry_nvvm))]
#[macro_export]
macro_rules! kernel {
    ($(#[$attribute:meta])* $name:ident($argument:ident: $type:ty) $body:block) => {
        $(#[$attribute])*
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name($argument: $type) $body
    };
}

/// Declares a kernel for `rustc_codegen_nvvm`, which marks kernels by an attribute.
#[cfg(ferry_nvvm)]
#[macro_export]
macro_rules! kernel {
    ($(#[$attribute:meta])* $name:ident($argument:ident: $type:ty) $body:block) => {
        $(#[$attribute])*
        #[$crate::cuda_std::kernel]
        #[allow(improper_ctypes_definitions)]
        pub unsafe fn $name($argument: $type) $body
    };
}
