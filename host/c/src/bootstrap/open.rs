//! Meets the other processes.

use std::ffi::{CStr, c_char};
use std::io::ErrorKind;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use ferry::{Bootstrap, Error, FnBootstrap, TcpBootstrap};

use super::gather::Gather;
use super::{ferry_bootstrap, require_ranks};
use crate::handle::require;
use crate::status::Failure;
use crate::status::ferry_status::{FERRY_INVALID_ARGUMENT, FERRY_PEER};
use crate::structs::read;

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// Meets the other processes, over TCP, or makes the caller's all-gather a bootstrap.
///
/// # Safety
/// The rule of pointers; `all_gather` is as its type says, and is called until the result is dropped.
pub(crate) unsafe fn open(given: *const ferry_bootstrap) -> Result<Box<dyn Bootstrap>, Failure> {
    // SAFETY: the caller's promise.
    let given = unsafe { read(given, "bootstrap")? };
    let ferry_bootstrap { rank, ranks, .. } = given;
    require_ranks("bootstrap->ranks", ranks)?;
    match (given.address.is_null(), given.all_gather) {
        (false, None) => {
            // SAFETY: the caller's promise.
            let address = unsafe { address(given.address)? };
            let timeout = match given.timeout_ns {
                0 => DEFAULT_TIMEOUT,
                nanoseconds => Duration::from_nanos(nanoseconds),
            };
            let tcp = TcpBootstrap::connect(rank, ranks, address, timeout);
            Ok(Box::new(tcp.map_err(Error::from)?))
        }
        (true, Some(all_gather)) => {
            let mut gather = Gather {
                all_gather,
                context: given.context,
                ranks: ranks as usize,
            };
            let of_bytes = move |bytes: &[u8]| gather.all(bytes);
            // SAFETY: the caller's promise: the rank is this process's own, and the function gathers what all
            // ranks gave to the same call.
            let function = unsafe { FnBootstrap::new(rank, ranks, of_bytes) };
            Ok(Box::new(function.map_err(Error::from)?))
        }
        (both_missing, _) => {
            let given = if both_missing { "neither" } else { "both" };
            let text = format!("bootstrap: give one of address and all_gather, not {given}");
            Err(Failure::new(FERRY_INVALID_ARGUMENT, text))
        }
    }
}

/// # Safety
/// The rule of pointers.
unsafe fn address(text: *const c_char) -> Result<SocketAddr, Failure> {
    require(text, "bootstrap->address")?;
    // SAFETY: the caller's promise.
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
            format!("bootstrap->address {text:?} was not resolved: {error}"),
        )),
    }
}
