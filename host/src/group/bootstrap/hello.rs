//! Messages that ranks exchange when they meet.
//!
//! A rank says hello, and rank 0 answers with a verdict. If both have a key, a random number comes with
//! the hello, rank 0 answers with one of its own ([`CHALLENGE`]), the rank proves its key, and rank 0 does so
//! with its welcome. So strangers get nothing that was made with the key.

use super::key::Random;
use super::peer::{Peer, word};
use crate::error::bootstrap::BootstrapError;

/// Answer of rank 0 with the number of ranks, and its proof if there is a key.
pub const WELCOME: u32 = 0;
/// Number of ranks that rank 0 expects.
pub const WORLD_SIZE: u32 = 1;
pub const DUPLICATE: u32 = 2;
pub const GIVEN_UP: u32 = 3;
/// Whether rank 0 has a key: 1 or 0.
pub const OTHER_KEY: u32 = 4;
/// A random number of rank 0's.
pub const CHALLENGE: u32 = 5;

/// Bytes of the rank, the number of ranks, and a number that distinguishes processes with one rank.
const PLAIN_BYTES: usize = 16;
/// Longest hello: that of a rank with a key.
pub const HELLO_BYTES: u64 = (PLAIN_BYTES + size_of::<Random>()) as u64;

/// First message of a newcomer.
#[derive(Clone, Copy)]
pub struct Hello {
    pub rank: u32,
    pub ranks: u32,
    pub nonce: u64,
    /// Present if it has a key.
    pub random: Option<Random>,
}

impl Hello {
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = [self.rank.to_le_bytes(), self.ranks.to_le_bytes()].concat();
        bytes.extend(self.nonce.to_le_bytes());
        bytes.extend(self.random.iter().flatten());
        bytes
    }

    /// All that was sent in the clear, which both sides prove to have received.
    pub fn said(&self, challenge: &Random) -> Vec<u8> {
        [self.bytes(), challenge.to_vec()].concat()
    }

    /// Receives a hello; `None` if it has not arrived whole.
    pub fn hear(peer: &mut Peer) -> Result<Option<Self>, BootstrapError> {
        let doing = "joining";
        let Some(message) = peer.poll(HELLO_BYTES, doing)? else {
            return Ok(None);
        };
        let bytes = peer.require(0, message, doing)?;
        let (plain, rest) = bytes.split_at(bytes.len().min(PLAIN_BYTES));
        let random = (!rest.is_empty()).then(|| Random::try_from(rest));
        let word = |index| word(plain, index).map(u64::from);
        match (word(0), word(1), word(2), word(3), random.transpose()) {
            (Some(rank), Some(ranks), Some(low), Some(high), Ok(random)) => Ok(Some(Self {
                rank: rank as u32,
                ranks: ranks as u32,
                nonce: high << 32 | low,
                random,
            })),
            _ => Err(peer.unexpected(doing, HELLO_BYTES, bytes.len() as u64)),
        }
    }
}
