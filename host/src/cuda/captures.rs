//! The captures of this process.

use std::ptr;

use super::error::check;
use super::sys::{self, CUstream};
use crate::device::captures::Captures;
use crate::error::Error;

/// The captures of this process. Not per device: the driver numbers captures throughout the process, and
/// another device of the same GPU may launch into a captured stream.
pub(super) static CAPTURES: Captures = Captures::new();

/// The driver's number of the capture that `stream` is in, if it is. The context is current.
pub(super) fn capture_number(stream: CUstream) -> Result<Option<u64>, Error> {
    if stream.addr() <= sys::STREAM_LEGACY {
        // The default stream cannot be captured, and must not be queried while others are captured.
        return Ok(None);
    }
    let (mut status, mut number) = (0, 0);
    // SAFETY: the stream is live (documented on `Stream::new`); both numbers are live, and the driver takes
    // null for results that are not wanted.
    let code = unsafe {
        sys::cuStreamGetCaptureInfo_v2(
            stream,
            &mut status,
            &mut number,
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
        )
    };
    check("cuStreamGetCaptureInfo", code)?;
    Ok((status == sys::CAPTURE_ACTIVE).then_some(number))
}
