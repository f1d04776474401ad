//! The tensor of one-byte scales for tensor cores, written from its first byte to its last.

/// Lays out the scales of all experts (`experts[expert][row][group]`, with `groups` per row) as the bytes of
/// `[blocks, ceil(groups / 4), 32, 4, 4]`. Each expert begins a new block of 128 rows; places without a row
/// or group are 0. Also returns `scales_offsets[expert]`: the expert's first block less a 128th of its first
/// row.
pub fn place(experts: &[Vec<Vec<u8>>], groups: usize) -> (Vec<u8>, Vec<u32>) {
    let (mut bytes, mut offsets) = (Vec::new(), Vec::new());
    let (mut rows_before, mut blocks_before) = (0, 0);
    for rows in experts {
        offsets.push((blocks_before - rows_before / 128) as u32);
        rows_before += rows.len();
        blocks_before += rows.len().div_ceil(128);
        for block in rows.chunks(128) {
            for tile in 0..groups.div_ceil(4) {
                place_tile(&mut bytes, block, tile);
            }
        }
    }
    (bytes, offsets)
}

/// Appends one tile of 128 rows and 4 groups, `[32, 4, 4]`: the indices are row % 32, row / 32 and group.
fn place_tile(bytes: &mut Vec<u8>, block: &[Vec<u8>], tile: usize) {
    for row_in_32 in 0..32 {
        for row_over_32 in 0..4 {
            for group in 0..4 {
                let row = block.get(row_over_32 * 32 + row_in_32);
                let scale = row.and_then(|scales| scales.get(tile * 4 + group));
                bytes.push(scale.copied().unwrap_or(0));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_by_hand() {
        // Row r has 4 r mod 251 + group + 1, so that no place is 0.
        let scale = |row: usize, group: usize| (4 * row % 251 + group + 1) as u8;
        let rows: Vec<Vec<u8>> = (0..100)
            .map(|row| (0..5).map(|group| scale(row, group)).collect())
            .collect();
        let (bytes, offsets) = place(&[rows], 5);
        assert_eq!((bytes.len(), offsets), (1024, vec![0]));
        assert_eq!(bytes[..4], [1, 2, 3, 4], "row 0");
        assert_eq!(bytes[4..8], [129, 130, 131, 132], "row 32");
        assert_eq!(bytes[12..16], [134, 135, 136, 137], "row 96");
        assert_eq!(bytes[16..20], [5, 6, 7, 8], "row 1");
        assert_eq!(bytes[4 * 16 + 12..5 * 16], [0; 4], "row 100 is not there");
        assert_eq!(bytes[512..516], [5, 0, 0, 0], "group 4 of row 0");
    }

    #[test]
    fn experts_begin_blocks() {
        let rows = |count: usize, scale: u8| vec![vec![scale; 4]; count];
        let (bytes, offsets) = place(&[rows(100, 1), rows(200, 2), rows(0, 9), rows(100, 3)], 4);
        assert_eq!(offsets, [0, 1, 1, 1]);
        assert_eq!(bytes.len(), 4 * 512);
        assert_eq!(
            [bytes[0], bytes[512], bytes[1024], bytes[1536]],
            [1, 2, 2, 3]
        );
    }
}
