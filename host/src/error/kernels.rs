//! Problems of kernels that were given.

use ferry_layout::FINGERPRINT_VARIABLE;

/// What is wrong with PTX that was given.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelsError {
    /// The text is no PTX for the driver's compiler.
    #[error("the kernels' text is not PTX: {reason}")]
    NotPtx {
        /// What it has or lacks.
        reason: String,
    },
    /// The PTX is for an architecture that is not known.
    #[error(
        "the kernels' .target is `{found}`, but it must be sm_80 or a later one, such as sm_90a"
    )]
    Target {
        /// What the `.target` line names.
        found: String,
    },
    /// A kernel that is needed is not there.
    #[error("the PTX for {target} has no kernel {kernel}")]
    Missing {
        /// Its name.
        kernel: String,
        /// What the PTX is for.
        target: String,
    },
    /// A kernel takes something else than it is given.
    #[error("the kernel {kernel} is given parameters of {wanted:?} bytes, but takes {found:?}")]
    Parameters {
        /// Its name.
        kernel: String,
        /// Bytes of each parameter that it is given.
        wanted: Vec<u64>,
        /// Bytes of each that it takes.
        found: Vec<u64>,
    },
    /// Kernels that reach ranks of other nodes are needed.
    #[cfg(feature = "nvshmem")]
    #[error("the PTX for {target} was built without NVSHMEM, which Group::nvshmem needs")]
    WithoutNvshmem {
        /// What the PTX is for.
        target: String,
    },
    /// The kernels were built from another memory layout than this library.
    #[error(
        "the kernels' {FINGERPRINT_VARIABLE} is {}, but this library's layout has {wanted:#018x}; \
         build both from one version of ferry",
        found.map_or_else(|| "missing".to_owned(), |found| format!("{found:#018x}"))
    )]
    Layout {
        /// The fingerprint here.
        wanted: u64,
        /// The one in the PTX; `None` if it has none.
        found: Option<u64>,
    },
}
