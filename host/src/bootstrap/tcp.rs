//! A rendezvous over TCP that needs no launcher's help: rank 0 listens, the others come.
//!
//! Every message is 16 bytes of header (a tag, a number, a length), little-endian, and then the
//! payload. All ranks send to rank 0, which answers with everybody's.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::{Bootstrap, BootstrapError};

/// "FRY1": first in every message.
const MAGIC: u32 = u32::from_le_bytes(*b"FRY1");
/// How long rank 0 lets a newcomer take to say who it is: strangers may connect, too.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between two looks for a newcomer, or two attempts to connect.
const PAUSE: Duration = Duration::from_millis(5);
/// Longest message taken.
const MAX_BYTES: u64 = 64 << 20;

/// What rank 0 answers to a newcomer.
const WELCOME: u32 = 0;
const WORLD_SIZE: u32 = 1;
const DUPLICATE: u32 = 2;
const GIVEN_UP: u32 = 3;

/// A [`Bootstrap`] over TCP. Anybody who can connect to rank 0's address can take part: use it
/// in networks where that is as it should be.
#[derive(Debug)]
pub struct TcpBootstrap {
    rank: u32,
    ranks: u32,
    timeout: Duration,
    /// Calls so far: each message carries the number of its call.
    calls: u32,
    /// On rank 0 all others, ascending; elsewhere rank 0.
    peers: Vec<Peer>,
}

impl TcpBootstrap {
    /// Meets the other ranks at `address`: rank 0 listens there, the others connect, again and
    /// again until it does. Collective. `timeout` bounds this call and each later one.
    ///
    /// # Errors
    /// [`BootstrapError`], on every rank that takes part: a rank is missing, stands there
    /// twice, or expects another number of ranks.
    pub fn connect(
        rank: u32,
        ranks: u32,
        address: SocketAddr,
        timeout: Duration,
    ) -> Result<Self, BootstrapError> {
        if rank >= ranks {
            return Err(BootstrapError::RankOutOfRange { rank, ranks, address });
        }
        let limit = Limit::of(timeout);
        let peers = if rank == 0 {
            let doing = "listening";
            let listener = TcpListener::bind(address)
                .map_err(|source| BootstrapError::Io { peer: 0, address, doing, source })?;
            Rendezvous { ranks, address, limit }.host(&listener)?
        } else {
            vec![Rendezvous { ranks, address, limit }.join(rank)?]
        };
        Ok(Self { rank, ranks, timeout, calls: 0, peers })
    }

    /// Rank 0: collects from all, answers to all.
    fn collect(&mut self, bytes: &[u8], limit: Limit) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let call = self.calls;
        let mut all = vec![bytes.to_vec()];
        for peer in &mut self.peers {
            all.push(peer.receive(call, "all_gather", limit)?);
        }
        for peer in &mut self.peers {
            for bytes in &all {
                peer.send(call, bytes, "all_gather", limit)?;
            }
        }
        Ok(all)
    }
}

impl Bootstrap for TcpBootstrap {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let limit = Limit::of(self.timeout);
        self.calls = self.calls.wrapping_add(1);
        if self.rank == 0 {
            return self.collect(bytes, limit);
        }
        let (call, host) = (self.calls, &mut self.peers[0]);
        host.send(call, bytes, "all_gather", limit)?;
        (0..self.ranks).map(|_| host.receive(call, "all_gather", limit)).collect()
    }
}

/// When a call must have ended.
#[derive(Clone, Copy)]
struct Limit {
    timeout: Duration,
    /// `None`: never, for a timeout that no clock reaches.
    end: Option<Instant>,
}

impl Limit {
    fn of(timeout: Duration) -> Self {
        Self { timeout, end: Instant::now().checked_add(timeout) }
    }

    /// Time left; `None` once there is none. At most a day, which sockets accept.
    fn left(self) -> Option<Duration> {
        let day = Duration::from_secs(24 * 60 * 60);
        let left = self.end.map_or(day, |end| end.saturating_duration_since(Instant::now()));
        (!left.is_zero()).then(|| left.min(day))
    }

    /// The earlier of this and `timeout` from now.
    fn at_most(self, timeout: Duration) -> Self {
        Self::of(self.left().unwrap_or_default().min(timeout))
    }
}

/// A meeting that is being held.
#[derive(Clone, Copy)]
struct Rendezvous {
    ranks: u32,
    address: SocketAddr,
    limit: Limit,
}

impl Rendezvous {
    /// Rank 0's part: takes in everybody, then lets them go on; or tells them that it gave up.
    fn host(self, listener: &TcpListener) -> Result<Vec<Peer>, BootstrapError> {
        let mut present: Vec<Option<Peer>> = (1..self.ranks).map(|_| None).collect();
        let gathered = self.gather(listener, &mut present);
        let verdict = if gathered.is_ok() { WELCOME } else { GIVEN_UP };
        let mut peers: Vec<Peer> = present.into_iter().flatten().collect();
        for peer in &mut peers {
            let told = peer.send(verdict, &self.ranks.to_le_bytes(), "welcome", self.limit.at_least());
            if gathered.is_ok() {
                told?;
            }
        }
        gathered.map(|()| peers)
    }

    /// Fills `present`.
    fn gather(
        self,
        listener: &TcpListener,
        present: &mut [Option<Peer>],
    ) -> Result<(), BootstrapError> {
        let Self { ranks, address, limit } = self;
        let doing = "accepting";
        let io = |source| BootstrapError::Io { peer: 0, address, doing, source };
        listener.set_nonblocking(true).map_err(io)?;
        while present.iter().any(Option::is_none) {
            match listener.accept() {
                Ok((stream, from)) => self.admit(stream, from, present)?,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if limit.left().is_none() {
                        let absent = |(rank, peer): (u32, &Option<Peer>)| {
                            peer.is_none().then_some(rank)
                        };
                        let missing = (1..).zip(present.iter()).filter_map(absent).collect();
                        let seconds = limit.timeout.as_secs_f64();
                        return Err(BootstrapError::MissingRanks {
                            missing,
                            ranks,
                            address,
                            seconds,
                        });
                    }
                    std::thread::sleep(PAUSE);
                }
                Err(error) => return Err(io(error)),
            }
        }
        Ok(())
    }

    /// Hears who a newcomer is. Strangers are sent away, and so are ranks that are here already;
    /// one that expects another number of ranks ends the meeting.
    fn admit(
        self,
        stream: TcpStream,
        from: SocketAddr,
        present: &mut [Option<Peer>],
    ) -> Result<(), BootstrapError> {
        let Self { ranks, address, limit } = self;
        let mut peer = Peer { rank: u32::MAX, address: from, stream };
        let hello = peer.prepare().and_then(|()| peer.hear_hello(limit.at_most(HELLO_TIMEOUT)));
        let (rank, theirs) = match hello {
            Ok(hello) => hello,
            Err(error) => {
                tracing::warn!(%from, %error, "a stranger came to the rendezvous");
                return Ok(());
            }
        };
        peer.rank = rank;
        let size = ranks.to_le_bytes();
        if theirs != ranks {
            // Whether it hears this or not, the meeting is over.
            let _ = peer.send(WORLD_SIZE, &size, "welcome", limit.at_least());
            return Err(BootstrapError::WorldSize { rank: 0, ours: ranks, peer: rank, theirs, address });
        }
        let place = rank.checked_sub(1).and_then(|index| present.get_mut(index as usize));
        match place {
            Some(place) if place.is_none() => *place = Some(peer),
            _ => {
                tracing::warn!(%from, rank, "a rank came to the rendezvous twice");
                let _ = peer.send(DUPLICATE, &size, "welcome", limit.at_least());
            }
        }
        Ok(())
    }

    /// The other ranks' part.
    fn join(self, rank: u32) -> Result<Peer, BootstrapError> {
        let Self { ranks, address, limit } = self;
        let doing = "joining";
        loop {
            let mut host = self.reach()?;
            let hello = [rank.to_le_bytes(), ranks.to_le_bytes()].concat();
            let answer = host
                .send(0, &hello, doing, limit)
                .and_then(|()| host.receive_any(doing, limit));
            let (verdict, size) = match answer {
                Ok((verdict, size)) => (verdict, word(&size, 0)),
                // Sent away unheard, for example because rank 0 was slow: once more.
                Err(BootstrapError::Io { .. }) if limit.left().is_some() => {
                    std::thread::sleep(PAUSE);
                    continue;
                }
                Err(error) => return Err(error),
            };
            return match (verdict, size) {
                (WELCOME, _) => Ok(host),
                (WORLD_SIZE, Some(theirs)) => {
                    Err(BootstrapError::WorldSize { rank, ours: ranks, peer: 0, theirs, address })
                }
                (DUPLICATE, _) => Err(BootstrapError::DuplicateRank { rank, address }),
                (GIVEN_UP, _) => Err(BootstrapError::GivenUp { address }),
                (got, _) => {
                    let (wanted, got) = (WELCOME.into(), got.into());
                    Err(BootstrapError::Unexpected { peer: 0, address, doing, wanted, got })
                }
            };
        }
    }

    /// A connection to rank 0, as soon as it listens.
    fn reach(self) -> Result<Peer, BootstrapError> {
        let Self { address, limit, .. } = self;
        let (peer, doing) = (0, "connecting");
        loop {
            let Some(left) = limit.left() else {
                let seconds = limit.timeout.as_secs_f64();
                return Err(BootstrapError::Timeout { peer, address, doing, seconds });
            };
            if let Ok(stream) = TcpStream::connect_timeout(&address, left) {
                let host = Peer { rank: peer, address, stream };
                return host.prepare().map(|()| host);
            }
            std::thread::sleep(PAUSE);
        }
    }
}

impl Limit {
    /// This, but long enough for a short message to a peer that is listening.
    fn at_least(self) -> Self {
        Self::of(self.left().unwrap_or_default().max(HELLO_TIMEOUT))
    }
}

/// A connection to another rank.
#[derive(Debug)]
struct Peer {
    rank: u32,
    address: SocketAddr,
    stream: TcpStream,
}

impl Peer {
    fn prepare(&self) -> Result<(), BootstrapError> {
        self.stream
            .set_nonblocking(false)
            .and_then(|()| self.stream.set_nodelay(true))
            .map_err(|source| self.io("connecting", source))
    }

    /// What a newcomer calls itself, and how many ranks it expects.
    fn hear_hello(&mut self, limit: Limit) -> Result<(u32, u32), BootstrapError> {
        let doing = "joining";
        let bytes = self.receive(0, doing, limit)?;
        match (word(&bytes, 0), word(&bytes, 1)) {
            (Some(rank), Some(ranks)) => Ok((rank, ranks)),
            _ => Err(self.unexpected(doing, 8, bytes.len() as u64)),
        }
    }

    fn send(
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
        let header =
            [&MAGIC.to_le_bytes()[..], &number.to_le_bytes(), &length.to_le_bytes()].concat();
        self.write_all(&header, doing, limit)?;
        self.write_all(bytes, doing, limit)
    }

    /// The payload of a message that must carry `number`.
    fn receive(
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
    fn receive_any(
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
            let Some(left) = limit.left() else { return Err(self.timeout(doing, limit)) };
            let read =
                self.stream.set_read_timeout(Some(left)).and_then(|()| self.stream.read(bytes));
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
            let Some(left) = limit.left() else { return Err(self.timeout(doing, limit)) };
            let written =
                self.stream.set_write_timeout(Some(left)).and_then(|()| self.stream.write(bytes));
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
        BootstrapError::Io { peer: self.rank, address: self.address, doing, source }
    }

    fn timeout(&self, doing: &'static str, limit: Limit) -> BootstrapError {
        let seconds = limit.timeout.as_secs_f64();
        BootstrapError::Timeout { peer: self.rank, address: self.address, doing, seconds }
    }

    fn unexpected(&self, doing: &'static str, wanted: u64, got: u64) -> BootstrapError {
        BootstrapError::Unexpected { peer: self.rank, address: self.address, doing, wanted, got }
    }
}

/// Whether to try again: the time is up (the limit is looked at next), or a signal came.
fn again(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// The `index`-th 32-bit word.
fn word(bytes: &[u8], index: usize) -> Option<u32> {
    bytes.chunks_exact(4).nth(index).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

#[cfg(test)]
#[path = "tcp_tests.rs"]
mod tests;
