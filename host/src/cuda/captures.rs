//! The captures that the driver knows of.

use std::ptr;

use super::error::check;
use super::sys::{self, CUstream};
use crate::device::captures::Captures;
use crate::error::Error;

/// The captures of this process. Not of a device: the driver numbers captures throughout the process, and
/// the stream of one may be launched into by way of another device of the same GPU.
pub(super) static CAPTURES: Captures = Captures::new();

/// The driver's number of the capture that `stream` is in, if it is. The context is current.
pub(super) fn capture_number(stream: CUstream) -> Result<Option<u64>, Error> {
    if stream.addr() <= sys::STREAM_LEGACY {
        // The default stream cannot be captured, and must not be asked while others are.
        return Ok(None);
    }
    let (mut status, mut number) = (0, 0);
    // SAFETY: the stream lives ([`Stream::new`]); both numbers are live, and the driver takes null
    // for what is not wanted.
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
