//! Seeded random streams.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// Purpose of a stream: no two purposes share numbers.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    Routing,
    Payload,
    Weights,
    Popularity,
    Word,
    Projection,
    ExpertKey,
}

/// The stream number `index` of one purpose.
pub(crate) fn stream(seed: u64, purpose: Purpose, index: u64) -> ChaCha8Rng {
    let mut key = [0u8; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8] = purpose as u8;
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(index);
    rng
}
