//! Position of a warp in its launch.

/// Position of a warp in its launch, of which all blocks have as many warps.
#[derive(Clone, Copy, Debug)]
pub struct WarpPosition {
    /// Its number in its block.
    pub index: u32,
    /// Warps of each block.
    pub in_block: u32,
    /// Its block's number.
    pub block: u32,
    /// Blocks of the launch.
    pub blocks: u32,
}

impl WarpPosition {
    /// Its number in the launch. Neighbours are on different multiprocessors, so that a small number of tasks
    /// spreads over all of them.
    #[inline(always)]
    pub fn warp(self) -> u32 {
        debug_assert!(self.block < self.blocks, "{self:?}");
        self.index * self.blocks + self.block
    }

    /// Its number in an order in which neighbours share a multiprocessor.
    #[inline(always)]
    pub fn warp_by_block(self) -> u32 {
        self.block * self.in_block + self.index
    }

    /// Warp number such that warps `first..first + count` run on SMs `0..blocks / 2`:
    ///
    /// ```text
    /// first half of the SMs     first .. first + count, then more of the same half
    /// second half of the SMs    0 .. first, and the numbers after those of the first half
    /// ```
    ///
    /// Falls back to [`warp`](Self::warp) if one of the halves has too few warps.
    #[inline(always)]
    pub fn warp_by_half(self, first: u32, count: u32) -> u32 {
        let half = self.blocks / 2;
        let others = self.blocks - half;
        if count > half * self.in_block || first > others * self.in_block {
            return self.warp();
        }
        match self.block.checked_sub(half) {
            None => first + self.index * half + self.block,
            Some(block) => match self.index * others + block {
                index if index < first => index,
                index => index + half * self.in_block,
            },
        }
    }

    /// The launch's warps.
    #[inline(always)]
    pub fn grid(self) -> Grid {
        Grid {
            in_block: self.in_block,
            blocks: self.blocks,
        }
    }

    /// Warps of the launch.
    #[inline(always)]
    pub fn warps(self) -> u32 {
        self.in_block * self.blocks
    }
}

/// The warps of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Warps of each block.
    pub in_block: u32,
    /// Blocks.
    pub blocks: u32,
}

impl Grid {
    /// Warps of the launch.
    #[inline(always)]
    pub const fn warps(self) -> u32 {
        self.in_block * self.blocks
    }
}
