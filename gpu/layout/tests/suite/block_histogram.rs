//! Small batches: their bounds, and the ranks within experts that their histogram yields, against counting.

use ferry_layout::{
    BlockHistogram, HISTOGRAM_BYTES, NOT_ROUTED, SMALL_BATCH_ASSIGNMENTS, Shape, dot_bytes,
};
use proptest::prelude::*;

/// Assignments that a warp compares.
const GROUP: usize = 32;

fn shape(experts: u32, top_k: u32) -> Shape {
    Shape {
        ranks: 1,
        p2p_world_size: 1,
        experts,
        top_k,
        hidden: 7168,
        max_tokens_per_rank: 4096,
        combine_mode: 0,
        token_format: 0,
    }
}

/// Experts, top-k, and the most tokens of a small batch.
#[test]
fn most_tokens_by_hand() {
    let cases = [
        (512, 8, 256),  // 64 groups: 64 bytes an expert
        (513, 8, 192),  // 48 groups
        (682, 8, 192),  // 48 * 682 = 32,736
        (683, 8, 128),  // 32 groups
        (896, 8, 128),  // 28,672 bytes
        (1024, 8, 128), // 32,768
        (1025, 8, 64),  // 16 groups
        (2048, 8, 64),  // 32,768
        (2049, 8, 0),   // 16 bytes an expert are too many
        (256, 1, 2048),
        (256, 6, 341),
        (256, 32, 64),
    ];
    for (experts, top_k, most) in cases {
        let shape = shape(experts, top_k);
        let is_small_batch: Vec<u32> = (0..4096)
            .filter(|&tokens| shape.is_small_batch(tokens))
            .collect();
        let wanted: Vec<u32> = (0..=most).collect();
        assert_eq!(is_small_batch, wanted, "{experts} experts, top-{top_k}");
        let of_few = Shape {
            max_tokens_per_rank: most,
            ..shape
        };
        assert!(wanted.iter().all(|&tokens| of_few.is_small_batch(tokens)));
    }
}

/// A small batch has room, and every byte is inside the table.
#[test]
fn few_entries_have_room() {
    for experts in [1, 31, 256, 896, 2048] {
        for assignments in (1..=SMALL_BATCH_ASSIGNMENTS)
            .filter(|&assignments| shape(experts, 1).is_small_batch(assignments))
        {
            let counts = BlockHistogram::of(assignments);
            let bytes = counts.bytes(experts);
            assert!(bytes <= HISTOGRAM_BYTES && bytes.is_multiple_of(16));
            assert!(counts.at(experts - 1, assignments - 1) < bytes);
        }
    }
}

/// The histogram of a block: every assignment's index in its group, and the counts.
fn keep(ids: &[u32], experts: u32) -> (Vec<u32>, Vec<u8>) {
    let counts = BlockHistogram::of(ids.len() as u32);
    let mut table = vec![0; counts.bytes(experts) as usize];
    let in_group = ids.iter().enumerate().map(|(index, &id)| {
        if id >= experts {
            return 0;
        }
        let count = &mut table[counts.at(id, index as u32) as usize];
        *count += 1;
        u32::from(*count) - 1
    });
    (in_group.collect(), table)
}

fn read(table: &[u8], at: u32) -> [u32; 4] {
    let bytes = &table[at as usize..][..16];
    let words = bytes.as_chunks().0;
    [0, 1, 2, 3].map(|word| u32::from_le_bytes(words[word]))
}

/// Multiplies byte by byte, and adds.
fn dot(a: u32, b: u32, sum: u32) -> u32 {
    let products = a.to_le_bytes().into_iter().zip(b.to_le_bytes());
    products.fold(sum, |sum, (a, b)| sum + u32::from(a) * u32::from(b))
}

fn check(ids: &[u32], experts: u32) {
    let assignments = ids.len() as u32;
    let (counts, (in_group, table)) = (BlockHistogram::of(assignments), keep(ids, experts));
    let naive = |expert: u32, end: usize| ids[..end].iter().filter(|&&id| id == expert).count();
    for expert in 0..experts {
        let total = counts.total(expert, |at| read(&table, at), dot_bytes);
        assert_eq!(total as usize, naive(expert, ids.len()), "expert {expert}");
    }
    for (index, &id) in ids.iter().enumerate().filter(|&(_, &id)| id < experts) {
        let before = counts.before(id, index as u32, |at| read(&table, at), dot_bytes);
        let number = before + in_group[index];
        assert_eq!(number as usize, naive(id, index), "entry {index}");
    }
}

/// The maximum of a byte and of a sum.
#[test]
fn all_entries_for_one_expert() {
    for assignments in [0, 1, 31, 32, 33, 511, 512, 513, 2047, 2048] {
        check(&vec![1; assignments], 3);
    }
}

proptest! {
    #[test]
    fn numbers_are_those_of_counting(
        experts in 1u32..100,
        ids in proptest::collection::vec(any::<u32>(), 0..=SMALL_BATCH_ASSIGNMENTS as usize),
    ) {
        // Some ids do not exist, and some are not routed.
        let ids: Vec<u32> = ids
            .iter()
            .map(|&id| match id % (experts + 2) {
                id if id > experts => NOT_ROUTED,
                id => id,
            })
            .collect();
        check(&ids, experts);
    }

    #[test]
    fn products_of_bytes_are_added(a: u32, b: u32, sum in 0..u32::MAX - 4 * 255 * 255) {
        prop_assert_eq!(dot_bytes(a, b, sum), dot(a, b, sum));
    }

    #[test]
    fn groups_are_apart(experts in 1u32..64, groups in 1u32..=64) {
        let counts = BlockHistogram::of(groups * GROUP as u32);
        let mut used = vec![false; counts.bytes(experts) as usize];
        for expert in 0..experts {
            for index in (0..groups * GROUP as u32).step_by(GROUP) {
                let at = counts.at(expert, index);
                prop_assert_eq!(at, counts.at(expert, index + GROUP as u32 - 1));
                prop_assert!(!std::mem::replace(&mut used[at as usize], true));
            }
        }
    }
}
