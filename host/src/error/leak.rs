//! The notice of a leak.

use crate::error::notice::Notice;

/// Says what is leaked and how to have it freed, in addition to the warning.
pub(crate) fn tell(what: &str) {
    static LEAKS: Notice = Notice::new();
    LEAKS.tell(what);
}
