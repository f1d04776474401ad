//! Problems with the user's kernels.

use ferry_layout::FINGERPRINT_VARIABLE;

/// Problem with the given PTX.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelsError {
    /// The text is no PTX for the driver's compiler.
    #[error("the kernels' text is not PTX: {reason}")]
    NotPtx {
        /// The part that it has or lacks.
        reason: String,
    },
    /// The PTX is for an architecture that is not known.
    #[error(
        "the kernels' .target is `{found}`, but it must be sm_80 or a later one, such as sm_90a"
    )]
    Target {
        /// Target of the `.target` line.
        found: String,
    },
    /// A required kernel is missing.
    #[error("the PTX for {target} has no kernel {kernel}")]
    Missing {
        /// Its name.
        kernel: String,
        /// Target of the PTX.
        target: String,
    },
    /// A kernel takes other parameters than it is passed.
    #[error("the kernel {kernel} is given parameters of {wanted:?} bytes, but takes {found:?}")]
    Parameters {
        /// Its name.
        kernel: String,
        /// Bytes of each parameter that is passed.
        wanted: Vec<u64>,
        /// Bytes of each parameter that it takes.
        found: Vec<u64>,
    },
    /// The kernels cannot reach ranks of other nodes.
    #[cfg(feature = "nvshmem")]
    #[error("the PTX for {target} was built without NVSHMEM, which an NVSHMEM group needs")]
    WithoutNvshmem {
        /// Target of the PTX.
        target: String,
    },
    /// The kernels were built from another memory layout than this library.
    #[error(
        "the kernels' {FINGERPRINT_VARIABLE} is {}, but this library's layout has {wanted:#018x}; \
         build both from one version of ferry",
        found.map_or_else(|| "missing".to_owned(), |found| format!("{found:#018x}"))
    )]
    Layout {
        /// Fingerprint of this library.
        wanted: u64,
        /// Fingerprint in the PTX; `None` if it has none.
        found: Option<u64>,
    },
}
