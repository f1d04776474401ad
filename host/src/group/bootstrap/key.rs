//! The key that the ranks of a rendezvous share, and its proofs.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::error::bootstrap::BootstrapError;

/// Prefix of every proved text, so that a proof is of no use where the key also serves another purpose.
const PURPOSE: &[u8] = b"ferry: a rank and rank 0 meet";
/// Bytes of an HMAC-SHA256.
pub const PROOF_BYTES: usize = 32;

/// A random number that nobody has seen before.
pub type Random = [u8; 32];

/// Draws a random number from the system's generator.
pub fn random() -> Result<Random, BootstrapError> {
    let mut random = Random::default();
    getrandom::fill(&mut random).map_err(|error| BootstrapError::Other {
        call: "getrandom::fill",
        reason: error.to_string(),
    })?;
    Ok(random)
}

/// Author of a proof, so that it cannot be sent back as one's own.
#[derive(Clone, Copy)]
pub enum Prover {
    Host = 0,
    Rank = 1,
}

/// Precomputed state of a key. It has no `Debug`.
pub struct Key(Hmac<Sha256>);

impl Key {
    pub fn new(bytes: &[u8]) -> Result<Self, BootstrapError> {
        if bytes.is_empty() {
            return Err(BootstrapError::EmptyKey);
        }
        let hmac = Hmac::new_from_slice(bytes).expect("an HMAC takes a key of any length");
        Ok(Self(hmac))
    }

    fn hmac(&self, prover: Prover, said: &[u8]) -> Hmac<Sha256> {
        let parts = [PURPOSE, &[prover as u8], said];
        parts.iter().fold(self.0.clone(), Mac::chain_update)
    }

    /// Proof that `prover` has this key, for a peer that knows the messages of both.
    pub fn proof(&self, prover: Prover, said: &[u8]) -> [u8; PROOF_BYTES] {
        self.hmac(prover, said).finalize().into_bytes().into()
    }

    /// Whether `prover` has this key. Takes the same time for any proof of the right length.
    pub fn is_proved(&self, prover: Prover, said: &[u8], proof: &[u8]) -> bool {
        self.hmac(prover, said).verify_slice(proof).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn proofs_are_those_of_another_implementation() {
        // hmac.new(b"Jefe", PURPOSE + bytes([prover]) + bytes(range(80)), "sha256").hexdigest() of Python
        let said: Vec<u8> = (0..80).collect();
        let key = Key::new(b"Jefe").unwrap();
        let host = "e1a480f959b31a91596dfe71ed991d5f9d186d11ad0d4838510e94bd33b690b7";
        let rank = "fd7c3f931b61822df8b41f4c5c6ae3666d68f666f30665bd52fa4b4fa5f6ed5c";
        assert_eq!(hex(&key.proof(Prover::Host, &said)), host);
        assert_eq!(hex(&key.proof(Prover::Rank, &said)), rank);
    }

    #[test]
    fn nothing_else_is_a_proof() {
        let (key, said) = (Key::new(b"a").unwrap(), [7; 80]);
        let proof = key.proof(Prover::Rank, &said);
        assert!(key.is_proved(Prover::Rank, &said, &proof));
        assert!(!key.is_proved(Prover::Host, &said, &proof));
        assert!(!key.is_proved(Prover::Rank, &[8; 80], &proof));
        assert!(
            !Key::new(b"b")
                .unwrap()
                .is_proved(Prover::Rank, &said, &proof)
        );
        for length in 0..PROOF_BYTES {
            assert!(!key.is_proved(Prover::Rank, &said, &proof[..length]));
        }
        let longer = [&proof[..], &[0]].concat();
        assert!(!key.is_proved(Prover::Rank, &said, &longer));
    }

    #[test]
    fn no_two_random_numbers_are_the_same() {
        assert_ne!(random().unwrap(), random().unwrap());
    }
}
