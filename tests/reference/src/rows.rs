//! Rows that stay as they came: one for each token with an expert on a rank, whatever the number of these
//! experts.

use crate::problem::Problem;

/// Numbers of the rows that a rank receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowNumbers {
    /// Row `source * max_tokens + token` of `ranks * max_tokens`.
    Strided {
        /// Most tokens of a rank.
        max_tokens: usize,
    },
    /// Rows follow each other by source rank, then token.
    Compact {
        /// Rows that the outputs hold. Those from this number on are not there.
        capacity: usize,
    },
}

/// One rank's received rows. `rows` is the number of rows that its outputs hold.
#[derive(Clone, Debug, PartialEq)]
pub struct ReceivedRows {
    /// Source rank and token of each row, `None` in rows without a token, `[rows]`.
    pub tokens: Vec<Option<(usize, usize)>>,
    /// Local experts, `[rows, top_k]`: -1 in slots of other ranks' experts, in slots that are not routed, and
    /// in rows without a token.
    pub ids: Vec<i64>,
    /// The router's weights, `[rows, top_k]`: 0 where the id is -1.
    pub weights: Vec<f32>,
    /// Source rank and token, `[rows]`: -1 and -1 in rows without a token.
    pub src_info: Vec<[i32; 2]>,
    /// Rows of each source rank, `[ranks]`.
    pub source_counts: Vec<i32>,
    /// Slots with each local expert, `[local_experts]`.
    pub expert_counts: Vec<i32>,
    /// Tokens with an expert on this rank, whether the outputs hold them or not.
    pub sent: usize,
}

/// Receives: the rows of rank `rank`.
///
/// # Panics
///
/// If [`Problem::check`] finds a fault, or a rank has more tokens than the most that `numbers` name.
pub fn receive_rows(problem: &Problem, rank: usize, numbers: RowNumbers) -> ReceivedRows {
    problem.assert_valid();
    let rows = match numbers {
        RowNumbers::Strided { max_tokens } => problem.ranks * max_tokens,
        RowNumbers::Compact { capacity } => capacity,
    };
    let mut received = ReceivedRows {
        tokens: vec![None; rows],
        ids: vec![-1; rows * problem.top_k],
        weights: vec![0.0; rows * problem.top_k],
        src_info: vec![[-1, -1]; rows],
        source_counts: vec![0; problem.ranks],
        expert_counts: vec![0; problem.local_experts()],
        sent: 0,
    };
    for source in 0..problem.ranks {
        for token in 0..problem.inputs[source].tokens {
            let is_sent = (0..problem.top_k)
                .any(|slot| local_expert(problem, rank, source, token, slot).is_some());
            if !is_sent {
                continue;
            }
            let row = match numbers {
                RowNumbers::Strided { max_tokens } => {
                    assert!(token < max_tokens, "token {token} of {max_tokens}");
                    source * max_tokens + token
                }
                RowNumbers::Compact { .. } => received.sent,
            };
            received.sent += 1;
            if row < rows {
                received.put(problem, rank, row, source, token);
            }
        }
    }
    received
}

/// The local expert of a slot on `rank`, if the slot names one.
fn local_expert(
    problem: &Problem,
    rank: usize,
    source: usize,
    token: usize,
    slot: usize,
) -> Option<usize> {
    let expert = problem.expert(source, token, slot)?;
    let first = rank * problem.local_experts();
    (first..first + problem.local_experts())
        .contains(&expert)
        .then(|| expert - first)
}

impl ReceivedRows {
    /// Notes that a token is row `row`.
    fn put(&mut self, problem: &Problem, rank: usize, row: usize, source: usize, token: usize) {
        self.tokens[row] = Some((source, token));
        self.src_info[row] = [source, token].map(|index| index as i32);
        self.source_counts[source] += 1;
        for slot in 0..problem.top_k {
            if let Some(local) = local_expert(problem, rank, source, token, slot) {
                let weight = problem.inputs[source].topk_weights[token * problem.top_k + slot];
                self.ids[row * problem.top_k + slot] = local as i64;
                self.weights[row * problem.top_k + slot] = as_it_travels(weight);
                self.expert_counts[local] += 1;
            }
        }
    }

    /// Puts the bytes of each row with a token into a tensor `[rows, width]`: what `bytes` returns for the
    /// row. Rows without a token keep their bytes, or are cleared.
    pub fn write(
        &self,
        tensor: &mut [u8],
        width: usize,
        clear: bool,
        bytes: impl Fn(usize) -> Vec<u8>,
    ) {
        assert_eq!(tensor.len(), self.tokens.len() * width, "tensor: bytes");
        for (row, token) in self.tokens.iter().enumerate() {
            let place = &mut tensor[row * width..(row + 1) * width];
            match token {
                Some(_) => place.copy_from_slice(&bytes(row)),
                None if clear => place.fill(0),
                None => {}
            }
        }
    }

    /// Does the same in a tensor of f32 `[columns, rows]`, in which a row's bytes are a column.
    pub fn write_transposed(
        &self,
        tensor: &mut [u8],
        columns: usize,
        clear: bool,
        bytes: impl Fn(usize) -> Vec<u8>,
    ) {
        let rows = self.tokens.len();
        assert_eq!(tensor.len(), 4 * columns * rows, "tensor: bytes");
        for (row, token) in self.tokens.iter().enumerate() {
            let bytes = token.map(|_| bytes(row));
            for column in 0..columns {
                let place = &mut tensor[4 * (column * rows + row)..][..4];
                match &bytes {
                    Some(bytes) => place.copy_from_slice(&bytes[4 * column..4 * (column + 1)]),
                    None if clear => place.fill(0),
                    None => {}
                }
            }
        }
    }
}

/// A weight after its way to another rank: all ones mean "not written yet" there.
pub(crate) fn as_it_travels(weight: f32) -> f32 {
    match weight.to_bits() {
        u32::MAX => f32::from_bits(u32::MAX - 1),
        bits => f32::from_bits(bits),
    }
}

/// Ids of 64 bits as a [`Problem`] has them: an id outside `-1..experts` is not routed. Also returns the
/// index and the value of each of these.
pub fn narrow_ids(ids: &[i64], experts: usize) -> (Vec<i32>, Vec<(usize, i64)>) {
    let (mut narrow, mut invalid) = (Vec::new(), Vec::new());
    for (index, &id) in ids.iter().enumerate() {
        let mut known = None;
        for expert in 0..experts {
            if id == expert as i64 {
                known = Some(expert as i32);
            }
        }
        if known.is_none() && id != -1 {
            invalid.push((index, id));
        }
        narrow.push(known.unwrap_or(-1));
    }
    (narrow, invalid)
}

#[cfg(test)]
pub(crate) mod tests {
    use half::bf16;

    use super::*;
    use crate::problem::RankInput;

    pub fn values(values: &[f32]) -> Vec<bf16> {
        values.iter().copied().map(bf16::from_f32).collect()
    }

    /// Two ranks, experts 0 and 1 on rank 0, experts 2 and 3 on rank 1. Rank 0 has three tokens, rank 1 two.
    pub fn problem() -> Problem {
        Problem {
            ranks: 2,
            experts: 4,
            top_k: 2,
            hidden: 1,
            inputs: vec![
                RankInput {
                    tokens: 3,
                    x: values(&[10.0, 11.0, 12.0]),
                    topk_ids: vec![1, 0, 3, 1, -1, 2],
                    topk_weights: vec![0.5, 0.25, 0.125, 2.0, 3.0, 4.0],
                },
                RankInput {
                    tokens: 2,
                    x: values(&[20.0, 21.0]),
                    // Token 0 goes nowhere; token 1 lists expert 1 twice.
                    topk_ids: vec![-1, -1, 1, 1],
                    topk_weights: vec![5.0, 6.0, 7.0, f32::from_bits(u32::MAX)],
                },
            ],
        }
    }

    pub fn bits(weights: &[f32]) -> Vec<u32> {
        weights.iter().map(|weight| weight.to_bits()).collect()
    }

    #[test]
    fn compact_rows_follow_each_other() {
        let rows = receive_rows(&problem(), 0, RowNumbers::Compact { capacity: 4 });
        let tokens = [Some((0, 0)), Some((0, 1)), Some((1, 1)), None];
        assert_eq!(rows.tokens, tokens);
        assert_eq!(rows.ids, [1, 0, -1, 1, 1, 1, -1, -1]);
        let last = f32::from_bits(0xffff_fffe);
        let weights = [0.5, 0.25, 0.0, 2.0, 7.0, last, 0.0, 0.0];
        assert_eq!(bits(&rows.weights), bits(&weights));
        assert_eq!(rows.src_info, [[0, 0], [0, 1], [1, 1], [-1, -1]]);
        assert_eq!(rows.source_counts, [2, 1]);
        assert_eq!(rows.expert_counts, [1, 4]);
        assert_eq!(rows.sent, 3);

        let rows = receive_rows(&problem(), 1, RowNumbers::Compact { capacity: 2 });
        assert_eq!(rows.tokens, [Some((0, 1)), Some((0, 2))]);
        assert_eq!(rows.ids, [1, -1, -1, 0]);
        assert_eq!(rows.weights, [0.125, 0.0, 0.0, 4.0]);
        assert_eq!(
            (rows.source_counts, rows.expert_counts),
            (vec![2, 0], vec![1, 1])
        );
    }

    #[test]
    fn rows_that_outputs_do_not_hold_are_not_counted() {
        let rows = receive_rows(&problem(), 0, RowNumbers::Compact { capacity: 2 });
        assert_eq!(rows.tokens, [Some((0, 0)), Some((0, 1))]);
        assert_eq!(
            (rows.source_counts, rows.expert_counts),
            (vec![2, 0], vec![1, 2])
        );
        assert_eq!(rows.sent, 3);
        let rows = receive_rows(&problem(), 0, RowNumbers::Compact { capacity: 0 });
        assert_eq!((rows.ids.len(), rows.sent), (0, 3));
        assert_eq!(
            (rows.source_counts, rows.expert_counts),
            (vec![0, 0], vec![0, 0])
        );
    }

    #[test]
    fn strided_rows_have_a_place_for_every_token() {
        let rows = receive_rows(&problem(), 0, RowNumbers::Strided { max_tokens: 4 });
        let (first, second) = ([Some((0, 0)), Some((0, 1))], [None, Some((1, 1))]);
        let tokens = [&first[..], &[None; 2], &second, &[None; 2]].concat();
        assert_eq!(rows.tokens, tokens);
        assert_eq!(rows.ids[..4], [1, 0, -1, 1]);
        assert_eq!(rows.ids[4..10], [-1; 6]);
        assert_eq!(rows.ids[10..], [1, 1, -1, -1, -1, -1]);
        assert_eq!(rows.src_info[4..6], [[-1, -1], [1, 1]]);
        assert_eq!(rows.weights[4..10], [0.0; 6]);
        assert_eq!(
            (rows.source_counts, rows.expert_counts),
            (vec![2, 1], vec![1, 4])
        );
    }

    #[test]
    #[should_panic(expected = "token 2 of 2")]
    fn a_token_without_a_place_is_refused() {
        receive_rows(&problem(), 1, RowNumbers::Strided { max_tokens: 2 });
    }

    #[test]
    fn rows_without_a_token_keep_their_bytes_or_are_cleared() {
        let rows = receive_rows(&problem(), 1, RowNumbers::Strided { max_tokens: 3 });
        let bytes = |row: usize| vec![row as u8; 2];
        let mut tensor = [9; 12];
        rows.write(&mut tensor, 2, false, bytes);
        assert_eq!(tensor, [9, 9, 1, 1, 2, 2, 9, 9, 9, 9, 9, 9]);
        rows.write(&mut tensor, 2, true, bytes);
        assert_eq!(tensor, [0, 0, 1, 1, 2, 2, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn transposed_columns_are_the_rows() {
        let rows = receive_rows(&problem(), 1, RowNumbers::Compact { capacity: 3 });
        let bytes = |row| (0..8).map(|byte| (10 * row + byte) as u8).collect();
        let mut tensor = [9; 24];
        rows.write_transposed(&mut tensor, 2, false, bytes);
        assert_eq!(tensor[..12], [0, 1, 2, 3, 10, 11, 12, 13, 9, 9, 9, 9]);
        assert_eq!(tensor[12..], [4, 5, 6, 7, 14, 15, 16, 17, 9, 9, 9, 9]);
    }

    #[test]
    fn an_id_outside_of_i32_is_no_expert() {
        let beyond = (1 << 32) + 3;
        let ids = [3, -1, beyond, 4, -2, i64::MIN, i64::MAX, (-1 << 32) + 2, 0];
        let (narrow, invalid) = narrow_ids(&ids, 4);
        assert_eq!(narrow, [3, -1, -1, -1, -1, -1, -1, -1, 0]);
        let wanted: Vec<_> = (2..8).map(|index| (index, ids[index])).collect();
        assert_eq!(invalid, wanted);
    }
}
