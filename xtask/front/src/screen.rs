//! Lines about a long command: one for each thing that is done, and one that says what is under way.

use std::io::{IsTerminal as _, Write as _, stderr, stdout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Time between two looks at what is under way.
const TICK: Duration = Duration::from_millis(200);
/// Time after which what is under way is said, and said again: on a terminal, where the line is replaced, and
/// elsewhere.
const AFTER: [Duration; 2] = [Duration::from_millis(400), Duration::from_secs(10)];

/// Standard output, with a line on standard error below it that says what is under way.
pub struct Screen {
    begin: Instant,
    is_terminal: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    under_way: String,
    /// Time at which a line was last shown.
    shown: Duration,
    /// Whether the last line on the terminal is to be replaced.
    is_drawn: bool,
}

impl Default for Screen {
    fn default() -> Self {
        Screen {
            begin: Instant::now(),
            is_terminal: stderr().is_terminal(),
            state: Mutex::default(),
        }
    }
}

impl Screen {
    /// Prints lines that stay.
    pub fn say(&self, text: &str) {
        let mut state = self.state();
        self.clear(&mut state);
        // A reader that has gone, as of `| head`, is no reason to end.
        let _ = writeln!(stdout(), "{text}");
        state.shown = self.begin.elapsed();
    }

    /// Sets what is under way.
    pub fn under_way(&self, text: impl Into<String>) {
        self.state().under_way = text.into();
    }

    /// Time since the command began.
    pub fn elapsed(&self) -> Duration {
        self.begin.elapsed()
    }

    /// Does the work, and says from time to time what is under way.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let ticker = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    self.tick();
                    thread::park_timeout(TICK);
                }
            });
            // Also when the work panics, or the scope would wait for ever.
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            is_over.store(true, Ordering::Relaxed);
            ticker.thread().unpark();
            let mut state = self.state();
            self.clear(&mut state);
            state.under_way.clear();
            outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn tick(&self) {
        let mut state = self.state();
        let now = self.begin.elapsed();
        let after = AFTER[usize::from(!self.is_terminal)];
        if state.under_way.is_empty() || now < state.shown + after {
            return;
        }
        self.clear(&mut state);
        let line = format!("  .. {}: {}", time(now), state.under_way);
        if self.is_terminal {
            let line: String = line.chars().take(78).collect();
            let _ = write!(stderr(), "{line}").and_then(|()| stderr().flush());
        } else {
            let _ = writeln!(stderr(), "{line}");
        }
        (state.shown, state.is_drawn) = (now, self.is_terminal);
    }

    fn clear(&self, state: &mut State) {
        if std::mem::take(&mut state.is_drawn) {
            let _ = write!(stderr(), "\r\x1b[2K");
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A line that a panic cut short is no harm.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A time as people say it: `3.1 s`, `42 s`, `2 min 5 s`.
pub fn time(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..10 => format!("{:.1} s", time.as_secs_f64()),
        10..60 => format!("{seconds} s"),
        _ => format!("{} min {} s", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short() {
        let text = |millis| time(Duration::from_millis(millis));
        assert_eq!(text(3_140), "3.1 s");
        assert_eq!(text(59_999), "59 s");
        assert_eq!(text(125_000), "2 min 5 s");
    }
}
