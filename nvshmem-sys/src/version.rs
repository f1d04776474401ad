//! Version shared by both halves.

/// Version of the device code that is linked into the kernels: major, minor, patch.
///
/// The device code reads state that the host library writes, so the two must have the same version.
pub const LINKED_VERSION: (u32, u32, u32) = (3, 4, 5);
