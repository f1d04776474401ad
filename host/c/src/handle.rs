//! Handles: what stands behind the opaque pointers.

use std::ptr;

use crate::status::Failure;
use crate::status::ferry_status::{FERRY_BAD_HANDLE, FERRY_NULL};

/// A kind of handle. C sees a pointer to the implementing type, which is opaque and has no values.
pub(crate) trait Opaque: Sized {
    /// What a handle holds. Any thread may call with it.
    type Value: Send + Sync;
    /// The name of the kind in C.
    const NAME: &'static str;
    /// A word that only handles of this kind begin with.
    const MAGIC: u64;
}

/// The word of a handle that was given back, for as long as its memory is not used again.
const GIVEN_BACK: u64 = u64::from_le_bytes(*b"ferry/--");

/// What a pointer to an opaque type points to. `repr(C)`: the magic word of each kind stands first.
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
    // SAFETY: the caller's promise.
    unsafe { place.write(Box::into_raw(handle).cast()) };
}

/// Checks where a handle, or an array of handles, is to be stored, before anything is made; nulls it.
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
        // SAFETY: the caller's promise.
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
    // SAFETY: each handle begins with such a word, by the caller's promise.
    let magic = unsafe { handle.cast::<u64>().read() };
    if magic != O::MAGIC {
        let what = match magic {
            GIVEN_BACK => "was given back already",
            _ => "is of another kind, or no handle at all",
        };
        let text = format!("{name} {what}; wanted a {}", O::NAME);
        return Err(Failure::new(FERRY_BAD_HANDLE, text));
    }
    // SAFETY: it is a handle of this kind, and lives by the caller's promise.
    Ok(unsafe { &(*handle).value })
}

/// Takes the handle at `place` back: its value, and null in its place.
///
/// # Safety
/// The rule of handles, and that of pointers for `place`. No reference to the value is in use.
pub(crate) unsafe fn take<O: Opaque>(place: *mut *mut O, name: &str) -> Result<O::Value, Failure> {
    require(place, name)?;
    // SAFETY: the caller's promise.
    let handle = unsafe { place.read() };
    // SAFETY: the caller's promise.
    unsafe { get(handle, name)? };
    let handle = handle.cast::<Handle<O::Value>>();
    // SAFETY: `get` found a handle of this kind, which nobody else uses. The word is written so that it is
    // there when a call is made with the handle by mistake.
    unsafe { ptr::addr_of_mut!((*handle).magic).write_volatile(GIVEN_BACK) };
    // SAFETY: `put` made it of such a box, and nobody uses it any more.
    let Handle { value, .. } = *unsafe { Box::from_raw(handle) };
    // SAFETY: the caller's promise.
    unsafe { place.write(ptr::null_mut()) };
    Ok(value)
}

/// Checks a pointer: not null, and aligned.
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
    // SAFETY: the caller's promise; the value that is there needs no drop.
    unsafe { place.write(value) };
    Ok(())
}

/// The values of an array of plain numbers; `pointer` may be null if there are none.
///
/// # Safety
/// The rule of pointers, for as long as the result is used: `count` values.
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
        return Err(Failure::value(name, count, "so many values are no array"));
    }
    // SAFETY: the caller's promise.
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
