//! Opens a bootstrap that the caller describes.

use std::ffi::{CStr, c_char};
use std::io::ErrorKind;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use ferry::Error;
use ferry::bootstrap::{Bootstrap, FnBootstrap, TcpBootstrap};

use super::gather::Gather;
use super::{ferry_bootstrap, require_ranks};
use crate::handle::{require, values};
use crate::status::Failure;
use crate::status::ferry_status::{FERRY_INVALID_ARGUMENT, FERRY_PEER};
use crate::structs::read;

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// Meets the other processes over TCP, or makes the caller's all-gather a bootstrap.
///
/// # Safety
/// The rule of pointers; `all_gather` keeps what `ferry_all_gather` documents until the result is dropped.
pub(crate) unsafe fn open(given: *const ferry_bootstrap) -> Result<Box<dyn Bootstrap>, Failure> {
    // SAFETY: the rule of pointers.
    let given = unsafe { read(given, "bootstrap")? };
    let ferry_bootstrap { rank, ranks, .. } = given;
    require_ranks("bootstrap->ranks", ranks)?;
    // SAFETY: the rule of pointers.
    let key = unsafe { key(&given)? };
    match (given.address.is_null(), given.all_gather) {
        (false, None) => {
            // SAFETY: the rule of pointers.
            let address = unsafe { address(given.address)? };
            let timeout = match given.timeout_ns {
                0 => DEFAULT_TIMEOUT,
                nanoseconds => Duration::from_nanos(nanoseconds),
            };
            let tcp = match key {
                Some(key) => TcpBootstrap::connect_with_key(rank, ranks, address, timeout, key),
                None => TcpBootstrap::connect(rank, ranks, address, timeout),
            };
            Ok(Box::new(tcp.map_err(Error::from)?))
        }
        (true, Some(_)) if key.is_some() => {
            let text = "bootstrap->key needs bootstrap->address, but all_gather is set";
            Err(Failure::new(FERRY_INVALID_ARGUMENT, text))
        }
        (true, Some(all_gather)) => {
            let mut gather = Gather {
                all_gather,
                context: given.context,
                ranks: ranks as usize,
            };
            let of_bytes = move |bytes: &[u8]| gather.all(bytes);
            // SAFETY: the rank is this process's own, and the function gathers the bytes of all ranks' same
            // call: documented on `ferry_bootstrap` and `ferry_all_gather`.
            let function = unsafe { FnBootstrap::new(rank, ranks, of_bytes) };
            Ok(Box::new(function.map_err(Error::from)?))
        }
        (both_missing, _) => {
            let given = if both_missing { "neither" } else { "both" };
            let text = format!("bootstrap: set one of address and all_gather, not {given}");
            Err(Failure::new(FERRY_INVALID_ARGUMENT, text))
        }
    }
}

/// The key, if there is one.
///
/// # Safety
/// The rule of pointers, for as long as the result is used.
unsafe fn key(given: &ferry_bootstrap) -> Result<Option<&[u8]>, Failure> {
    let (key, name) = (given.key.cast::<u8>(), "bootstrap->key_bytes");
    match (key.is_null(), given.key_bytes) {
        (true, 0) => Ok(None),
        (false, 0) => Err(Failure::value(name, 0, "a key has at least one byte")),
        // SAFETY: the rule of pointers.
        (_, bytes) => unsafe { values(key, "bootstrap->key", bytes) }.map(Some),
    }
}

/// # Safety
/// The rule of pointers.
unsafe fn address(text: *const c_char) -> Result<SocketAddr, Failure> {
    require(text, "bootstrap->address")?;
    // SAFETY: the rule of pointers: a text ends with a zero byte.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let found = text.to_socket_addrs().map(|mut all| all.next());
    match found {
        Ok(Some(address)) => Ok(address),
        Ok(None) => Err(Failure::new(
            FERRY_PEER,
            format!("bootstrap->address {text:?} has no address"),
        )),
        Err(error) if error.kind() == ErrorKind::InvalidInput => Err(Failure::value(
            "bootstrap->address",
            format!("{text:?}"),
            &format!("wanted \"host:port\" ({error})"),
        )),
        Err(error) => Err(Failure::new(
            FERRY_PEER,
            format!("bootstrap->address {text:?} cannot be resolved: {error}"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::{CString, c_int, c_void};
    use std::net::{Ipv4Addr, TcpListener};
    use std::{ptr, thread};

    use super::*;
    use crate::status::ferry_status::FERRY_NULL;

    const KEY: &[u8] = b"no text,\0\xffbytes";

    /// One of two ranks that meet over TCP.
    fn bootstrap(rank: u32, address: &CStr, key: &[u8]) -> ferry_bootstrap {
        ferry_bootstrap {
            size: size_of::<ferry_bootstrap>(),
            rank,
            ranks: 2,
            address: address.as_ptr(),
            timeout_ns: 2_000_000_000,
            all_gather: None,
            context: ptr::null_mut(),
            key: key.as_ptr().cast(),
            key_bytes: key.len(),
        }
    }

    /// Returns a free address and port for one test: the process id and `call`, which differs from test to
    /// test, choose the loopback address.
    fn free_address(call: u8) -> CString {
        let [.., high, low] = std::process::id().to_be_bytes();
        let listener = TcpListener::bind((Ipv4Addr::new(127, high, low, call), 0)).unwrap();
        CString::new(listener.local_addr().unwrap().to_string()).unwrap()
    }

    #[test]
    fn ranks_of_the_same_key_meet() {
        let address = free_address(1);
        thread::scope(|scope| {
            for rank in 0..2 {
                let address = &address;
                scope.spawn(move || {
                    // SAFETY: the struct, its address and its key live.
                    let met = unsafe { open(&bootstrap(rank, address, KEY)) };
                    assert_eq!(met.unwrap().all_gather(&[7]).unwrap(), [[7], [7]]);
                });
            }
        });
    }

    #[test]
    fn ranks_of_different_keys_are_told_so() {
        let address = free_address(2);
        thread::scope(|scope| {
            for (rank, key) in [(0, KEY), (1, &KEY[..3])] {
                let address = &address;
                scope.spawn(move || {
                    // SAFETY: as above.
                    let refused = unsafe { open(&bootstrap(rank, address, key)) }
                        .err()
                        .unwrap();
                    assert_eq!(refused.status, FERRY_PEER);
                    assert!(refused.text.contains("another"), "{}", refused.text);
                });
            }
        });
    }

    #[test]
    fn a_program_that_knows_of_no_key_has_none() {
        let address = free_address(3);
        let earlier = ferry_bootstrap {
            size: 48,
            ranks: 1,
            ..bootstrap(0, &address, KEY)
        };
        // SAFETY: the struct, its address and its key live.
        let given = unsafe { read(&earlier, "bootstrap") }.unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { key(&given) }.unwrap(), None);
    }

    #[test]
    fn a_key_that_is_none_or_that_nothing_uses_is_refused() {
        unsafe extern "C" fn never(
            _: *mut c_void,
            _: *const c_void,
            _: usize,
            _: *mut c_void,
        ) -> c_int {
            1
        }
        let address = free_address(4);
        let given = bootstrap(0, &address, KEY);
        let refusal = |given: ferry_bootstrap| {
            // SAFETY: as above.
            let refused = unsafe { open(&given) }.err().unwrap();
            (refused.status, refused.text)
        };
        let (status, text) = refusal(ferry_bootstrap {
            key_bytes: 0,
            ..given
        });
        assert_eq!(status, FERRY_INVALID_ARGUMENT);
        assert!(text.contains("bootstrap->key_bytes is 0"), "{text}");
        let (status, text) = refusal(ferry_bootstrap {
            key: ptr::null(),
            ..given
        });
        assert_eq!(status, FERRY_NULL);
        assert!(text.contains("bootstrap->key"), "{text}");
        let (status, text) = refusal(ferry_bootstrap {
            address: ptr::null(),
            all_gather: Some(never),
            ..given
        });
        assert_eq!(status, FERRY_INVALID_ARGUMENT);
        assert!(text.contains("bootstrap->key"), "{text}");
    }
}
