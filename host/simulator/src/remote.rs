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

/// Most bytes of a payload.
pub(crate) const MOST_BYTES: u64 = 64 << 20;
/// Argument of a hello: this protocol, its version, and that of the kernels' arguments.
pub(crate) const VERSION: u64 = 0x4645_5252_0001_0000 | PROTOCOL_VERSION as u64;
/// Pause between two looks for another process.
pub(crate) const PAUSE: Duration = Duration::from_millis(10);

/// Operations of requests.
pub(crate) mod operation {
    /// Begins a connection: rank, ranks, and 1 for the connection of waits, a byte each.
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
    commands: Mutex<UnixStream>,
    waits: Mutex<UnixStream>,
}

impl Remote {
    /// Connects as `rank` of `ranks` to the machine at `path`, which rank 0 may yet have to make, and returns
    /// after all ranks have.
    pub(crate) fn connect(
        path: &Path,
        rank: u32,
        ranks: u32,
        timeout: Duration,
    ) -> Result<Self, SimulatorError> {
        let until = Instant::now() + timeout;
        let connect = |lane| {
            let mut stream = connect(path, until)?;
            let hello = [rank as u8, ranks as u8, lane];
            ask(&mut stream, operation::HELLO, VERSION, &hello)?;
            Ok(Mutex::new(stream))
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
        let mut stream = lane.lock().unwrap_or_else(PoisonError::into_inner);
        ask(&mut stream, operation, argument, payload)
    }

    /// Makes a request whose answer are numbers.
    pub(crate) fn numbers(&self, operation: u64, value: u64) -> Result<Vec<u64>, SimulatorError> {
        let answer = self.ask(operation, value, &[])?;
        Ok(answer.chunks(8).map(word).collect())
    }
}

/// Connects to the socket at `path`, which rank 0 may yet have to make.
fn connect(path: &Path, until: Instant) -> Result<UnixStream, SimulatorError> {
    let early = [ErrorKind::NotFound, ErrorKind::ConnectionRefused];
    let refuse = |error| refused(format!("no rank 0 at {}: {error}", path.display()));
    loop {
        match UnixStream::connect(path) {
            Err(error) if early.contains(&error.kind()) && Instant::now() < until => {
                thread::sleep(PAUSE);
            }
            connected => return connected.map_err(refuse),
        }
    }
}

fn ask(
    stream: &mut UnixStream,
    operation: u64,
    argument: u64,
    payload: &[u8],
) -> Result<Vec<u8>, SimulatorError> {
    let lost = |error| refused(format!("the process of rank 0 ended: {error}"));
    send(stream, &[operation, argument], payload).map_err(lost)?;
    let ([status], answer) = receive(stream, MOST_BYTES).map_err(lost)?;
    match status {
        0 => Ok(answer),
        _ => Err(refused(String::from_utf8_lossy(&answer).into())),
    }
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
    stream: &mut UnixStream,
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
