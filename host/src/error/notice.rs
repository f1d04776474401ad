//! Warnings that are visible without a subscriber of `tracing`, too.

use std::io::Write;
use std::sync::Once;

use tracing::dispatcher::get_default;
use tracing::subscriber::NoSubscriber;

/// A line on stderr, at most once per process, and only if nobody listens to the warning that goes with it.
pub(crate) struct Notice(Once);

impl Notice {
    pub(crate) const fn new() -> Self {
        Self(Once::new())
    }

    /// Prints `what`: the problem and its remedy.
    pub(crate) fn tell(&self, what: &str) {
        if !get_default(|listener| listener.is::<NoSubscriber>()) {
            return;
        }
        self.0.call_once(|| {
            let line = format!("ferry: {what} (said once)\n");
            // A process without stderr has nobody to tell.
            let _ = std::io::stderr().write_all(line.as_bytes());
        });
    }
}
