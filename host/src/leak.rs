//! What is leaked is told to everybody, also to those who have no subscriber of `tracing`.

use std::io::Write;
use std::sync::Once;

use tracing::dispatcher::get_default;
use tracing::subscriber::NoSubscriber;

/// Leaks that were told on stderr, for want of a subscriber.
static TOLD: Once = Once::new();

/// Says on stderr what is leaked, and how to have it freed: once a process, and only where nobody listens to
/// the warning that goes with it.
pub(crate) fn tell(what: &str) {
    if !get_default(|listener| listener.is::<NoSubscriber>()) {
        return;
    }
    TOLD.call_once(|| {
        let line = format!(
            "ferry: {what} (said once; a subscriber of `tracing` gets every such warning)\n"
        );
        // A process without stderr has nobody to tell.
        let _ = std::io::stderr().write_all(line.as_bytes());
    });
}
