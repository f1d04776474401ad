//! Structs that callers fill: their size comes first, and fields are only appended.
//!
//! A caller may be compiled with one version of the header and run with another version of the library. The
//! missing fields of a shorter struct are read as zero, which is each field's default. A longer struct is
//! accepted if its unknown bytes are zero; otherwise the caller asks for something that this version lacks.

use std::mem::MaybeUninit;

use crate::handle::require;
use crate::status::Failure;
use crate::status::ferry_status::FERRY_STRUCT_SIZE;

/// Most bytes of a struct in any version: a larger size means that it was not initialised.
const MOST_BYTES: usize = 1 << 16;

/// A struct with its size first.
///
/// # Safety
/// `repr(C)`; the first field is a `usize`; every pattern of bits is a value; no padding.
pub(crate) unsafe trait Sized0: Copy {
    /// Name in C.
    const NAME: &'static str;
    /// Bytes in the first version of the header that had the struct. Never changes.
    const FIRST_BYTES: usize;
}

/// Implements [`Sized0`], and checks at compile time that the struct has not become shorter.
macro_rules! sized {
    ($name:ident, $first_bytes:literal) => {
        const _: () = assert!(size_of::<$name>() >= $first_bytes);

        // SAFETY: a repr(C) struct of a size, numbers and pointers without padding: tests/c/frozen.c checks
        // all offsets.
        unsafe impl crate::structs::Sized0 for $name {
            const NAME: &'static str = stringify!($name);
            const FIRST_BYTES: usize = $first_bytes;
        }
    };
}
pub(crate) use sized;

/// Reads the size that the caller has set.
///
/// # Safety
/// The rule of pointers: `at` points to a size.
unsafe fn given_size<T: Sized0>(at: *const T, name: &str) -> Result<usize, Failure> {
    require(at, name)?;
    // SAFETY: the rule of pointers; the first field is the size: documented on `Sized0`.
    let size = unsafe { at.cast::<usize>().read() };
    if (T::FIRST_BYTES..=MOST_BYTES).contains(&size) {
        return Ok(size);
    }
    let text = format!(
        "{name}->size is {size}, but a {} has at least {} bytes, here {}; begin with its _INIT",
        T::NAME,
        T::FIRST_BYTES,
        size_of::<T>()
    );
    Err(Failure::new(FERRY_STRUCT_SIZE, text))
}

/// Copies the caller's struct into this version's.
///
/// # Safety
/// The rule of pointers: as many initialised bytes as the size says.
pub(crate) unsafe fn read<T: Sized0>(at: *const T, name: &str) -> Result<T, Failure> {
    // SAFETY: the rule of pointers.
    let size = unsafe { given_size(at, name)? };
    let known = size.min(size_of::<T>());
    // SAFETY: the rule of pointers: `size` bytes are initialised.
    let unknown = unsafe { std::slice::from_raw_parts(at.cast::<u8>().add(known), size - known) };
    if let Some(index) = unknown.iter().position(|&byte| byte != 0) {
        let text = format!(
            "{name}->size is {size}, and byte {} is set, but this library's {} ends at {known}: it was built \
             from an older version than the program's ferry.h",
            known + index,
            T::NAME
        );
        return Err(Failure::new(FERRY_STRUCT_SIZE, text));
    }
    let mut value: T = empty();
    // SAFETY: `known` bytes are at both places, which are apart.
    unsafe {
        std::ptr::copy_nonoverlapping(at.cast::<u8>(), (&raw mut value).cast(), known);
    }
    Ok(value)
}

/// A struct of zeros.
pub(crate) fn empty<T: Sized0>() -> T {
    // SAFETY: every pattern of bits is a value: documented on `Sized0`.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// Checks the size of a struct that is to be written.
///
/// # Safety
/// The rule of pointers: `at` points to a size.
pub(crate) unsafe fn require_room<T: Sized0>(at: *mut T, name: &str) -> Result<(), Failure> {
    // SAFETY: the rule of pointers.
    unsafe { given_size(at, name) }.map(drop)
}

/// Writes as much of `value` as the caller's struct holds, then zeros, and keeps the caller's size.
///
/// # Safety
/// The rule of pointers: as many bytes as the size says may be written.
pub(crate) unsafe fn write<T: Sized0>(at: *mut T, name: &str, value: T) -> Result<(), Failure> {
    // SAFETY: the rule of pointers.
    let size = unsafe { given_size(at, name)? };
    let known = size.min(size_of::<T>());
    // SAFETY: `known` bytes are at both places, which are apart; `size` bytes may be written.
    unsafe {
        at.cast::<u8>().add(known).write_bytes(0, size - known);
        std::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), at.cast(), known);
        at.cast::<usize>().write(size);
    }
    Ok(())
}

/// Converts a field that must be 0 or 1.
pub(crate) fn flag(name: &str, value: u32) -> Result<bool, Failure> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Failure::value(name, other, "it must be 0 or 1")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Known {
        size: usize,
        first: u64,
        appended: u64,
    }
    sized!(Known, 16);

    /// A later version of [`Known`].
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Later {
        known: Known,
        more: u64,
    }

    fn later(more: u64) -> Later {
        let known = Known {
            size: size_of::<Later>(),
            first: 1,
            appended: 2,
        };
        Later { known, more }
    }

    #[test]
    fn a_struct_of_an_earlier_version_has_zeros_behind_its_end() {
        let earlier = [16_usize, 5, 9];
        // SAFETY: the array has as many bytes as the size says.
        let read = unsafe { read(earlier.as_ptr().cast::<Known>(), "k") }.unwrap();
        assert_eq!((read.first, read.appended), (5, 0));
    }

    #[test]
    fn a_struct_of_a_later_version_is_taken_while_it_asks_for_nothing_new() {
        let value = later(0);
        // SAFETY: `value` has as many bytes as the size says.
        assert!(unsafe { read((&raw const value).cast::<Known>(), "k") }.is_ok());
        let value = later(1 << 40);
        // SAFETY: as above.
        let refused = unsafe { read((&raw const value).cast::<Known>(), "k") }.unwrap_err();
        assert_eq!(refused.status, FERRY_STRUCT_SIZE);
        assert!(refused.text.contains("byte 29 is set"), "{}", refused.text);
    }

    #[test]
    fn sizes_that_no_version_has_are_refused() {
        for size in [0, 8, 15, MOST_BYTES + 1, usize::MAX] {
            let value = Known {
                size,
                first: 1,
                appended: 2,
            };
            // SAFETY: the size is refused, and nothing else is read.
            let refused = unsafe { read(&value, "k") }.unwrap_err();
            assert_eq!(refused.status, FERRY_STRUCT_SIZE, "{size}");
        }
    }

    #[test]
    fn what_is_written_keeps_the_callers_size() {
        let value = Known {
            size: 0,
            first: 3,
            appended: 4,
        };
        let mut earlier = [16_usize, 5, 9];
        // SAFETY: the array has as many bytes as the size says.
        unsafe { write(earlier.as_mut_ptr().cast::<Known>(), "k", value) }.unwrap();
        assert_eq!(earlier, [16, 3, 9]);
        let mut longer = later(7);
        // SAFETY: `longer` has as many bytes as the size says.
        unsafe { write((&raw mut longer).cast::<Known>(), "k", value) }.unwrap();
        assert_eq!(
            (longer.known.size, longer.known.appended, longer.more),
            (32, 4, 0)
        );
    }
}
