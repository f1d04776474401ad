//! A connection between two ranks: whole messages, and waits that end.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::BootstrapError;

/// "FRY1": first in every message.
const MAGIC: u32 = u32::from_le_bytes(*b"FRY1");
/// Longest message taken.
const MAX_BYTES: u64 = 64 << 20;
/// How long rank 0 lets a newcomer take to say who it is: strangers may connect, too.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(2);

/// When a call must have ended.
#[derive(Clone, Copy)]
pub struct Limit {
    pub timeout: Duration,
    /// `None`: never, for a timeout that no clock reaches.
    end: Option<Instant>,
}

impl Limit {
    pub fn of(timeout: Duration) -> Self {
        Self {
            timeout,
            end: Instant::now().checked_add(timeout),
        }
    }

    /// Time left; `None` once there is none. At most a day, which sockets accept.
    pub fn left(self) -> Option<Duration> {
        let day = Duration::from_secs(24 * 60 * 60);
        let left = self
            .end
            .map_or(day, |end| end.saturating_duration_since(Instant::now()));
        (!left.is_zero()).then(|| left.min(day))
    }

    /// The earlier of this and `timeout` from now.
    pub fn at_most(self, timeout: Duration) -> Self {
        Self::of(self.left().unwrap_or_default().min(timeout))
    }

    /// This, but long enough for a short message to a peer that is listening.
    pub fn at_least(self) -> Self {
        Self::of(self.left().unwrap_or_default().max(HELLO_TIMEOUT))
    }
}

/// A connection to another rank.
#[derive(Debug)]
pub struct Peer {
    pub rank: u32,
    pub address: SocketAddr,
    pub stream: TcpStream,
}

impl Peer {
    pub fn prepare(&self) -> Result<(), BootstrapError> {
        self.stream
            .set_nonblocking(false)
            .and_then(|()| self.stream.set_nodelay(true))
            .map_err(|source| self.io("connecting", source))
    }

    /// What a newcomer calls itself, and how many ranks it expects.
    pub fn hear_hello(&mut self, limit: Limit) -> Result<(u32, u32), BootstrapError> {
        let doing = "joining";
        let bytes = self.receive(0, doing, limit)?;
        match (word(&bytes, 0), word(&bytes, 1)) {
            (Some(rank), Some(ranks)) => Ok((rank, ranks)),
            _ => Err(self.unexpected(doing, 8, bytes.len() as u64)),
        }
    }

    pub fn send(
        &mut self,
        number: u32,
        bytes: &[u8],
        doing: &'static str,
        limit: Limit,
    ) -> Result<(), BootstrapError> {
        let length = bytes.len() as u64;
        if length > MAX_BYTES {
            return Err(self.unexpected(doing, MAX_BYTES, length));
        }
        let header = [
            &MAGIC.to_le_bytes()[..],
            &number.to_le_bytes(),
            &length.to_le_bytes(),
        ]
        .concat();
        self.write_all(&header, doing, limit)?;
        self.write_all(bytes, doing, limit)
    }

    /// The payload of a message that must carry `number`.
    pub fn receive(
        &mut self,
        number: u32,
        doing: &'static str,
        limit: Limit,
    ) -> Result<Vec<u8>, BootstrapError> {
        let (got, bytes) = self.receive_any(doing, limit)?;
        if got != number {
            return Err(self.unexpected(doing, number.into(), got.into()));
        }
        Ok(bytes)
    }

    /// The number and the payload of the next message.
    pub fn receive_any(
        &mut self,
        doing: &'static str,
        limit: Limit,
    ) -> Result<(u32, Vec<u8>), BootstrapError> {
        let mut header = [0; 16];
        self.read_exact(&mut header, doing, limit)?;
        let [m0, m1, m2, m3, n0, n1, n2, n3, length @ ..] = header;
        let magic = u32::from_le_bytes([m0, m1, m2, m3]);
        let length = u64::from_le_bytes(length);
        if magic != MAGIC {
            return Err(self.unexpected(doing, MAGIC.into(), magic.into()));
        }
        if length > MAX_BYTES {
            return Err(self.unexpected(doing, MAX_BYTES, length));
        }
        let mut bytes = vec![0; length as usize];
        self.read_exact(&mut bytes, doing, limit)?;
        Ok((u32::from_le_bytes([n0, n1, n2, n3]), bytes))
    }

    fn read_exact(
        &mut self,
        mut bytes: &mut [u8],
        doing: &'static str,
        limit: Limit,
    ) -> Result<(), BootstrapError> {
        while !bytes.is_empty() {
            let Some(left) = limit.left() else {
                return Err(self.timeout(doing, limit));
            };
            let read = self
                .stream
                .set_read_timeout(Some(left))
                .and_then(|()| self.stream.read(bytes));
            match read {
                Ok(0) => return Err(self.io(doing, ErrorKind::UnexpectedEof.into())),
                Ok(count) => bytes = &mut bytes[count..],
                Err(error) if again(&error) => {}
                Err(error) => return Err(self.io(doing, error)),
            }
        }
        Ok(())
    }

    fn write_all(
        &mut self,
        mut bytes: &[u8],
        doing: &'static str,
        limit: Limit,
    ) -> Result<(), BootstrapError> {
        while !bytes.is_empty() {
            let Some(left) = limit.left() else {
                return Err(self.timeout(doing, limit));
            };
            let written = self
                .stream
                .set_write_timeout(Some(left))
                .and_then(|()| self.stream.write(bytes));
            match written {
                Ok(0) => return Err(self.io(doing, ErrorKind::WriteZero.into())),
                Ok(count) => bytes = &bytes[count..],
                Err(error) if again(&error) => {}
                Err(error) => return Err(self.io(doing, error)),
            }
        }
        Ok(())
    }

    fn io(&self, doing: &'static str, source: std::io::Error) -> BootstrapError {
        BootstrapError::Io {
            peer: self.rank,
            address: self.address,
            doing,
            source,
        }
    }

    fn timeout(&self, doing: &'static str, limit: Limit) -> BootstrapError {
        let seconds = limit.timeout.as_secs_f64();
        BootstrapError::Timeout {
            peer: self.rank,
            address: self.address,
            doing,
            seconds,
        }
    }

    fn unexpected(&self, doing: &'static str, wanted: u64, got: u64) -> BootstrapError {
        BootstrapError::Unexpected {
            peer: self.rank,
            address: self.address,
            doing,
            wanted,
            got,
        }
    }
}

/// Whether to try again: the time is up (the limit is looked at next), or a signal came.
fn again(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

/// The `index`-th 32-bit word.
pub fn word(bytes: &[u8], index: usize) -> Option<u32> {
    let (words, _) = bytes.as_chunks();
    words.get(index).copied().map(u32::from_le_bytes)
}
