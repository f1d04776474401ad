//! Kinds of options that a set of kernels is made for: the others' fields are constants.
//!
//! The kernels read their options where the host passed them. A copy with constants would hold all its fields
//! in registers from the start.

use core::hint::assert_unchecked;

use ferry_layout::{CombineOptions, DispatchOptions};

/// Lets the compiler take fields that are constants in `kind` for those constants.
///
/// # Safety
/// `options` are `kind`.
#[inline(always)]
pub unsafe fn assume_dispatch(options: &DispatchOptions, kind: &DispatchOptions) {
    // SAFETY: they are the same: documented on this function.
    unsafe { assert_unchecked(options == kind) };
}

/// Lets the compiler take fields that are constants in `kind` for those constants.
///
/// # Safety
/// `options` are `kind`.
#[inline(always)]
pub unsafe fn assume_combine(options: &CombineOptions, kind: &CombineOptions) {
    let (initial, constant) = (options.rows.initial, kind.rows.initial);
    // SAFETY: they are the same: documented on this function. The compiler compares an array as one number,
    // from which nothing follows for a load of one element, so the elements come again.
    unsafe {
        assert_unchecked(options == kind);
        assert_unchecked(initial[0] == constant[0]);
        assert_unchecked(initial[1] == constant[1]);
    }
}
