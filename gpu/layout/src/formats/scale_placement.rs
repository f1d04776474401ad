//! Layout of one-byte scales for tensor cores: tiles of 128 rows by 4 groups, 512 bytes each.
//!
//! The tensor is `[ceil(rows / 128), ceil(groups / 4), 32, 4, 4]` bytes, row-major, and the scale
//! of (row `r`, group `g`) is at `[r / 128, g / 4, r % 32, r % 128 / 32, g % 4]`: the layout that
//! `tcgen05.mma` with block scales and cuBLAS read (cuBLAS documentation, "1D Block Scaling
//! Factors Layout"). Rows of one row of tiles are a block.
//!
//! Experts share one tensor and each begins a block of its own, so one expert's scales are such a tensor too.
//! Rows are not padded, so block and row numbers diverge; `scales_offsets` holds the difference: local row
//! `l` of expert `e` is in block `row_offsets[e] / 128 + scales_offsets[e] + l / 128`.

/// Rows of a block.
pub const BLOCK_ROWS: u32 = 128;
/// Groups of a tile.
pub const TILE_GROUPS: u32 = 4;
/// Bytes of a tile: a scale for each of its rows and groups.
pub const TILE_BYTES: u32 = BLOCK_ROWS * TILE_GROUPS;

/// Bytes of a block of rows with `groups` scales each.
#[inline(always)]
pub const fn block_bytes(groups: u32) -> u64 {
    groups.div_ceil(TILE_GROUPS) as u64 * TILE_BYTES as u64
}

/// Bytes of `blocks` blocks of rows with `groups` scales each.
#[inline(always)]
pub const fn bytes(blocks: u64, groups: u32) -> u64 {
    blocks * block_bytes(groups)
}

/// Bytes from the start of a block to the scale of its row `row % 128` and group `group`. Four groups from a
/// multiple of four are adjacent: one 32-bit word.
#[inline(always)]
pub const fn offset_in_block(row: u32, group: u32) -> u32 {
    let tile = group / TILE_GROUPS * TILE_BYTES;
    tile + row % 32 * 16 + row % BLOCK_ROWS / 32 * 4 + group % TILE_GROUPS
}

/// Bytes from the start of the tensor to the scale of (local row `row`, group `group`) of an expert
/// whose first block is `first_block`; rows have `groups` scales.
#[inline(always)]
pub const fn offset(first_block: u32, row: u32, group: u32, groups: u32) -> u64 {
    let block = first_block as u64 + (row / BLOCK_ROWS) as u64;
    bytes(block, groups) + offset_in_block(row, group) as u64
}

/// Blocks that an expert with `rows` rows takes.
#[inline(always)]
pub const fn blocks(rows: u32) -> u32 {
    rows.div_ceil(BLOCK_ROWS)
}

/// `scales_offsets` of an expert from its first row, `row_offset`, and its first block, `first_block`: the
/// sum of [`blocks`] over the experts before it. Wraps only if rows are padded, and [`first_block`] undoes
/// that.
#[inline(always)]
pub const fn scales_offset(first_block: u32, row_offset: u32) -> u32 {
    first_block.wrapping_sub(row_offset / BLOCK_ROWS)
}

/// First block of an expert, from its words in `row_offsets` and `scales_offsets`.
#[inline(always)]
pub const fn first_block(row_offset: u32, scales_offset: u32) -> u32 {
    (row_offset / BLOCK_ROWS).wrapping_add(scales_offset)
}

/// First block of each expert, from `row_offsets` (`[experts + 1]`), then the number of all blocks:
/// `experts + 1` items.
pub fn first_blocks(row_offsets: &[u32]) -> impl Iterator<Item = u32> {
    let rows = row_offsets.iter().zip(row_offsets.iter().skip(1));
    let source_bases = rows.scan(0, |block, (start, end)| {
        *block += blocks(end - start);
        Some(*block)
    });
    core::iter::once(0).chain(source_bases)
}

/// Most blocks that `max_rows` rows of `experts` experts can take: every expert that has a row can leave all
/// but one row of a block unused.
pub const fn max_blocks(max_rows: u64, experts: u32) -> u64 {
    let experts = experts as u64;
    let begun = if experts < max_rows {
        experts
    } else {
        max_rows
    };
    begun + (max_rows - begun) / BLOCK_ROWS as u64
}
