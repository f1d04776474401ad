//! Values that rounds are verified with.

/// Factor of the shared expert.
pub const SHARED_FACTOR: f32 = 0.5;

/// Every byte of the outputs before a round.
pub const POISON: u8 = 0xa5;
