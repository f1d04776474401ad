//! A connection between two ranks: whole messages, and waits that end.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::error::bootstrap::BootstrapError;

/// Tag of every message of a call; the digit is raised when messages change.
const CALL: u32 = u32::from_le_bytes(*b"FRY3");
/// Tag of the message that a rank was lost: its number is that rank or [`NOBODY`], its payload the reason.
const LOST: u32 = u32::from_le_bytes(*b"FRYL");
/// Number instead of the lost rank if the sender gave up and knows of none.
const NOBODY: u32 = u32::MAX;
/// Bytes of a tag, a number and the payload's length.
const HEADER_BYTES: usize = 16;
/// Longest payload that is accepted.
pub const MAX_BYTES: u64 = 64 << 20;
/// Time for a newcomer to identify itself, and to prove its key: strangers may connect, too.
/// Also the time for telling that a rank was lost.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between two polls.
pub const PAUSE: Duration = Duration::from_millis(1);

/// End of a call's time.
#[derive(Clone, Copy)]
pub struct Limit {
    pub timeout: Duration,
    /// End of the time; `None` for a timeout that no clock reaches.
    end: Option<Instant>,
}

impl Limit {
    pub fn of(timeout: Duration) -> Self {
        Self {
            timeout,
            end: Instant::now().checked_add(timeout),
        }
    }

    /// Returns the remaining time, at most a day, which sockets accept as a timeout; `None` if no time is
    /// left.
    pub fn left(self) -> Option<Duration> {
        let day = Duration::from_secs(24 * 60 * 60);
        let left = self
            .end
            .map_or(day, |end| end.saturating_duration_since(Instant::now()));
        (!left.is_zero()).then(|| left.min(day))
    }

    /// This limit, extended if necessary for a short message to a peer that is listening.
    pub fn at_least(self) -> Self {
        Self::of(self.left().unwrap_or_default().max(HELLO_TIMEOUT))
    }
}

/// A complete message.
pub struct Message {
    pub number: u32,
    pub bytes: Vec<u8>,
}

/// Reason why no call is made any more.
#[derive(Clone, Debug)]
pub struct Loss {
    /// The lost rank; `None` if a rank gave up and none is known to be lost.
    lost: Option<u32>,
    /// The rank that gave up.
    by: u32,
    reason: String,
}

impl Loss {
    /// Loss for `error` on rank `by`. If no other rank is at fault, that rank is.
    pub fn of(error: &BootstrapError, by: u32) -> Self {
        let (lost, reason) = match error {
            BootstrapError::Lost { rank, reason } => (Some(*rank), reason.clone()),
            BootstrapError::Timeout { peer: 0, .. } | BootstrapError::GaveUp { .. } => {
                (None, error.to_string())
            }
            error => (Some(error.lost_rank().unwrap_or(by)), error.to_string()),
        };
        Self { lost, by, reason }
    }

    pub fn error(self) -> BootstrapError {
        let Self { lost, by, reason } = self;
        match lost {
            Some(rank) => BootstrapError::Lost { rank, reason },
            None => BootstrapError::GaveUp { rank: by, reason },
        }
    }

    /// Tells `peer`, if it can still be told.
    pub fn tell(&self, peer: &mut Peer, limit: Limit) {
        peer.tell_lost(self.lost.unwrap_or(NOBODY), &self.reason, limit);
    }
}

/// A connection to another rank.
#[derive(Debug)]
pub struct Peer {
    pub rank: u32,
    /// Size of the group.
    ranks: u32,
    pub address: SocketAddr,
    /// The connection, in non-blocking mode.
    stream: TcpStream,
    /// Received bytes of the next message.
    received: Vec<u8>,
    /// Whether a message to it was cut off: another one would be taken for the rest.
    cut_off: bool,
}

impl Peer {
    pub fn new(
        rank: u32,
        ranks: u32,
        address: SocketAddr,
        stream: TcpStream,
    ) -> Result<Self, BootstrapError> {
        let peer = Self {
            rank,
            ranks,
            address,
            stream,
            received: Vec::new(),
            cut_off: false,
        };
        peer.stream
            .set_nonblocking(true)
            .and_then(|()| peer.stream.set_nodelay(true))
            .map_err(|source| peer.io("connecting", source))?;
        Ok(peer)
    }

    pub fn send(
        &mut self,
        number: u32,
        bytes: &[u8],
        doing: &'static str,
        limit: Limit,
    ) -> Result<(), BootstrapError> {
        let header = header(CALL, number, bytes);
        self.write_all(&header, doing, limit)?;
        self.write_all(bytes, doing, limit)
    }

    /// Tells the peer that `rank` was lost, if possible. It learns of it in its next poll.
    pub fn tell_lost(&mut self, rank: u32, reason: &str, limit: Limit) {
        if self.cut_off {
            return;
        }
        let message = [&header(LOST, rank, reason.as_bytes()), reason.as_bytes()].concat();
        if let Err(error) = self.write_all(&message, "telling who was lost", limit) {
            tracing::debug!(peer = self.rank, %error, "not told that rank {rank} was lost");
        }
    }

    /// Receives the payload of a message that must carry `number`.
    pub fn receive(
        &mut self,
        number: u32,
        doing: &'static str,
        limit: Limit,
    ) -> Result<Vec<u8>, BootstrapError> {
        let message = self.receive_any(doing, limit)?;
        self.require(number, message, doing)
    }

    /// Receives the next message.
    pub fn receive_any(
        &mut self,
        doing: &'static str,
        limit: Limit,
    ) -> Result<Message, BootstrapError> {
        loop {
            // Polls once more after the end: this process may have been halted since the last poll.
            let is_over = limit.left().is_none();
            if let Some(message) = self.poll(MAX_BYTES, doing)? {
                return Ok(message);
            }
            if is_over {
                return Err(self.timeout(doing, limit));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// The payload, if the message carries `number`.
    pub fn require(
        &self,
        number: u32,
        message: Message,
        doing: &'static str,
    ) -> Result<Vec<u8>, BootstrapError> {
        if message.number != number {
            return Err(self.unexpected(doing, number.into(), message.number.into()));
        }
        Ok(message.bytes)
    }

    /// Returns the next message, if it is complete; its payload may have at most `most` bytes. Does not
    /// wait. If a rank was lost or the peer gave up, that is the error.
    pub fn poll(
        &mut self,
        most: u64,
        doing: &'static str,
    ) -> Result<Option<Message>, BootstrapError> {
        let mut chunk = [0; 1 << 14];
        loop {
            let missing = self.missing(most, doing)?;
            if missing == 0 {
                return self.take(doing).map(Some);
            }
            let room = missing.min(chunk.len());
            match self.stream.read(&mut chunk[..room]) {
                Ok(0) => return Err(self.io(doing, ErrorKind::UnexpectedEof.into())),
                Ok(count) => self.received.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.io(doing, error)),
            }
        }
    }

    /// Bytes that the message, or its header, lacks. No memory is reserved for an announced length.
    fn missing(&self, most: u64, doing: &'static str) -> Result<usize, BootstrapError> {
        let Some(&[m0, m1, m2, m3, _, _, _, _, length @ ..]) =
            self.received.first_chunk::<HEADER_BYTES>()
        else {
            return Ok(HEADER_BYTES - self.received.len());
        };
        let tag = u32::from_le_bytes([m0, m1, m2, m3]);
        if tag != CALL && tag != LOST {
            return Err(self.unexpected(doing, CALL.into(), tag.into()));
        }
        let length = u64::from_le_bytes(length);
        if length > most {
            return Err(self.unexpected(doing, most, length));
        }
        Ok(HEADER_BYTES + length as usize - self.received.len())
    }

    /// Takes the message, which is complete.
    fn take(&mut self, doing: &'static str) -> Result<Message, BootstrapError> {
        let mut bytes = std::mem::take(&mut self.received);
        let tag = word(&bytes, 0);
        let number = word(&bytes, 1).unwrap_or_default();
        bytes.drain(..HEADER_BYTES);
        if tag == Some(LOST) {
            let reason = String::from_utf8_lossy(&bytes).into_owned();
            return Err(match number {
                NOBODY => BootstrapError::GaveUp {
                    rank: self.rank,
                    reason,
                },
                rank if rank < self.ranks => BootstrapError::Lost { rank, reason },
                rank => self.unexpected(doing, self.ranks.into(), rank.into()),
            });
        }
        Ok(Message { number, bytes })
    }

    fn write_all(
        &mut self,
        bytes: &[u8],
        doing: &'static str,
        limit: Limit,
    ) -> Result<(), BootstrapError> {
        let written = self.write_on(bytes, doing, limit);
        self.cut_off |= written.is_err();
        written
    }

    fn write_on(
        &mut self,
        mut bytes: &[u8],
        doing: &'static str,
        limit: Limit,
    ) -> Result<(), BootstrapError> {
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(0) => return Err(self.io(doing, ErrorKind::WriteZero.into())),
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // A peer that has given up reads no more, and has sent its reason.
                    if let Some(message) = self.poll(MAX_BYTES, doing)? {
                        return Err(self.unexpected(doing, 0, message.number.into()));
                    }
                    self.pause(doing, limit)?;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    // A reason that the peer sent before it left says more than the broken connection.
                    return match self.poll(MAX_BYTES, doing) {
                        Err(
                            told @ (BootstrapError::Lost { .. } | BootstrapError::GaveUp { .. }),
                        ) => Err(told),
                        _ => Err(self.io(doing, error)),
                    };
                }
            }
        }
        Ok(())
    }

    fn pause(&self, doing: &'static str, limit: Limit) -> Result<(), BootstrapError> {
        if limit.left().is_none() {
            return Err(self.timeout(doing, limit));
        }
        std::thread::sleep(PAUSE);
        Ok(())
    }

    fn io(&self, doing: &'static str, source: std::io::Error) -> BootstrapError {
        use ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        let source = match source.kind() {
            kind @ (BrokenPipe | ConnectionReset | UnexpectedEof) => {
                std::io::Error::new(kind, "the other side closed it, or its process ended")
            }
            _ => source,
        };
        BootstrapError::Io {
            peer: self.rank,
            address: self.address,
            doing,
            source,
        }
    }

    pub fn timeout(&self, doing: &'static str, limit: Limit) -> BootstrapError {
        let seconds = limit.timeout.as_secs_f64();
        BootstrapError::Timeout {
            peer: self.rank,
            address: self.address,
            doing,
            seconds,
        }
    }

    pub fn unexpected(&self, doing: &'static str, wanted: u64, got: u64) -> BootstrapError {
        BootstrapError::Unexpected {
            peer: self.rank,
            address: self.address,
            doing,
            wanted,
            got,
        }
    }
}

fn header(tag: u32, number: u32, bytes: &[u8]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&tag.to_le_bytes());
    header[4..8].copy_from_slice(&number.to_le_bytes());
    header[8..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    header
}

/// The `index`-th 32-bit word.
pub fn word(bytes: &[u8], index: usize) -> Option<u32> {
    let (words, _) = bytes.as_chunks();
    words.get(index).copied().map(u32::from_le_bytes)
}
