//! A rendezvous over TCP that needs no launcher's help: rank 0 listens, the others come.
//!
//! Every message is 16 bytes of header (a tag, a number, a length), little-endian, and then the
//! payload. All ranks send to rank 0, which answers with everybody's.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use super::peer::{HELLO_TIMEOUT, Limit, Peer, word};
use crate::{Bootstrap, BootstrapError};

/// Pause between two looks for a newcomer, or two attempts to connect.
const PAUSE: Duration = Duration::from_millis(5);

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
        })
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
        (0..self.ranks)
            .map(|_| host.receive(call, "all_gather", limit))
            .collect()
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
            let told = peer.send(
                verdict,
                &self.ranks.to_le_bytes(),
                "welcome",
                self.limit.at_least(),
            );
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
        let Self {
            ranks,
            address,
            limit,
        } = self;
        let doing = "accepting";
        let io = |source| BootstrapError::Io {
            peer: 0,
            address,
            doing,
            source,
        };
        listener.set_nonblocking(true).map_err(io)?;
        while present.iter().any(Option::is_none) {
            match listener.accept() {
                Ok((stream, from)) => self.admit(stream, from, present)?,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if limit.left().is_none() {
                        let absent =
                            |(rank, peer): (u32, &Option<Peer>)| peer.is_none().then_some(rank);
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
        let Self {
            ranks,
            address,
            limit,
        } = self;
        let mut peer = Peer {
            rank: u32::MAX,
            address: from,
            stream,
        };
        let hello = peer
            .prepare()
            .and_then(|()| peer.hear_hello(limit.at_most(HELLO_TIMEOUT)));
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
            return Err(BootstrapError::WorldSize {
                rank: 0,
                ours: ranks,
                peer: rank,
                theirs,
                address,
            });
        }
        let place = rank
            .checked_sub(1)
            .and_then(|index| present.get_mut(index as usize));
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
        let Self {
            ranks,
            address,
            limit,
        } = self;
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
                (WORLD_SIZE, Some(theirs)) => Err(BootstrapError::WorldSize {
                    rank,
                    ours: ranks,
                    peer: 0,
                    theirs,
                    address,
                }),
                (DUPLICATE, _) => Err(BootstrapError::DuplicateRank { rank, address }),
                (GIVEN_UP, _) => Err(BootstrapError::GivenUp { address }),
                (got, _) => {
                    let (wanted, got) = (WELCOME.into(), got.into());
                    Err(BootstrapError::Unexpected {
                        peer: 0,
                        address,
                        doing,
                        wanted,
                        got,
                    })
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
                return Err(BootstrapError::Timeout {
                    peer,
                    address,
                    doing,
                    seconds,
                });
            };
            if let Ok(stream) = TcpStream::connect_timeout(&address, left) {
                let host = Peer {
                    rank: peer,
                    address,
                    stream,
                };
                return host.prepare().map(|()| host);
            }
            std::thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
#[path = "tcp_tests.rs"]
mod tests;
