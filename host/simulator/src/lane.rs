//! A connection of a rank to a machine in another process, and its messages.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use crate::error::SimulatorError;
use crate::options::{ASK_AGAIN, is_interrupted};

/// Most bytes of a payload.
pub(crate) const MOST_BYTES: u64 = 64 << 20;
/// Wait for the answer to an interrupted request before the next one is refused.
const LAST_LOOK: Duration = Duration::from_millis(1);

/// A connection to the machine. Threads may share it: answers come in the order of requests. No lock is held
/// while it asks whether a wait is interrupted, so that the asked may make requests of their own.
pub(crate) struct Lane {
    stream: UnixStream,
    /// Number of requests so far. Locked while one is sent.
    sent: Mutex<u64>,
    state: Mutex<State>,
    changed: Condvar,
    interrupted: Option<fn() -> bool>,
    /// Whether requests may follow an interrupted one that is not answered.
    may_follow: bool,
}

#[derive(Default)]
struct State {
    /// Number of answers so far.
    answered: u64,
    /// Answers that their threads have not taken, by the request's number.
    answers: BTreeMap<u64, Answer>,
    /// Interrupted requests without an answer.
    given_up: BTreeSet<u64>,
    /// Whether a thread reads from the stream.
    is_read: bool,
    /// Threads that ask whether their wait is interrupted.
    asking: Vec<ThreadId>,
}

/// Status and payload.
type Answer = (u64, Vec<u8>);

impl Lane {
    pub(crate) fn new(
        stream: UnixStream,
        interrupted: Option<fn() -> bool>,
        may_follow: bool,
    ) -> Self {
        Self {
            stream,
            sent: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            interrupted,
            may_follow,
        }
    }

    /// Makes a request, and returns the answer's payload. [`SimulatorError::Busy`] within a wait of this
    /// thread, and after an interrupted request that is not answered, unless others may follow it.
    pub(crate) fn ask(
        &self,
        operation: u64,
        argument: u64,
        payload: &[u8],
    ) -> Result<Vec<u8>, SimulatorError> {
        self.require_idle()?;
        let number = self.send(&[operation, argument], payload)?;
        loop {
            match self.step(number, ASK_AGAIN)? {
                Some((0, answer)) => return Ok(answer),
                Some((_, reason)) => return Err(refused(String::from_utf8_lossy(&reason).into())),
                None if self.is_interrupted() => {
                    let mut state = self.state();
                    if state.answers.remove(&number).is_none() {
                        state.given_up.insert(number);
                    }
                    return Err(SimulatorError::Interrupted);
                }
                None => {}
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn require_idle(&self) -> Result<(), SimulatorError> {
        let here = thread::current().id();
        loop {
            let state = self.state();
            if state.asking.contains(&here) {
                return Err(SimulatorError::Busy);
            }
            let Some(first) = state.given_up.first().copied() else {
                return Ok(());
            };
            if self.may_follow {
                return Ok(());
            }
            drop(state);
            // Nobody takes the answer.
            self.step(first, LAST_LOOK)?;
            if self.state().given_up.contains(&first) {
                return Err(SimulatorError::Busy);
            }
        }
    }

    /// Sends a request, and returns its number.
    fn send(&self, words: &[u64], payload: &[u8]) -> Result<u64, SimulatorError> {
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        send(&self.stream, words, payload).map_err(|_| rank_0_ended())?;
        *sent += 1;
        Ok(*sent - 1)
    }

    /// Waits for the answer to request `number`, until none has come for as long as `patience`.
    fn step(&self, number: u64, patience: Duration) -> Result<Option<Answer>, SimulatorError> {
        let mut state = self.state();
        loop {
            if let Some(answer) = state.answers.remove(&number) {
                return Ok(Some(answer));
            }
            if state.is_read {
                let waited = self.changed.wait_timeout(state, patience);
                let (after, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                state = after;
                if timeout.timed_out() {
                    return Ok(state.answers.remove(&number));
                }
                continue;
            }
            state.is_read = true;
            drop(state);
            let read = self.read(patience);
            state = self.state();
            state.is_read = false;
            self.changed.notify_all();
            let Some(answer) = read? else {
                return Ok(None);
            };
            let of = state.answered;
            state.answered += 1;
            if !state.given_up.remove(&of) {
                state.answers.insert(of, answer);
            }
        }
    }

    /// Reads the next answer, if it begins within `patience`.
    fn read(&self, patience: Duration) -> Result<Option<Answer>, SimulatorError> {
        let (mut first, ended) = ([0], |_| rank_0_ended());
        let mut stream = &self.stream;
        stream.set_read_timeout(Some(patience)).map_err(ended)?;
        match stream.read(&mut first) {
            Ok(1..) => {}
            Err(error) if is_early(&error) => return Ok(None),
            _ => return Err(rank_0_ended()),
        }
        stream.set_read_timeout(None).map_err(ended)?;
        let answer = receive(&mut first.as_slice().chain(stream), MOST_BYTES);
        let ([status], payload) = answer.map_err(ended)?;
        Ok(Some((status, payload)))
    }

    fn is_interrupted(&self) -> bool {
        let here = thread::current().id();
        self.state().asking.push(here);
        let is_interrupted = is_interrupted(self.interrupted);
        self.state().asking.retain(|thread| *thread != here);
        is_interrupted
    }
}

/// Whether a read ended before there was something to read.
fn is_early(error: &std::io::Error) -> bool {
    use ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

fn rank_0_ended() -> SimulatorError {
    refused("the process of rank 0 ended".into())
}

/// Sends words, the number of bytes of the payload, and the payload.
pub(crate) fn send(mut stream: &UnixStream, words: &[u64], payload: &[u8]) -> std::io::Result<()> {
    let words = words.iter().copied().chain([payload.len() as u64]);
    let mut message: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    message.extend_from_slice(payload);
    stream.write_all(&message)
}

/// Receives what [`send`] sends, with at most `most` bytes of payload.
pub(crate) fn receive<const N: usize>(
    stream: &mut impl Read,
    most: u64,
) -> std::io::Result<([u64; N], Vec<u8>)> {
    let mut next = || {
        let mut bytes = [0; 8];
        stream.read_exact(&mut bytes).map(|()| word(&bytes))
    };
    let mut words = [0; N];
    for word in &mut words {
        *word = next()?;
    }
    let length = next()?;
    if length > most {
        let text = format!("a payload of {length} bytes, more than {most}");
        return Err(std::io::Error::new(ErrorKind::InvalidData, text));
    }
    let mut payload = vec![0; length as usize];
    stream.read_exact(&mut payload)?;
    Ok((words, payload))
}

/// Reads a little-endian number of at most 8 bytes.
pub(crate) fn word(bytes: &[u8]) -> u64 {
    let bytes = bytes.iter().rev();
    bytes.fold(0, |word, &byte| word << 8 | u64::from(byte))
}

pub(crate) const fn refused(reason: String) -> SimulatorError {
    SimulatorError::Remote { reason }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use super::*;

    /// A lane, and the other end of its connection.
    fn pair(interrupted: fn() -> bool, may_follow: bool) -> (Lane, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        (Lane::new(near, Some(interrupted), may_follow), far)
    }

    #[test]
    fn a_request_within_a_wait_of_its_thread_is_refused() {
        static LANE: OnceLock<Lane> = OnceLock::new();
        static WITHIN: OnceLock<Result<Vec<u8>, SimulatorError>> = OnceLock::new();
        let (lane, _far) = pair(
            || WITHIN.set(LANE.get().unwrap().ask(1, 2, &[])).is_ok(),
            false,
        );
        let lane = LANE.get_or_init(|| lane);
        assert_eq!(lane.ask(3, 4, &[]), Err(SimulatorError::Interrupted));
        assert_eq!(WITHIN.get(), Some(&Err(SimulatorError::Busy)));
    }

    #[test]
    fn after_an_interruption_requests_are_refused_until_the_answer_is_there() {
        let (lane, mut far) = pair(|| true, false);
        assert_eq!(lane.ask(1, 2, &[]), Err(SimulatorError::Interrupted));
        let begin = Instant::now();
        assert_eq!(lane.ask(3, 4, &[]), Err(SimulatorError::Busy));
        assert!(begin.elapsed() < ASK_AGAIN);
        send(&far, &[0], b"late").unwrap();
        send(&far, &[0], b"next").unwrap();
        assert_eq!(lane.ask(5, 6, &[]), Ok(b"next".to_vec()));
        let requests = [[1, 2], [5, 6]];
        for request in requests {
            assert_eq!(receive(&mut far, 0).unwrap(), (request, vec![]));
        }
    }

    #[test]
    fn requests_may_follow_an_interrupted_one_in_a_lane_of_waits() {
        let (lane, far) = pair(|| true, true);
        assert_eq!(lane.ask(1, 2, &[]), Err(SimulatorError::Interrupted));
        send(&far, &[0], b"late").unwrap();
        send(&far, &[1], b"no").unwrap();
        assert_eq!(lane.ask(3, 4, &[]), Err(refused("no".into())));
    }

    #[test]
    fn threads_share_a_lane_and_each_gets_its_answer() {
        let (lane, mut far) = pair(|| false, false);
        let (sender, receiver) = channel();
        thread::scope(|scope| {
            for number in 0..8_u64 {
                let (lane, sender) = (&lane, sender.clone());
                scope.spawn(move || sender.send((number, lane.ask(number, 0, &[]))).unwrap());
            }
            let mut requests = vec![];
            while requests.len() < 8 {
                let ([number, _], _) = receive(&mut far, 0).unwrap();
                requests.push(number);
            }
            for number in requests {
                send(&far, &[0], &number.to_le_bytes()).unwrap();
            }
        });
        for (number, answer) in receiver.try_iter() {
            assert_eq!(answer, Ok(number.to_le_bytes().to_vec()));
        }
    }
}
