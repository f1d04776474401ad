//! Helpers for unit tests.

use half::bf16;

/// A group of `length` elements: those given, then zeros.
pub fn group(elements: &[f32], length: usize) -> Vec<bf16> {
    let mut group = vec![bf16::ZERO; length];
    for (place, element) in group.iter_mut().zip(elements) {
        *place = bf16::from_f32(*element);
    }
    group
}
