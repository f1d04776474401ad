//! Version and features of the library.

use std::ffi::c_char;

/// Returns the version of this library, such as "1.2.3". Valid for ever. Compare with the header's
/// FERRY_VERSION. Any thread; never fails.
#[unsafe(no_mangle)]
pub extern "C" fn ferry_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Returns the version of this library as one number, like FERRY_VERSION_NUMBER: major * 1000000 + minor *
/// 1000 + patch. Any thread; never fails.
#[unsafe(no_mangle)]
pub extern "C" fn ferry_version_number() -> u32 {
    const MAJOR: u32 = number(env!("CARGO_PKG_VERSION_MAJOR"));
    const MINOR: u32 = number(env!("CARGO_PKG_VERSION_MINOR"));
    const PATCH: u32 = number(env!("CARGO_PKG_VERSION_PATCH"));
    MAJOR * 1_000_000 + MINOR * 1_000 + PATCH
}

const fn number(text: &str) -> u32 {
    let (bytes, mut index, mut number) = (text.as_bytes(), 0, 0);
    while index < bytes.len() {
        number = number * 10 + (bytes[index] - b'0') as u32;
        index += 1;
    }
    number
}

/// Returns the features that this library was built with: "", "cuda" or "cuda,nvshmem". Valid for ever. Any
/// thread; never fails.
#[unsafe(no_mangle)]
pub extern "C" fn ferry_features() -> *const c_char {
    let features = match (cfg!(feature = "cuda"), cfg!(feature = "nvshmem")) {
        (false, _) => c"",
        (true, false) => c"cuda",
        (true, true) => c"cuda,nvshmem",
    };
    features.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read() {
        assert_eq!(number("0"), 0);
        assert_eq!(number("102"), 102);
    }
}
