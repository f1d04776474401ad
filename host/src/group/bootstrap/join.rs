//! The rendezvous on all ranks but rank 0.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::TcpStream;

use super::hello::{CHALLENGE, DUPLICATE, GIVEN_UP, Hello, OTHER_KEY, WELCOME, WORLD_SIZE};
use super::key::{Prover, Random, random};
use super::peer::{Message, PAUSE, Peer, word};
use super::tcp::Rendezvous;
use crate::error::bootstrap::BootstrapError;

const DOING: &str = "joining";

impl Rendezvous<'_> {
    /// Meets rank 0.
    pub(super) fn join(self, rank: u32) -> Result<Peer, BootstrapError> {
        let Self {
            ranks,
            address,
            limit,
            key,
        } = self;
        let nonce = RandomState::new().build_hasher().finish();
        loop {
            let hello = Hello {
                rank,
                ranks,
                nonce,
                random: key.map(|_| random()).transpose()?,
            };
            let mut host = self.reach()?;
            let (message, is_proved) = match self.introduce(&mut host, &hello) {
                Ok(answer) => answer,
                // Sent away before the hello was read, for example because many came: try again.
                Err(BootstrapError::Io { .. }) if limit.left().is_some() => {
                    std::thread::sleep(PAUSE);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let other_key = |theirs| BootstrapError::OtherKey {
                rank,
                ours: key.is_some(),
                peer: 0,
                theirs,
                address,
            };
            return match (message.number, word(&message.bytes, 0)) {
                (WELCOME, _) if is_proved => Ok(host),
                (WELCOME, _) => Err(other_key(true)),
                (OTHER_KEY, Some(has_key)) => Err(other_key(has_key != 0)),
                (WORLD_SIZE, Some(theirs)) => Err(BootstrapError::WorldSize {
                    rank,
                    ours: ranks,
                    peer: 0,
                    theirs,
                    address,
                }),
                (DUPLICATE, _) => Err(BootstrapError::DuplicateRank { rank, address }),
                (GIVEN_UP, _) => Err(BootstrapError::GivenUp { address }),
                (got, _) => Err(host.unexpected(DOING, WELCOME.into(), got.into())),
            };
        }
    }

    /// Receives rank 0's verdict, and whether rank 0 has proved its key with it, or need not without one.
    fn introduce(self, host: &mut Peer, hello: &Hello) -> Result<(Message, bool), BootstrapError> {
        host.send(0, &hello.bytes(), DOING, self.limit)?;
        let message = host.receive_any(DOING, self.limit)?;
        let Some(key) = self.key else {
            return Ok((message, true));
        };
        let challenge = Random::try_from(&message.bytes[..]);
        let (CHALLENGE, Ok(challenge)) = (message.number, challenge) else {
            return Ok((message, false));
        };
        let said = hello.said(&challenge);
        host.send(0, &key.proof(Prover::Rank, &said), DOING, self.limit)?;
        let message = host.receive_any(DOING, self.limit)?;
        let proof = message.bytes.get(size_of::<u32>()..).unwrap_or_default();
        let is_proved = key.is_proved(Prover::Host, &said, proof);
        Ok((message, is_proved))
    }

    /// Connects to rank 0, as soon as it listens.
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
                // If nobody listens, a connection can get this address as its own, and connect to itself.
                && stream.local_addr().is_ok_and(|own| own != address)
            {
                return Peer::new(peer, self.ranks, address, stream);
            }
            std::thread::sleep(PAUSE);
        }
    }
}
