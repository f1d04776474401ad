//! Warnings of a thread, for tests.

use std::sync::{Arc, LazyLock, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Dispatch, Event, Level, Metadata, Subscriber};

/// A second listener, which is never read. With only one, `tracing` lets the first thread that reaches a
/// warning decide for all threads whether anybody listens, and that thread may have no listener.
static ANOTHER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(Warnings::default()));

/// Keeps the warnings of a thread.
#[derive(Clone, Default)]
pub(crate) struct Warnings(Arc<Mutex<Vec<String>>>);

impl Warnings {
    /// Calls `call`, and returns its result and its warnings.
    pub(crate) fn of<T>(call: impl FnOnce() -> T) -> (T, String) {
        LazyLock::force(&ANOTHER);
        let warnings = Self::default();
        let result = tracing::subscriber::with_default(warnings.clone(), call);
        let text = warnings.0.lock().unwrap().join("; ");
        (result, text)
    }
}

impl Visit for Warnings {
    fn record_debug(&mut self, _: &Field, value: &dyn std::fmt::Debug) {
        self.0.lock().unwrap().push(format!("{value:?}"));
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
