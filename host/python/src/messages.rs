//! Messages of the library as records of Python's `logging`, of the logger `ferry_ep`.
//!
//! They come from any thread, without the interpreter's lock, and while locks of the library are held, which
//! a handler's code may need. So a thread of its own, which the first message starts, hands them over.

use std::fmt::Debug;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::process;

/// Name of the logger.
const LOGGER: &str = "ferry_ep";
/// Name of the thread.
const THREAD: &str = "ferry messages";
/// Most messages that wait to be handed over; more are lost.
const MOST: usize = 1024;
/// Looks at a lock that another thread holds for a moment; in a child of a fork, perhaps for ever.
const LOOKS: usize = 1000;
/// Longest wait for handlers when the interpreter ends.
const PATIENCE: Duration = Duration::from_secs(1);

enum Message {
    Event(Level, String),
    /// Is answered once everything before was handed over.
    Flush(Sender<()>),
}

/// Way to the thread, and the number of forks at its start: a child has none of its parent's threads.
static QUEUE: Mutex<Option<(u32, SyncSender<Message>)>> = Mutex::new(None);

/// Hands over all messages from now on, and those under way when the interpreter ends.
pub(crate) fn begin(py: Python<'_>) -> PyResult<()> {
    // First, so that its own end comes later.
    py.import("logging")?;
    let flush = pyo3::wrap_pyfunction!(flush, py)?;
    py.import("atexit")?.call_method1("register", (flush,))?;
    // Fails if there is a subscriber already, which has the messages then.
    let _ = tracing::subscriber::set_global_default(Messages);
    Ok(())
}

/// Returns once all messages so far were handed over.
#[pyfunction]
fn flush(py: Python<'_>) {
    py.detach(|| {
        let (done, wait) = channel();
        let is_sent = with_queue(|queue| match queue {
            Some((forks, sender)) if *forks == process::forks() => {
                sender.try_send(Message::Flush(done)).is_ok()
            }
            _ => false,
        });
        if is_sent == Some(true) {
            // After the time it goes on without the rest.
            let _ = wait.recv_timeout(PATIENCE);
        }
    });
}

fn with_queue<R>(act: impl FnOnce(&mut Option<(u32, SyncSender<Message>)>) -> R) -> Option<R> {
    for _ in 0..LOOKS {
        if let Ok(mut queue) = QUEUE.try_lock() {
            return Some(act(&mut queue));
        }
        thread::yield_now();
    }
    None
}

fn send(message: Message) {
    let forks = process::forks();
    with_queue(|queue| {
        if queue.as_ref().is_none_or(|(started, _)| *started != forks) {
            let (sender, receiver) = sync_channel(MOST);
            let spawned = thread::Builder::new().name(String::from(THREAD));
            // Without a thread there is nobody to tell.
            let _ = spawned.spawn(move || hand_over(&receiver));
            *queue = Some((forks, sender));
        }
        if let Some((_, sender)) = queue {
            let _ = sender.try_send(message);
        }
    });
}

fn hand_over(messages: &Receiver<Message>) {
    for message in messages {
        match message {
            Message::Flush(done) => {
                let _ = done.send(());
            }
            Message::Event(level, text) => {
                let logged = Python::try_attach(|py| {
                    if let Err(error) = log(py, level, &text) {
                        error.write_unraisable(py, None);
                    }
                });
                if logged.is_none() {
                    // The interpreter has ended.
                    return;
                }
            }
        }
    }
}

fn log(py: Python<'_>, level: Level, text: &str) -> PyResult<()> {
    let number = match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        _ => 10,
    };
    // Handlers see this thread, which never drives a rank (`ferry_ep.core.end`).
    let here = py.import("threading")?.call_method0("current_thread")?;
    here.setattr("name", THREAD)?;
    let logger = py.import("logging")?.call_method1("getLogger", (LOGGER,))?;
    logger.call_method1("log", (number, "%s", text))?;
    Ok(())
}

/// Takes all messages; has no spans.
struct Messages;

impl Subscriber for Messages {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::DEBUG
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        let Text { message, fields } = text;
        let text = match fields.is_empty() {
            true => message,
            false => format!("{message} ({})", fields.join(", ")),
        };
        send(Message::Event(*event.metadata().level(), text));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Text of a message, and its fields behind it.
#[derive(Default)]
struct Text {
    message: String,
    fields: Vec<String>,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            name => self.fields.push(format!("{name} {value:?}")),
        }
    }
}
