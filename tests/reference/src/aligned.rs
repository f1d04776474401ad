//! Rows by expert whose groups are aligned, and the tables of groups and rows.

use crate::dispatch::Dispatched;
use crate::problem::Problem;
use crate::rows::as_it_travels;

/// Room for a rank's rows, and their alignment.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Number of which each group's first row is a multiple.
    pub alignment: usize,
    /// Rows that the outputs have.
    pub capacity: usize,
    /// Rows from this one on are not there, although the outputs have them: they lack blocks of scales, say.
    pub end: usize,
    /// Rows of a block that each group has at its number times so many rows, instead of an alignment.
    pub block: Option<usize>,
    /// This rank, if every rank has the tokens and nothing travels.
    pub local: Option<usize>,
}

/// One rank's aligned rows. A group is a local expert, or the shared expert before them.
#[derive(Clone, Debug, PartialEq)]
pub struct AlignedRows {
    /// First row of every group, and the end of the last one with its padding, `[groups + 1]`.
    pub row_offsets: Vec<u32>,
    /// Rows of every group, without padding, `[groups]`.
    pub counts: Vec<i32>,
    /// Row after the last one of every group, without padding, `[groups]`.
    pub row_ends: Vec<u32>,
    /// Group of every row, -1 in rows without a token, `[capacity]`.
    pub m_indices: Vec<i32>,
    /// Source rank, token and top-k slot of every row, `[capacity]`: -1 three times in rows without a token,
    /// slot -1 in the shared expert's rows.
    pub src_info: Vec<[i32; 3]>,
    /// Router's weight of every row, `[capacity]`: 0 in rows without a token, 1 in the shared expert's rows.
    pub weights: Vec<f32>,
    /// Rows that pad a group.
    pub padding: Vec<usize>,
    /// Rows of each source rank in each group, `[groups, ranks]`: the first one, counted from the group's, in
    /// the upper 32 bits, their number in the lower.
    pub ranges: Vec<i64>,
}

/// Aligns the groups of a rank's `dispatched` rows.
pub fn align(problem: &Problem, dispatched: &Dispatched, room: Room) -> AlignedRows {
    let Room { capacity, .. } = room;
    let mut aligned = AlignedRows {
        row_offsets: vec![0],
        counts: Vec::new(),
        row_ends: Vec::new(),
        m_indices: vec![-1; capacity],
        src_info: vec![[-1; 3]; capacity],
        weights: vec![0.0; capacity],
        padding: Vec::new(),
        ranges: Vec::new(),
    };
    let mut start = 0;
    for (group, pair) in dispatched.row_offsets.windows(2).enumerate() {
        let given = pair[0] as usize..pair[1] as usize;
        let end = start + given.len();
        for (row, from) in (start..end).zip(given) {
            if row < room.end {
                aligned.put(problem, dispatched, room.local, group, row, from);
            }
        }
        let next = match room.block {
            None => end.next_multiple_of(room.alignment),
            Some(block) => start + block,
        };
        assert!(end <= next, "{} rows in a block", end - start);
        let sources = &dispatched.src_rank[pair[0] as usize..pair[1] as usize];
        for rank in 0..problem.ranks {
            let first = sources.iter().filter(|&&source| source < rank).count();
            let count = sources.iter().filter(|&&source| source == rank).count();
            aligned.ranges.push((first as i64) << 32 | count as i64);
        }
        aligned
            .padding
            .extend((end..next).filter(|&row| row < room.end));
        let held = |row: usize| row.min(room.end) as u32;
        aligned.counts.push((held(end) - held(start)) as i32);
        aligned.row_ends.push(held(end));
        aligned.row_offsets.push(held(next));
        start = next;
    }
    aligned
}

impl AlignedRows {
    /// Notes that row `from` of a dispatch, of `group`, is row `row`.
    fn put(
        &mut self,
        problem: &Problem,
        dispatched: &Dispatched,
        local: Option<usize>,
        group: usize,
        row: usize,
        from: usize,
    ) {
        let (source, [token, slot]) = (dispatched.src_rank[from], dispatched.src_info[from]);
        self.m_indices[row] = group as i32;
        self.src_info[row] = [local.unwrap_or(source) as i32, token, slot];
        self.weights[row] = match usize::try_from(slot) {
            Err(_) => 1.0,
            Ok(slot) => {
                let index = token as usize * problem.top_k + slot;
                let weight = problem.inputs[source].topk_weights[index];
                match local {
                    None => as_it_travels(weight),
                    Some(_) => weight,
                }
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::RankInput;
    use crate::{bf16, dispatch, dispatch_with_shared};

    /// Two ranks with two experts each. Expert 0 gets no token, expert 1 three.
    fn problem() -> Problem {
        let input = |topk_ids: Vec<i32>, topk_weights: Vec<f32>| RankInput {
            tokens: topk_ids.len() / 2,
            x: vec![bf16::ONE; topk_ids.len() / 2],
            topk_ids,
            topk_weights,
        };
        Problem {
            ranks: 2,
            experts: 4,
            top_k: 2,
            hidden: 1,
            inputs: vec![
                input(vec![1, 3, -1, 1], vec![0.5, 0.25, 9.0, 2.0]),
                input(vec![2, 1], vec![3.0, f32::from_bits(u32::MAX)]),
            ],
        }
    }

    const ROOM: Room = Room {
        alignment: 4,
        capacity: 10,
        end: 10,
        block: None,
        local: None,
    };

    #[test]
    fn groups_begin_at_multiples_and_padding_names_nothing() {
        let (problem, all) = (problem(), dispatch(&problem()));
        let aligned = align(&problem, &all[0], ROOM);
        assert_eq!(aligned.row_offsets, [0, 0, 4]);
        assert_eq!(aligned.counts, [0, 3]);
        assert_eq!(aligned.row_ends, [0, 3]);
        assert_eq!(aligned.m_indices, [1, 1, 1, -1, -1, -1, -1, -1, -1, -1]);
        let rows = [[0, 0, 0], [0, 1, 1], [1, 0, 1]];
        assert_eq!(aligned.src_info[..3], rows);
        assert_eq!(aligned.src_info[3..], [[-1; 3]; 7]);
        assert_eq!(aligned.weights[..2], [0.5, 2.0]);
        assert_eq!(aligned.weights[2].to_bits(), 0xffff_fffe);
        assert_eq!(aligned.weights[3..], [0.0; 7]);
        assert_eq!(aligned.padding, [3]);

        let aligned = align(&problem, &all[1], ROOM);
        assert_eq!(aligned.row_offsets, [0, 4, 8]);
        assert_eq!((aligned.counts, aligned.row_ends), (vec![1, 1], vec![1, 5]));
        assert_eq!(aligned.padding, [1, 2, 3, 5, 6, 7]);
    }

    #[test]
    fn rows_that_have_no_room_are_not_there() {
        let (problem, all) = (problem(), dispatch(&problem()));
        let room = Room {
            capacity: 6,
            end: 4,
            ..ROOM
        };
        let aligned = align(&problem, &all[1], room);
        assert_eq!(aligned.row_offsets, [0, 4, 4]);
        assert_eq!((aligned.counts, aligned.row_ends), (vec![1, 0], vec![1, 4]));
        assert_eq!(aligned.m_indices, [0, -1, -1, -1, -1, -1]);
    }

    #[test]
    fn the_shared_experts_rows_are_a_group_and_own_ones() {
        let problem = problem();
        let all = dispatch_with_shared(&problem);
        let aligned = align(&problem, &all[0], ROOM);
        assert_eq!(aligned.row_offsets, [0, 4, 4, 8]);
        assert_eq!(aligned.counts, [2, 0, 3]);
        assert_eq!(aligned.m_indices, [0, 0, -1, -1, 2, 2, 2, -1, -1, -1]);
        assert_eq!(aligned.src_info[..2], [[0, 0, -1], [0, 1, -1]]);
        assert_eq!(aligned.weights[..2], [1.0; 2]);
        let local = Some(5);
        let aligned = align(&problem, &all[0], Room { local, ..ROOM });
        assert_eq!(aligned.src_info[4], [5, 0, 0]);
        assert_eq!(aligned.weights[6].to_bits(), u32::MAX, "it does not travel");
    }

    #[test]
    fn blocks_have_fixed_places() {
        let (problem, all) = (problem(), dispatch(&problem()));
        let room = Room {
            block: Some(5),
            ..ROOM
        };
        let aligned = align(&problem, &all[0], room);
        assert_eq!(aligned.row_offsets, [0, 5, 10]);
        assert_eq!((aligned.counts, aligned.row_ends), (vec![0, 3], vec![0, 8]));
        assert_eq!(aligned.m_indices, [-1, -1, -1, -1, -1, 1, 1, 1, -1, -1]);
        assert_eq!(aligned.padding, [0, 1, 2, 3, 4, 8, 9]);
        // Expert 1: two rows of rank 0, one of rank 1.
        assert_eq!(aligned.ranges, [0, 0, 2, 2 << 32 | 1]);
    }
}
