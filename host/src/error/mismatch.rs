//! Text of configurations that differ.

use std::fmt;

use ferry_layout::{PROTOCOL_VERSION, Rank};

/// A field of a [`Config`](crate::Config) in which two ranks differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The field's name.
    pub field: &'static str,
    /// Its value on the rank of this process.
    pub ours: String,
    /// Its value on the other rank.
    pub theirs: String,
}

/// Ranks that differ, with their fingerprints, here first, and the fields in which they do.
pub(super) struct Mismatch<'a> {
    pub(super) ranks: [Rank; 2],
    pub(super) fingerprints: [u64; 2],
    pub(super) fields: &'a [Difference],
}

impl fmt::Display for Mismatch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [Rank(rank), Rank(peer)] = self.ranks;
        write!(f, "rank {rank} and rank {peer} were configured differently")?;
        if self.fields.is_empty() {
            let [ours, theirs] = self.fingerprints;
            return write!(
                f,
                ", or built from different versions of ferry: fingerprints {ours:#018x} and {theirs:#018x} \
                 of sizes, memory layout and protocol version (here {PROTOCOL_VERSION}); compare their \
                 configurations, the number of ranks, and the builds"
            );
        }
        for (index, difference) in self.fields.iter().enumerate() {
            let Difference {
                field,
                ours,
                theirs,
            } = difference;
            let mark = if index == 0 { ":" } else { "," };
            write!(
                f,
                "{mark} {field} is {ours} on rank {rank} and {theirs} on rank {peer}"
            )?;
        }
        Ok(())
    }
}
