//! Memory and a barrier that the warps of a block share.

/// Memory of a block, [`BYTES`](crate::BLOCK_MEMORY_BYTES) long, and the barrier that orders accesses to it.
/// As a launch begins, its contents are undefined. Offsets are bytes from the start.
///
/// Between two barriers a byte is stored at most once. A byte is loaded after the next barrier at the
/// earliest, and after it has been loaded, nobody stores it again in that launch: a GPU may move loads
/// between barriers. A word on which lanes count or add is stored at least one barrier earlier, and loaded at
/// the earliest after the barrier that follows the last count or sum; nobody counts or adds on it after it
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
    /// Adds to a word at a multiple of 4, and returns its previous value. Between two barriers only one warp
    /// adds to a word, and its lanes one at a time, as the result would otherwise depend on their order. For
    /// one lane.
    fn add_in_block(&self, at: u32, value: u32) -> u32;

    /// Loads a word at a multiple of 4. For one lane.
    fn load_block(&self, at: u32) -> u32;
    /// Loads a byte. For one lane.
    fn load_block_byte(&self, at: u32) -> u32;
    /// Loads four words at a multiple of 16. For one lane.
    fn load_block_vector(&self, at: u32) -> [u32; 4];

    /// Waits for all warps of the block. Their earlier stores can be loaded afterwards, and their writes to
    /// this rank's tables can be read by this block. By all lanes of all warps of the block; no wait for
    /// another rank may come in between, as this one has no deadline.
    fn block_barrier(&self);

    /// Passes a barrier, and returns to all warps of the block the word that its first warp `brings`: for a
    /// word of which others may make another one meanwhile, as decisions must be the same for all warps. At
    /// most once in a launch. By all lanes of all warps of the block.
    fn agree(&self, brings: impl FnOnce() -> u32) -> u32;
    /// The word that the block has [agreed](Self::agree) on.
    fn agreed(&self) -> u32;
}
