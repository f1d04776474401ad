//! Tensors of files.

use std::collections::HashMap;

use anyhow::{Result, bail};
use safetensors::{Dtype, SafeTensors};

/// A tensor: type, shape, bytes.
pub type Stored = (Dtype, Vec<usize>, Vec<u8>);

/// Tensors by name.
pub type Tensors = HashMap<String, Stored>;

/// The bytes of values, one after the other.
pub fn bytes_of<T: Copy, const B: usize>(values: &[T], bytes: fn(T) -> [u8; B]) -> Vec<u8> {
    values.iter().flat_map(|&value| bytes(value)).collect()
}

/// One more than the highest rank that a tensor named `prefix` and a number belongs to. The
/// highest, not the first gap: a rank behind a gap would be dropped without a word.
pub fn ranks_of(file: &SafeTensors<'_>, prefix: &str) -> Result<usize> {
    let mut ranks = 0;
    for name in file.names() {
        let rank = name.strip_prefix(prefix).unwrap_or_default();
        if rank.is_empty() || !rank.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        let Ok(rank) = rank.parse::<u32>() else {
            bail!("tensor {name}: rank {rank} is more than {}", u32::MAX)
        };
        ranks = ranks.max(rank as usize + 1);
    }
    Ok(ranks)
}
