//! What is leaked is told to everybody.

use crate::error::notice::Notice;

/// Says what is leaked, and how to have it freed, beside the warning that goes with it.
pub(crate) fn tell(what: &str) {
    static LEAKS: Notice = Notice::new();
    LEAKS.tell(what);
}
