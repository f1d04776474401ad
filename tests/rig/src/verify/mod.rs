//! The one verifier: compares what rounds left with the oracle, bit for bit, and finds what nothing may have
//! written.

mod compare_rows;
mod compared;
mod groups;
mod mismatch;
mod oracle;
mod placement;
mod received;
mod rows;
mod tables;
mod values;

pub use compared::Compared;
pub use groups::{Groups, within_blocks};
pub use mismatch::{Mismatch, compare_rows};
pub use oracle::Oracle;
pub use placement::{PlacedRow, Placement, largest, without_overflow};
pub use received::{Contents, RankOutputs, Received, download, read_view};
pub use rows::{RowLayout, Rows, Viewed};
pub use tables::Tables;
pub use values::{POISON, SHARED_FACTOR};
