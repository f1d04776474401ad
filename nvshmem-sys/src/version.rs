//! Version that both halves share.

/// The version whose device code is linked into the kernels: major, minor, patch.
///
/// The device code reads a state that the host library writes, so the two must be one version.
pub const LINKED_VERSION: (u32, u32, u32) = (3, 4, 5);
