//! A rank's way to a machine in the process of rank 0, over a Unix socket.
//!
//! A rank has two connections, for commands and for waits, so that a process that ends while it waits is
//! noticed. A request is three words (operation, argument, bytes of the payload) and the payload, an answer
//! two words (0 or 1: the payload is a result, or a text; its bytes) and the payload; all little-endian.

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use ferry_layout::PROTOCOL_VERSION;

use crate::error::SimulatorError;
use crate::lane::{Lane, refused, word};
use crate::options::{Options, is_interrupted};

/// Most bytes of a hello: three numbers and a key.
pub(crate) const MOST_OF_HELLO: u64 = 3 + MOST_OF_KEY as u64;
/// Most bytes of [`Options::key`].
pub(crate) const MOST_OF_KEY: usize = 1024;
/// Most bytes of a socket's path, of which the system allows 107: rank 0 makes it in a folder beside, with
/// its process's number and 3 bytes more.
pub(crate) const MOST_OF_PATH: usize = 107 - 10;

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
    commands: Lane,
    waits: Lane,
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
        let connect = |number| {
            let stream = connect(path, until, options.interrupted)?;
            // Work goes on without those that wait for it, who may wait again.
            let lane = Lane::new(stream, options.interrupted, number == 1);
            lane.ask(operation::HELLO, VERSION, &hello(rank, options, number))?;
            Ok(lane)
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
