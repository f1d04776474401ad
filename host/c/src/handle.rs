//! Handles: the values behind opaque pointers.

use std::ptr;

use crate::status::Failure;
use crate::status::ferry_status::{FERRY_BAD_HANDLE, FERRY_NULL};

/// A kind of handle. C sees a pointer to the implementing type, which is opaque and has no values.
pub(crate) trait Opaque: Sized {
    /// Value of a handle. Any thread may call with it.
    type Value: Send + Sync;
    /// Name of the kind in C.
    const NAME: &'static str;
    /// First word of handles of this kind, and of no other.
    const MAGIC: u64;
}

/// First word of a handle that was freed, until its memory is used again.
const FREED: u64 = u64::from_le_bytes(*b"ferry/--");

/// Target of a pointer to an opaque type. `repr(C)`: the magic word of each kind comes first.
#[repr(C)]
struct Handle<T> {
    magic: u64,
    value: T,
}

/// Makes a handle and stores it at `place`, which [`require_place`] checked.
///
/// # Safety
/// `place` may be written.
pub(crate) unsafe fn put<O: Opaque>(place: *mut *mut O, value: O::Value) {
    let handle = Box::new(Handle {
        magic: O::MAGIC,
        value,
    });
    // SAFETY: `place` may be written: documented on this function.
    unsafe { place.write(Box::into_raw(handle).cast()) };
}

/// Stores a handle of what `make` returns; calls it only if `place` may be written.
///
/// # Safety
/// The rule of pointers.
pub(crate) unsafe fn make<O: Opaque>(
    place: *mut *mut O,
    name: &str,
    make: impl FnOnce() -> Result<O::Value, Failure>,
) -> Result<(), Failure> {
    // SAFETY: the rule of pointers.
    unsafe { require_place(place, name, 1)? };
    let value = make()?;
    // SAFETY: `require_place` checked `place`.
    unsafe { put(place, value) };
    Ok(())
}

/// Checks the place of a handle, or of an array of handles, before anything is made, and sets it to null.
///
/// # Safety
/// The rule of pointers: `place` is null or points to `count` pointers.
pub(crate) unsafe fn require_place<O: Opaque>(
    place: *mut *mut O,
    name: &str,
    count: usize,
) -> Result<(), Failure> {
    require(place, name)?;
    for index in 0..count {
        // SAFETY: the rule of pointers: `place` points to `count` pointers.
        unsafe { place.add(index).write(ptr::null_mut()) };
    }
    Ok(())
}

/// The value of a handle.
///
/// # Safety
/// The rule of handles, for as long as the result is used.
pub(crate) unsafe fn get<'a, O: Opaque>(
    handle: *const O,
    name: &str,
) -> Result<&'a O::Value, Failure> {
    let handle = handle.cast::<Handle<O::Value>>();
    require(handle, name)?;
    // SAFETY: the rule of handles: each begins with such a word.
    let magic = unsafe { handle.cast::<u64>().read() };
    if magic != O::MAGIC {
        let what = match magic {
            FREED => "was freed already",
            _ => "is a handle of another kind, or none at all",
        };
        let text = format!("{name} {what}; wanted a {}", O::NAME);
        return Err(Failure::new(FERRY_BAD_HANDLE, text));
    }
    // SAFETY: the word was that of this kind, and by the rule of handles it lives.
    Ok(unsafe { &(*handle).value })
}

/// Frees the handle at `place`, sets `place` to null and returns the value.
///
/// # Safety
/// The rule of handles, and that of pointers for `place`. No reference to the value is in use.
pub(crate) unsafe fn take<O: Opaque>(place: *mut *mut O, name: &str) -> Result<O::Value, Failure> {
    require(place, name)?;
    // SAFETY: the rule of pointers.
    let handle = unsafe { place.read() };
    // SAFETY: the rule of handles.
    unsafe { get(handle, name)? };
    let handle = handle.cast::<Handle<O::Value>>();
    // Volatile, so that a later call with the freed handle by mistake finds the word.
    // SAFETY: `get` found a handle of this kind, and no reference to it is in use.
    unsafe { ptr::addr_of_mut!((*handle).magic).write_volatile(FREED) };
    // SAFETY: `put` made it from such a box, and no reference to it is in use.
    let Handle { value, .. } = *unsafe { Box::from_raw(handle) };
    // SAFETY: the rule of pointers.
    unsafe { place.write(ptr::null_mut()) };
    Ok(value)
}

/// Checks that a pointer is aligned and not null.
pub(crate) fn require<T>(pointer: *const T, name: &str) -> Result<(), Failure> {
    if pointer.is_null() {
        return Err(Failure::new(FERRY_NULL, format!("{name} is NULL")));
    }
    if !pointer.is_aligned() {
        return Err(Failure::value(
            name,
            format!("{pointer:p}"),
            "it is not aligned",
        ));
    }
    Ok(())
}

/// Stores a result.
///
/// # Safety
/// The rule of pointers.
pub(crate) unsafe fn store<T>(place: *mut T, name: &str, value: T) -> Result<(), Failure> {
    require(place, name)?;
    // SAFETY: the rule of pointers. The old value is C's and needs no drop.
    unsafe { place.write(value) };
    Ok(())
}

/// The `count` values of an array; `pointer` may be null if `count` is 0.
///
/// # Safety
/// The rule of pointers, for as long as the result is used.
pub(crate) unsafe fn values<'a, T: Copy>(
    pointer: *const T,
    name: &str,
    count: usize,
) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    require(pointer, name)?;
    if count > isize::MAX as usize / size_of::<T>() {
        return Err(Failure::value(name, count, "no array has so many values"));
    }
    // SAFETY: the rule of pointers: `count` values, which were checked to be an array's.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct One;
    struct Other;

    impl Opaque for One {
        type Value = Vec<u8>;
        const NAME: &'static str = "one";
        const MAGIC: u64 = 1;
    }

    impl Opaque for Other {
        type Value = u8;
        const NAME: &'static str = "other";
        const MAGIC: u64 = 2;
    }

    #[test]
    fn handles_come_back_once_and_only_as_their_kind() {
        let mut place: *mut One = ptr::null_mut();
        // SAFETY: `place` lives.
        unsafe { put(&mut place, vec![7]) };
        // SAFETY: the handle lives.
        assert_eq!(unsafe { get(place, "h") }.unwrap(), &[7]);
        // SAFETY: each handle begins with a magic word.
        let wrong = unsafe { get(place.cast::<Other>(), "h") }.unwrap_err();
        assert_eq!(wrong.status, FERRY_BAD_HANDLE);
        assert!(wrong.text.contains("wanted a other"), "{}", wrong.text);
        // SAFETY: the handle lives, and nobody has a reference.
        assert_eq!(unsafe { take(&mut place, "h") }.unwrap(), [7]);
        // SAFETY: null is a handle that may be asked about.
        let gone = unsafe { take(&mut place, "h") }.unwrap_err();
        assert_eq!(gone.status, FERRY_NULL);
    }
}
