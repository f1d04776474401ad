//! What the warps of a block share: memory and a barrier.

/// Memory of a block, [`BYTES`](crate::BLOCK_MEMORY_BYTES) long, and the barrier that orders accesses to it.
/// As a launch begins, every byte holds anything. Offsets are bytes from the start.
///
/// Between two barriers a byte is stored at most once. A byte is loaded after the next barrier at the
/// earliest, and once a byte has been loaded, nobody stores it again in that launch: a GPU may move loads
/// between barriers. A word that lanes count or add in is stored a barrier earlier at least, and loaded after
/// the barrier that follows the last count or sum at the earliest; nobody counts or adds in what
/// has been loaded.
pub trait BlockMemory {
    /// The number of a lane of this warp in its block. For one lane.
    fn thread(&self, lane: u32) -> u32;
    /// Lanes of the block.
    fn threads(&self) -> u32;

    /// Stores a word at a multiple of 4. For one lane.
    fn store_block(&self, at: u32, word: u32);
    /// Stores the lowest byte of `byte`. For one lane.
    fn store_block_byte(&self, at: u32, byte: u32);
    /// Stores four words at a multiple of 16. For one lane.
    fn store_block_vector(&self, at: u32, words: [u32; 4]);

    /// Adds one to a word at a multiple of 4: any warps to any word, in any order. For one lane.
    fn count_in_block(&self, at: u32);
    /// Adds to a word at a multiple of 4, and gives what it was before. Between two barriers one
    /// warp alone adds to a word, and of its lanes one at a time, as otherwise what it gets would
    /// depend on their order. For one lane.
    fn add_in_block(&self, at: u32, value: u32) -> u32;

    /// Loads a word at a multiple of 4. For one lane.
    fn load_block(&self, at: u32) -> u32;
    /// Loads a byte. For one lane.
    fn load_block_byte(&self, at: u32) -> u32;
    /// Loads four words at a multiple of 16. For one lane.
    fn load_block_vector(&self, at: u32) -> [u32; 4];

    /// Waits for all warps of the block. What they stored before can be loaded afterwards, and what
    /// they wrote to this rank's tables can be read by this block. All lanes of all warps of the
    /// block; nothing that another rank does may be waited for in between, as this wait has no
    /// deadline.
    fn block_barrier(&self);
}
