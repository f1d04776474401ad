//! Notices of leaks.

use crate::error::notice::Notice;

/// Says which communicator is leaked and how to have it freed, in addition to the warning.
pub(crate) fn tell(what: &str) {
    static LEAKS: Notice = Notice::new();
    LEAKS.tell(what);
}

/// Says that buffers of so many bytes were leaked and that more are allocated, in addition to the warnings.
pub(crate) fn tell_of_buffers(bytes: u64) {
    static BUFFERS: Notice = Notice::new();
    BUFFERS.tell(&format!(
        "buffers of {bytes} bytes were dropped without free, so that their memory is leaked, and others are \
         allocated: free them once nothing uses them, or keep them"
    ));
}
