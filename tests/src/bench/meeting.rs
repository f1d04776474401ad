//! Barrier of the ranks' host threads.

use std::sync::{Condvar, Mutex, PoisonError};

use anyhow::{Result, bail};

/// A barrier that releases all threads if one fails.
pub struct Meeting {
    threads: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    here: usize,
    meetings: u64,
    failed: bool,
}

impl Meeting {
    /// Returns a barrier of `threads` threads.
    pub fn new(threads: usize) -> Self {
        Self {
            threads,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Waits for all threads.
    ///
    /// # Errors
    /// A thread has failed.
    pub fn wait(&self) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.here += 1;
        if state.here == self.threads {
            state.here = 0;
            state.meetings += 1;
            self.changed.notify_all();
        }
        let before = state.meetings - u64::from(state.here == 0);
        let state = self
            .changed
            .wait_while(state, |state| state.meetings == before && !state.failed)
            .unwrap_or_else(PoisonError::into_inner);
        if state.failed {
            bail!("another rank failed");
        }
        Ok(())
    }

    /// Ends every wait, now and later, with an error.
    pub fn fail(&self) {
        self.state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .failed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn nobody_goes_on_before_all_are_there() {
        let (meeting, come) = (Meeting::new(4), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 1..=200 {
                        come.fetch_add(1, Ordering::Relaxed);
                        meeting.wait().unwrap();
                        assert!(come.load(Ordering::Relaxed) >= 4 * round);
                        meeting.wait().unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn a_failure_ends_every_wait() {
        let meeting = Meeting::new(3);
        std::thread::scope(|scope| {
            let waiting = [
                scope.spawn(|| meeting.wait()),
                scope.spawn(|| meeting.wait()),
            ];
            meeting.fail();
            assert!(
                waiting
                    .into_iter()
                    .all(|thread| thread.join().unwrap().is_err())
            );
        });
    }
}
