//! A rank's way to a machine in the process of rank 0, over a Unix socket.
//!
//! A rank has two connections, for commands and for waits, so that a process that ends while it waits is
//! noticed. A request is three words (operation, argument, bytes of the payload) and the payload, an answer
//! two words (0 or 1: the payload is a result, or a text; its bytes) and the payload; all little-endian.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ferry_layout::PROTOCOL_VERSION;

use crate::error::SimulatorError;
use crate::options::{ASK_AGAIN, Options, is_interrupted};

/// Most bytes of a hello: three numbers and a key.
pub(crate) const MOST_OF_HELLO: u64 = 3 + MOST_OF_KEY as u64;
/// Most bytes of [`Options::key`].
pub(crate) const MOST_OF_KEY: usize = 1024;
/// Most bytes of a socket's path, of which the system allows 107: rank 0 makes it in a folder beside, with
/// its process's number and 3 bytes more.
pub(crate) const MOST_OF_PATH: usize = 107 - 10;

/// Most bytes of a payload.
pub(crate) const MOST_BYTES: u64 = 64 << 20;
/// Argument of a hello: this protocol, its version, and that of the kernels' arguments.
pub(crate) const VERSION: u64 = 0x4645_5252_0001_0000 | PROTOCOL_VERSION as u64;
/// Pause between two looks for another process.
pub(crate) const PAUSE: Duration = Duration::from_millis(10);

/// Operations of requests.
pub(crate) mod operation {
    /// Begins a connection: rank, ranks, and 1 for the connection of waits, a byte each; and the key.
    pub(crate) const HELLO: u64 = 0;
    pub(crate) const ALLOC: u64 = 1;
    pub(crate) const FREE: u64 = 2;
    pub(crate) const WRITE: u64 = 3;
    /// Reads as many bytes, a word of the payload.
    pub(crate) const READ: u64 = 4;
    /// Launches the kernel whose index is the lower half, of at most as many blocks as the upper half says
    /// (0: no limit); the payload are its arguments.
    pub(crate) const LAUNCH: u64 = 5;
    pub(crate) const SYNCHRONIZE: u64 = 6;
    /// Brings a number, and returns those of all ranks.
    pub(crate) const GATHER: u64 = 7;
    /// Allocates as many bytes on all ranks.
    pub(crate) const WINDOWS: u64 = 8;
}

/// A rank's way to the machine.
pub(crate) struct Remote {
    commands: Mutex<Lane>,
    waits: Mutex<Lane>,
}

/// A connection to the machine.
struct Lane {
    stream: UnixStream,
    /// Answers to requests whose wait was interrupted, which come before the next one's.
    owed: u32,
    interrupted: Option<fn() -> bool>,
}

impl Remote {
    /// Connects as `rank` to the machine at `path`, which rank 0 may yet have to make, and returns after all
    /// ranks have.
    pub(crate) fn connect(
        path: &Path,
        rank: u32,
        options: &Options,
        timeout: Duration,
    ) -> Result<Self, SimulatorError> {
        let until = Instant::now() + timeout;
        let connect = |lane| {
            let mut lane_of = Lane {
                stream: connect(path, until, options.interrupted)?,
                owed: 0,
                interrupted: options.interrupted,
            };
            let hello = hello(rank, options, lane);
            lane_of.ask(operation::HELLO, VERSION, &hello)?;
            Ok(Mutex::new(lane_of))
        };
        let (commands, waits) = (connect(0)?, connect(1)?);
        let remote = Self { commands, waits };
        remote.ask(operation::GATHER, 0, &[])?;
        Ok(remote)
    }

    /// Makes a request, and returns the answer's payload.
    pub(crate) fn ask(
        &self,
        operation: u64,
        argument: u64,
        payload: &[u8],
    ) -> Result<Vec<u8>, SimulatorError> {
        let lane = match operation {
            operation::SYNCHRONIZE => &self.waits,
            _ => &self.commands,
        };
        let mut lane = lane.lock().unwrap_or_else(PoisonError::into_inner);
        lane.ask(operation, argument, payload)
    }

    /// Makes a request whose answer are numbers.
    pub(crate) fn numbers(&self, operation: u64, value: u64) -> Result<Vec<u64>, SimulatorError> {
        let answer = self.ask(operation, value, &[])?;
        Ok(answer.chunks(8).map(word).collect())
    }
}

/// Payload of a hello.
pub(crate) fn hello(rank: u32, options: &Options, lane: u8) -> Vec<u8> {
    [&[rank as u8, options.ranks as u8, lane], &options.key[..]].concat()
}

/// Connects to the socket at `path`, which rank 0 may yet have to make.
fn connect(
    path: &Path,
    until: Instant,
    interrupted: Option<fn() -> bool>,
) -> Result<UnixStream, SimulatorError> {
    let early = [ErrorKind::NotFound, ErrorKind::ConnectionRefused];
    loop {
        let error = match UnixStream::connect(path) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        let is_early = early.contains(&error.kind());
        if !is_early || Instant::now() >= until {
            let path = path.display();
            let reason = if is_early {
                "nobody listens".into()
            } else {
                error.to_string()
            };
            return Err(refused(format!("no rank 0 at {path}: {reason}")));
        }
        if is_interrupted(interrupted) {
            return Err(SimulatorError::Interrupted);
        }
        thread::sleep(PAUSE);
    }
}

impl Lane {
    fn ask(
        &mut self,
        operation: u64,
        argument: u64,
        payload: &[u8],
    ) -> Result<Vec<u8>, SimulatorError> {
        send(&mut self.stream, &[operation, argument], payload).map_err(|_| rank_0_ended())?;
        self.owed += 1;
        loop {
            let ([status], answer) = self.receive()?;
            self.owed -= 1;
            match status {
                _ if self.owed > 0 => {}
                0 => return Ok(answer),
                _ => return Err(refused(String::from_utf8_lossy(&answer).into())),
            }
        }
    }

    /// Waits for the next answer.
    fn receive(&mut self) -> Result<([u64; 1], Vec<u8>), SimulatorError> {
        let (mut first, ended) = ([0], |_| rank_0_ended());
        self.stream
            .set_read_timeout(Some(ASK_AGAIN))
            .map_err(ended)?;
        loop {
            match self.stream.read(&mut first) {
                Ok(1..) => break,
                Err(error) if is_early(&error) && !is_interrupted(self.interrupted) => {}
                Err(error) if is_early(&error) => return Err(SimulatorError::Interrupted),
                _ => return Err(rank_0_ended()),
            }
        }
        self.stream.set_read_timeout(None).map_err(ended)?;
        receive(&mut first.as_slice().chain(&mut self.stream), MOST_BYTES).map_err(ended)
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
pub(crate) fn send(stream: &mut UnixStream, words: &[u64], payload: &[u8]) -> std::io::Result<()> {
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
