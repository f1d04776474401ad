//! What is warned of, for the tests that ask.

use std::sync::{Arc, LazyLock, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Dispatch, Event, Level, Metadata, Subscriber};

/// A listener that nobody asks. While there is one alone, `tracing` lets the thread that comes first to a
/// warning decide for all whether anybody wants it, and that thread may have none.
static ANOTHER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(Warnings::default()));

/// Keeps the warnings of a thread.
#[derive(Clone, Default)]
pub(crate) struct Warnings(Arc<Mutex<Vec<String>>>);

impl Warnings {
    /// Those of `call`.
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
