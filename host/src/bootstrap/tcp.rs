//! A rendezvous over TCP that needs no launcher's help: rank 0 listens, the others come.
//!
//! Every message is 16 bytes of header (a tag, a number, a length), little-endian, and then the
//! payload. All ranks send to rank 0, which answers with everybody's. Whoever finds a rank lost tells those
//! whom it is connected to, in a message that may stand where any other does.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use super::peer::{HELLO_TIMEOUT, Limit, MAX_BYTES, PAUSE, Peer, word};
use crate::{Bootstrap, BootstrapError};

/// Newcomers that rank 0 lets be about to say who they are. Where more come, the first of them are sent away;
/// ranks come again.
const MOST_NEWCOMERS: usize = 256;

/// Rank, ranks, and a number that tells processes apart which call themselves the same.
const HELLO_BYTES: u64 = 16;

/// What rank 0 answers to a newcomer.
const WELCOME: u32 = 0;
const WORLD_SIZE: u32 = 1;
const DUPLICATE: u32 = 2;
const GIVEN_UP: u32 = 3;

/// A [`Bootstrap`] over TCP. Anybody who can connect to rank 0's address can take part: use it
/// in networks where that is as it should be.
///
/// A rank whose process ends is found at once by every call that is under way or comes later. A call that
/// fails tells the other ranks who was lost, and each later call fails at once with
/// [`BootstrapError::Lost`]. The survivors can drop it and [`connect`](Self::connect) anew, as a smaller group.
#[derive(Debug)]
pub struct TcpBootstrap {
    rank: u32,
    ranks: u32,
    timeout: Duration,
    /// Calls so far: each message carries the number of its call.
    calls: u32,
    /// On rank 0 all others, ascending; elsewhere rank 0.
    peers: Vec<Peer>,
    /// Why no call is made any more.
    loss: Option<Loss>,
}

/// Which rank was lost, and how.
#[derive(Clone, Debug)]
struct Loss {
    rank: u32,
    reason: String,
}

impl Loss {
    /// What `error` means to the others. One that is nobody else's fault is that of `rank` itself.
    fn of(error: &BootstrapError, rank: u32) -> Self {
        match error {
            BootstrapError::Lost { rank, reason } => Self {
                rank: *rank,
                reason: reason.clone(),
            },
            error => Self {
                rank: error.lost_rank().unwrap_or(rank),
                reason: error.to_string(),
            },
        }
    }

    fn error(self) -> BootstrapError {
        let Self { rank, reason } = self;
        BootstrapError::Lost { rank, reason }
    }
}

impl TcpBootstrap {
    /// Meets the other ranks at `address`: rank 0 listens there, the others connect, again and
    /// again until it does. Collective. `timeout` bounds this call and each later one; one that fails may take
    /// two seconds more, to tell the others.
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
            return Err(BootstrapError::RankOutOfRange {
                rank,
                ranks,
                address,
            });
        }
        let limit = Limit::of(timeout);
        let peers = if rank == 0 {
            let doing = "listening";
            let listener = TcpListener::bind(address).map_err(|source| BootstrapError::Io {
                peer: 0,
                address,
                doing,
                source,
            })?;
            Rendezvous {
                ranks,
                address,
                limit,
            }
            .host(&listener)?
        } else {
            vec![
                Rendezvous {
                    ranks,
                    address,
                    limit,
                }
                .join(rank)?,
            ]
        };
        Ok(Self {
            rank,
            ranks,
            timeout,
            calls: 0,
            peers,
            loss: None,
        })
    }

    /// One call.
    fn exchange(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let (doing, limit) = ("all_gather", Limit::of(self.timeout));
        if bytes.len() as u64 > MAX_BYTES {
            return Err(BootstrapError::Other {
                call: "TcpBootstrap::all_gather",
                reason: format!("{} bytes given, at most {MAX_BYTES} are sent", bytes.len()),
            });
        }
        let (call, ranks) = (self.calls, self.ranks);
        if self.rank > 0 {
            let host = &mut self.peers[0];
            host.send(call, bytes, doing, limit)?;
            return (0..ranks)
                .map(|_| host.receive(call, doing, limit))
                .collect();
        }
        let all = self.collect(bytes)?;
        for peer in &mut self.peers {
            for bytes in &all {
                let sent = peer.send(call, bytes, doing, limit);
                sent.map_err(|error| gave_up(error, peer.rank, None))?;
            }
        }
        Ok(all)
    }

    /// Rank 0: every rank's bytes of this call. Looks at all connections, so that a lost rank is found whoever
    /// else is late.
    fn collect(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let (doing, call) = ("all_gather", self.calls);
        // Less than the others wait, so that they hear from here who did not come.
        let limit = Limit::of(self.timeout - self.timeout / 8);
        let mut all = vec![None; self.ranks as usize];
        all[0] = Some(bytes.to_vec());
        loop {
            let silent = all.iter().position(Option::is_none).map(|at| at as u32);
            for peer in &mut self.peers {
                let polled = peer.poll(MAX_BYTES, doing);
                let polled = polled.map_err(|error| gave_up(error, peer.rank, silent))?;
                if let Some(message) = polled {
                    let bytes = peer.require(call, message, doing)?;
                    if all[peer.rank as usize].replace(bytes).is_some() {
                        // It sent the same call twice.
                        return Err(peer.unexpected(doing, u64::from(call) + 1, call.into()));
                    }
                }
            }
            let Some(silent) = all.iter().position(Option::is_none) else {
                return Ok(all.into_iter().flatten().collect());
            };
            if limit.left().is_none() {
                return Err(self.peers[silent - 1].timeout(doing, limit));
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// On rank 0, what it means that `from` gave up waiting for rank 0: that somebody else has not come, if
/// anybody has not.
fn gave_up(error: BootstrapError, from: u32, silent: Option<u32>) -> BootstrapError {
    match error {
        BootstrapError::Lost { rank: 0, reason } => BootstrapError::Lost {
            rank: silent.unwrap_or(from),
            reason: format!("rank {from} gave up: {reason}"),
        },
        error => error,
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
        if let Some(loss) = &self.loss {
            return Err(loss.clone().error());
        }
        self.calls = self.calls.wrapping_add(1);
        self.exchange(bytes).inspect_err(|error| {
            let loss = Loss::of(error, self.rank);
            let limit = Limit::of(HELLO_TIMEOUT);
            for peer in &mut self.peers {
                peer.tell_lost(loss.rank, &loss.reason, limit);
            }
            self.loss = Some(loss);
        })
    }
}

/// A meeting that is being held.
#[derive(Clone, Copy)]
struct Rendezvous {
    ranks: u32,
    address: SocketAddr,
    limit: Limit,
}

/// Somebody who has come and has not said yet who it is.
struct Newcomer {
    peer: Peer,
    limit: Limit,
}

/// A rank that has come.
struct Present {
    peer: Peer,
    nonce: u64,
}

impl Present {
    /// Whether its connection broke, or it sent what nobody asked for.
    fn is_gone(&mut self) -> bool {
        self.peer.poll(0, "joining").is_err()
    }
}

/// What a newcomer says.
struct Hello {
    rank: u32,
    ranks: u32,
    nonce: u64,
}

impl Hello {
    /// `None` where it has not come whole.
    fn hear(peer: &mut Peer) -> Result<Option<Self>, BootstrapError> {
        let doing = "joining";
        let Some(message) = peer.poll(HELLO_BYTES, doing)? else {
            return Ok(None);
        };
        let bytes = peer.require(0, message, doing)?;
        let word = |index| word(&bytes, index).map(u64::from);
        match (word(0), word(1), word(2), word(3)) {
            (Some(rank), Some(ranks), Some(low), Some(high)) => Ok(Some(Self {
                rank: rank as u32,
                ranks: ranks as u32,
                nonce: high << 32 | low,
            })),
            _ => Err(peer.unexpected(doing, HELLO_BYTES, bytes.len() as u64)),
        }
    }
}

impl Rendezvous {
    /// Rank 0's part: takes in everybody, then lets them go on; or tells them that it gave up.
    fn host(self, listener: &TcpListener) -> Result<Vec<Peer>, BootstrapError> {
        let mut present: Vec<Option<Present>> = (1..self.ranks).map(|_| None).collect();
        let gathered = self.gather(listener, &mut present);
        let verdict = if gathered.is_ok() { WELCOME } else { GIVEN_UP };
        let mut peers: Vec<Peer> = present
            .into_iter()
            .flatten()
            .map(|here| here.peer)
            .collect();
        for peer in &mut peers {
            // Who is gone again is found lost by the first call, which tells all.
            self.answer(peer, verdict);
        }
        gathered.map(|()| peers)
    }

    /// Tells a newcomer how it stands.
    fn answer(self, peer: &mut Peer, verdict: u32) {
        let size = self.ranks.to_le_bytes();
        if let Err(error) = peer.send(verdict, &size, "welcome", self.limit.at_least()) {
            tracing::warn!(%error, "a rank that came to the rendezvous is gone");
        }
    }

    /// Fills `present`. Nobody who is silent keeps others waiting.
    fn gather(
        self,
        listener: &TcpListener,
        present: &mut [Option<Present>],
    ) -> Result<(), BootstrapError> {
        let io = |source| BootstrapError::Io {
            peer: 0,
            address: self.address,
            doing: "accepting",
            source,
        };
        listener.set_nonblocking(true).map_err(io)?;
        let mut newcomers: Vec<Newcomer> = Vec::new();
        loop {
            // A rank that has gone may be started again.
            let is_here = |here: &mut Option<Present>| here.as_mut().is_some_and(|h| !h.is_gone());
            if present.iter_mut().all(is_here) {
                return Ok(());
            }
            if self.limit.left().is_none() {
                return Err(self.missing(present));
            }
            match listener.accept() {
                Ok((stream, from)) => self.let_in(stream, from, &mut newcomers),
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => std::thread::sleep(PAUSE),
                    // Somebody left before it was let in.
                    ErrorKind::ConnectionAborted | ErrorKind::Interrupted => {}
                    _ => return Err(io(error)),
                },
            }
            for mut newcomer in std::mem::take(&mut newcomers) {
                match Hello::hear(&mut newcomer.peer) {
                    Ok(Some(hello)) => self.admit(newcomer.peer, &hello, present)?,
                    Ok(None) if newcomer.limit.left().is_some() => newcomers.push(newcomer),
                    Ok(None) => {
                        tracing::warn!(from = %newcomer.peer.address, "a stranger said nothing");
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a stranger came to the rendezvous");
                    }
                }
            }
        }
    }

    /// Who did not come; where all came, who has gone.
    fn missing(self, present: &mut [Option<Present>]) -> BootstrapError {
        let all_came = present.iter().all(Option::is_some);
        let missing = |(rank, here): (u32, &mut Option<Present>)| {
            let here = here.as_mut();
            let is_missing = here.is_none_or(|here| all_came && here.is_gone());
            is_missing.then_some(rank)
        };
        BootstrapError::MissingRanks {
            missing: (1..).zip(present).filter_map(missing).collect(),
            ranks: self.ranks,
            address: self.address,
            seconds: self.limit.timeout.as_secs_f64(),
        }
    }

    fn let_in(self, stream: TcpStream, from: SocketAddr, newcomers: &mut Vec<Newcomer>) {
        match Peer::new(u32::MAX, from, stream) {
            Ok(peer) => newcomers.push(Newcomer {
                peer,
                limit: Limit::of(HELLO_TIMEOUT),
            }),
            Err(error) => tracing::warn!(%error, "a stranger came to the rendezvous"),
        }
        if newcomers.len() > MOST_NEWCOMERS {
            let first = newcomers.remove(0);
            tracing::warn!(from = %first.peer.address, "too many strangers came; sent away");
        }
    }

    /// Takes in a rank. One that is here already takes its own place, or that of a connection that
    /// broke; else it is another process of the same rank, which is sent away. One that expects another number
    /// of ranks ends the meeting.
    fn admit(
        self,
        mut peer: Peer,
        hello: &Hello,
        present: &mut [Option<Present>],
    ) -> Result<(), BootstrapError> {
        let &Hello {
            rank,
            ranks: theirs,
            nonce,
        } = hello;
        peer.rank = rank;
        if theirs != self.ranks {
            // Whether it hears this or not, the meeting is over.
            self.answer(&mut peer, WORLD_SIZE);
            return Err(BootstrapError::WorldSize {
                rank: 0,
                ours: self.ranks,
                peer: rank,
                theirs,
                address: self.address,
            });
        }
        let mut place = rank
            .checked_sub(1)
            .and_then(|index| present.get_mut(index as usize));
        if let Some(Some(here)) = &mut place
            && here.nonce != nonce
            && !here.is_gone()
        {
            place = None;
        }
        match place {
            Some(place) => *place = Some(Present { peer, nonce }),
            // Also for one that calls itself 0, as this one does.
            None => {
                tracing::warn!(from = %peer.address, rank, "a rank came to the rendezvous twice");
                self.answer(&mut peer, DUPLICATE);
            }
        }
        Ok(())
    }

    /// The other ranks' part.
    fn join(self, rank: u32) -> Result<Peer, BootstrapError> {
        let Self {
            ranks,
            address,
            limit,
        } = self;
        let doing = "joining";
        let nonce = RandomState::new().build_hasher().finish();
        let hello = [rank.to_le_bytes(), ranks.to_le_bytes()].concat();
        let hello = [hello, nonce.to_le_bytes().to_vec()].concat();
        loop {
            let mut host = self.reach()?;
            let answer = host
                .send(0, &hello, doing, limit)
                .and_then(|()| host.receive_any(doing, limit));
            let (verdict, size) = match answer {
                Ok(message) => (message.number, word(&message.bytes, 0)),
                // Sent away unheard, for example because many came: once more.
                Err(BootstrapError::Io { .. }) if limit.left().is_some() => {
                    std::thread::sleep(PAUSE);
                    continue;
                }
                Err(error) => return Err(error),
            };
            return match (verdict, size) {
                (WELCOME, _) => Ok(host),
                (WORLD_SIZE, Some(theirs)) => Err(BootstrapError::WorldSize {
                    rank,
                    ours: ranks,
                    peer: 0,
                    theirs,
                    address,
                }),
                (DUPLICATE, _) => Err(BootstrapError::DuplicateRank { rank, address }),
                (GIVEN_UP, _) => Err(BootstrapError::GivenUp { address }),
                (got, _) => Err(host.unexpected(doing, WELCOME.into(), got.into())),
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
                return Err(BootstrapError::Timeout {
                    peer,
                    address,
                    doing,
                    seconds,
                });
            };
            if let Ok(stream) = TcpStream::connect_timeout(&address, left)
                // Where nobody listens, a connection can be given the address itself as its own.
                && stream.local_addr().is_ok_and(|own| own != address)
            {
                return Peer::new(peer, address, stream);
            }
            std::thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
#[path = "tcp_tests.rs"]
mod tests;
