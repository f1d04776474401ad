//! Waits that end when a signal's handler of Python raises, as that of Ctrl-C does.

use std::cell::{Cell, RefCell};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;

/// Pause between two looks for a signal.
const PAUSE: Duration = Duration::from_millis(50);

thread_local! {
    /// Whether this is Python's main thread, which alone runs handlers; `None` if not known yet.
    static IS_MAIN: Cell<Option<bool>> = const { Cell::new(None) };
    /// Exception of the handler that ended this thread's wait, until it is taken.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// Whether handlers run within a wait of this thread.
    static IS_ASKING: Cell<bool> = const { Cell::new(false) };
}

/// Runs `wait` without the interpreter's lock. Waits of simulated groups ask [`is_interrupted`] meanwhile.
pub(crate) fn detach<R: Send>(py: Python<'_>, wait: impl FnOnce() -> R + Send) -> PyResult<R> {
    is_main(py)?;
    Ok(py.detach(wait))
}

/// Whether this is a handler that runs within a wait of this thread, which may hold locks of the group.
pub(crate) fn is_within_wait() -> bool {
    IS_ASKING.get()
}

/// Whether a handler raised, even if its exception was not taken yet. For threads that called [`detach`]:
/// others, which may wait while the interpreter ends, never ask it.
pub(crate) fn is_interrupted() -> bool {
    if IS_MAIN.get() != Some(true) {
        return false;
    }
    if RAISED.with_borrow(Option::is_some) {
        return true;
    }
    let was_asking = IS_ASKING.replace(true);
    let raised = Python::attach(|py| py.check_signals().err());
    IS_ASKING.set(was_asking);
    let is_raised = raised.is_some();
    if is_raised {
        RAISED.set(raised);
    }
    is_raised
}

/// Exception of the handler that ended the last wait.
pub(crate) fn take() -> Option<PyErr> {
    RAISED.take()
}

/// Runs a wait that asks nobody on a thread of its own. That thread goes on if a handler raises.
pub(crate) fn on_thread<R: Send + 'static>(
    py: Python<'_>,
    wait: impl FnOnce() -> R + Send + 'static,
) -> PyResult<R> {
    if !is_main(py)? {
        return Ok(py.detach(wait));
    }
    let (sender, mut receiver) = channel();
    let waiting = thread::spawn(move || {
        // Nobody receives after an interruption.
        let _ = sender.send(wait());
    });
    loop {
        let receiver = &mut receiver;
        match py.detach(move || receiver.recv_timeout(PAUSE)) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => match waiting.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => unreachable!("a thread sends before it ends"),
            },
        }
    }
}

fn is_main(py: Python<'_>) -> PyResult<bool> {
    if let Some(is_main) = IS_MAIN.get() {
        return Ok(is_main);
    }
    let threading = py.import("threading")?;
    let (here, main) = (
        threading.call_method0("get_ident")?,
        threading.call_method0("main_thread")?,
    );
    let is_main = here.eq(main.getattr("ident")?)?;
    IS_MAIN.set(Some(is_main));
    Ok(is_main)
}
