//! Tensors of a file that is written.

use std::collections::HashMap;

use safetensors::Dtype;

/// A tensor: type, shape, bytes.
pub type Stored = (Dtype, Vec<usize>, Vec<u8>);

/// Tensors by name.
pub type Tensors = HashMap<String, Stored>;

/// The bytes of values, one after the other.
pub fn bytes_of<T: Copy, const B: usize>(values: &[T], bytes: fn(T) -> [u8; B]) -> Vec<u8> {
    values.iter().flat_map(|&value| bytes(value)).collect()
}
