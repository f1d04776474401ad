//! Puts between nodes, which travel in parts, and their signals.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::memory::{Memory, Outside};

/// Largest part of a put, in bytes.
const MAX_PART_BYTES: u64 = 512;

/// A part of a put, read from its source when it is delivered.
struct Part {
    from: u64,
    to: u64,
    bytes: u64,
}

/// A put under way, and the signal after it; a signal alone has no parts.
struct Flight {
    sender: u32,
    parts: Vec<Part>,
    signal: u64,
    value: u64,
}

#[derive(Default)]
pub struct Network {
    flights: Vec<Flight>,
}

/// A put as a warp issues it. All positions are addresses.
pub struct Sent {
    pub sender: u32,
    pub from: u64,
    pub to: u64,
    pub bytes: u64,
    pub signal: u64,
    pub value: u64,
}

impl Network {
    pub fn send(&mut self, sent: &Sent) {
        let parts = (0..sent.bytes)
            .step_by(MAX_PART_BYTES as usize)
            .map(|at| Part {
                from: sent.from + at,
                to: sent.to + at,
                bytes: MAX_PART_BYTES.min(sent.bytes - at),
            })
            .collect();
        let Sent {
            sender,
            signal,
            value,
            ..
        } = *sent;
        self.flights.push(Flight {
            sender,
            parts,
            signal,
            value,
        });
    }

    pub fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }

    /// Delivers a part or a signal. Returns a signal's address and value.
    pub fn deliver(
        &mut self,
        memory: &mut Memory,
        rng: &mut ChaCha8Rng,
    ) -> Result<Option<(u64, u64)>, Outside> {
        let index = rng.random_range(0..self.flights.len());
        let flight = &mut self.flights[index];
        if flight.parts.is_empty() {
            let Flight { signal, value, .. } = self.flights.swap_remove(index);
            memory.write(signal, &value.to_le_bytes())?;
            return Ok(Some((signal, value)));
        }
        let part = rng.random_range(0..flight.parts.len());
        let Part { from, to, bytes } = flight.parts.swap_remove(part);
        let data = memory.read(from, bytes)?.to_vec();
        memory.write(to, &data)?;
        Ok(None)
    }

    /// Discards the puts of a lost rank.
    pub fn lose(&mut self, rank: u32) {
        self.flights.retain(|flight| flight.sender != rank);
    }
}
