//! Somebody who has come to rank 0, until it is known who it is.

use super::hello::{CHALLENGE, Hello, OTHER_KEY};
use super::key::{Key, PROOF_BYTES, Prover, random};
use super::peer::{HELLO_TIMEOUT, Limit, Peer};
use crate::error::bootstrap::BootstrapError;

/// Somebody who has not said yet who it is, or has still to prove its key.
pub struct Newcomer {
    pub peer: Peer,
    pub limit: Limit,
    /// Its hello, and all that was said since, once it was asked for a proof.
    asked: Option<(Hello, Vec<u8>)>,
}

impl Newcomer {
    pub fn new(peer: Peer) -> Self {
        Self {
            peer,
            limit: Limit::of(HELLO_TIMEOUT),
            asked: None,
        }
    }

    /// Who it is, and what proves rank 0's key to it, which is nothing without one. `None` where it has not
    /// said all. Does not wait. One whose key is another is told so.
    pub fn hear(&mut self, key: Option<&Key>) -> Result<Option<(Hello, Vec<u8>)>, BootstrapError> {
        if self.asked.is_none() {
            let Some(hello) = Hello::hear(&mut self.peer)? else {
                return Ok(None);
            };
            self.peer.rank = hello.rank;
            match (key, hello.random) {
                (None, None) => return Ok(Some((hello, Vec::new()))),
                (Some(_), Some(_)) => self.ask(hello)?,
                (ours, theirs) => return Err(self.refuse(ours.is_some(), theirs.is_some())),
            }
        }
        let (Some((hello, said)), Some(key)) = (&self.asked, key) else {
            return Ok(None);
        };
        let doing = "proving its key";
        let Some(message) = self.peer.poll(PROOF_BYTES as u64, doing)? else {
            return Ok(None);
        };
        let proof = self.peer.require(0, message, doing)?;
        if !key.is_proved(Prover::Rank, said, &proof) {
            return Err(self.refuse(true, true));
        }
        Ok(Some((*hello, key.proof(Prover::Host, said).to_vec())))
    }

    /// Asks for a proof that nobody has heard before.
    fn ask(&mut self, hello: Hello) -> Result<(), BootstrapError> {
        let challenge = random()?;
        self.peer
            .send(CHALLENGE, &challenge, "asking for a proof", self.limit)?;
        self.asked = Some((hello, hello.said(&challenge)));
        Ok(())
    }

    /// Tells it that the keys differ, and gives the error of it.
    fn refuse(&mut self, ours: bool, theirs: bool) -> BootstrapError {
        let has_key = u32::from(ours).to_le_bytes();
        if let Err(error) = self.peer.send(OTHER_KEY, &has_key, "welcome", self.limit) {
            tracing::debug!(%error, "a stranger did not wait for its answer");
        }
        BootstrapError::OtherKey {
            rank: 0,
            ours,
            peer: self.peer.rank,
            theirs,
            address: self.peer.address,
        }
    }
}
