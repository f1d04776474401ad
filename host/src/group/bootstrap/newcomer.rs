//! A connection to rank 0 that has not yet identified itself.

use super::hello::{CHALLENGE, Hello, OTHER_KEY};
use super::key::{Key, PROOF_BYTES, Prover, random};
use super::peer::{HELLO_TIMEOUT, Limit, Peer};
use crate::error::bootstrap::BootstrapError;

/// A connection whose rank is not known yet, or not proved yet.
pub struct Newcomer {
    pub peer: Peer,
    pub limit: Limit,
    /// Its hello and the text to prove, once it was asked for a proof.
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

    /// Returns its hello, and the proof of rank 0's key for it, which is empty without a key. `None` if not
    /// everything has arrived. Does not wait. A newcomer with another key is told so.
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

    /// Asks for a proof over a fresh random number.
    fn ask(&mut self, hello: Hello) -> Result<(), BootstrapError> {
        let challenge = random()?;
        self.peer
            .send(CHALLENGE, &challenge, "asking for a proof", self.limit)?;
        self.asked = Some((hello, hello.said(&challenge)));
        Ok(())
    }

    /// Tells the newcomer that the keys differ, and returns the error.
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
