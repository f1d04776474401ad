//! Expert ids in the user's `topk_ids`, i32 or i64: the only code that reads them.

use ferry_layout::{DispatchArgs, Table};

use crate::machine::Machine;

/// Ids of a vector, which are read at a time.
pub const VECTOR_IDS: u32 = 4;

/// Consecutive ids.
pub type IdVector = [u32; VECTOR_IDS as usize];

/// Id that an i64 outside i32 counts as: no expert, and not [`NOT_ROUTED`](ferry_layout::NOT_ROUTED).
const OUTSIDE: u32 = 1 << 31;

/// Expert id of an assignment, [`NOT_ROUTED`](ferry_layout::NOT_ROUTED) for -1. `is_wide`: ids are i64. For
/// one lane.
#[inline(always)]
pub fn read_id<M: Machine>(machine: &M, is_wide: bool, assignment: u64) -> u32 {
    match is_wide {
        true => narrow(
            machine.read(Table::TopkIds, 2 * assignment),
            machine.read(Table::TopkIds, 2 * assignment + 1),
        ),
        false => machine.read(Table::TopkIds, assignment),
    }
}

/// The id of an assignment as i64 bits, whether or not such an expert exists. `id`: the result of
/// [`read_id`]. For one lane, and rarely called.
#[inline(always)]
pub fn whole_id<M: Machine>(machine: &M, is_wide: bool, assignment: u64, id: u32) -> u64 {
    match is_wide {
        true => {
            let low = machine.read(Table::TopkIds, 2 * assignment) as u64;
            (machine.read(Table::TopkIds, 2 * assignment + 1) as u64) << 32 | low
        }
        false => id as i32 as i64 as u64,
    }
}

/// Expert ids, i32, of the assignments from `first` on, at which a vector begins, if there are
/// [vectors](has_vectors). For one lane.
#[inline(always)]
pub fn read_id_vector<M: Machine>(machine: &M, first: u64) -> IdVector {
    machine.read_vector(Table::TopkIds, first)
}

/// Whether the ids, i32, of so many assignments begin and end at the ends of vectors.
#[inline(always)]
pub fn has_vectors(args: &DispatchArgs, assignments: u32) -> bool {
    assignments.is_multiple_of(VECTOR_IDS) && args.topk_ids.is_multiple_of(4 * VECTOR_IDS as u64)
}

/// An id from its two halves; [`OUTSIDE`] if it is outside i32.
#[inline(always)]
const fn narrow(low: u32, high: u32) -> u32 {
    match (low as i32 >> 31) as u32 == high {
        true => low,
        false => OUTSIDE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_outside_i32_is_no_expert_whatever_its_low_half_is() {
        let narrowed = |id: i64| narrow(id as u32, (id >> 32) as u32);
        for id in [0, 3, 65_535, -1, -7, i32::MAX as i64, i32::MIN as i64] {
            assert_eq!(narrowed(id) as i32 as i64, id);
        }
        for id in [(1 << 32) + 3, (1 << 31) + 5, i64::MIN, i64::MAX, -(1 << 32)] {
            assert_eq!(narrowed(id), OUTSIDE, "{id}");
        }
    }
}
