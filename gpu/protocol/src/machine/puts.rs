//! Puts to ranks of other nodes.

use ferry_layout::{ByteOffset, Rank};

/// Puts of a warp between two looks for [room](Puts::has_room): every warp that has looked may have as
/// many under way that nobody else sees.
pub const PUTS_AT_ONCE: u32 = 8;

/// Bytes for a rank of another node.
#[derive(Clone, Copy, Debug)]
pub struct Put {
    /// The rank.
    pub peer: Rank,
    /// Their start in the own window.
    pub from: ByteOffset,
    /// Their start in the peer's window.
    pub to: ByteOffset,
    /// Their number: a row's is a multiple of 16, that of words one of 8.
    pub bytes: u32,
}

/// The way to ranks of other nodes. A method is for all lanes together, with the same arguments, unless it
/// says "for one lane".
pub trait Puts {
    /// Whether the way to other nodes takes [`PUTS_AT_ONCE`] puts and a fence of this warp now, whatever
    /// other warps put meanwhile. It may not for long, if a peer or the network stalls.
    fn has_room(&self) -> bool;
    /// Stores a word of the own window that a put carries, after a release. For one lane.
    fn stage(&self, at: ByteOffset, word: u64);
    /// Sends a row to a rank of another node, in no order with other puts: its bytes, which were released
    /// before, are read at any time until they have arrived. After [`has_room`](Self::has_room).
    fn put_row(&self, put: Put);
    /// Sends words like [`put_row`](Self::put_row); none of them arrives torn. For one lane.
    fn put_words(&self, put: Put);
    /// Lets what this warp puts afterwards arrive after what it has put before. After
    /// [`has_room`](Self::has_room).
    fn fence_puts(&self);
}
