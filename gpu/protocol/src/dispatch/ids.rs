//! Expert ids in the user's `topk_ids`, i32: the only code that reads them.

use ferry_layout::{DispatchArgs, Table};

use crate::machine::Machine;

/// Ids of a vector, which are read at a time.
pub const VECTOR_IDS: u32 = 4;

/// Consecutive ids.
pub type IdVector = [u32; VECTOR_IDS as usize];

/// Expert id of an assignment, [`NOT_ROUTED`](ferry_layout::NOT_ROUTED) for -1. For one lane.
#[inline(always)]
pub fn read_id<M: Machine>(machine: &M, assignment: u64) -> u32 {
    machine.read(Table::TopkIds, assignment)
}

/// Expert ids of the assignments from `first` on, at which a vector begins, if there are
/// [vectors](has_vectors). For one lane.
#[inline(always)]
pub fn read_id_vector<M: Machine>(machine: &M, first: u64) -> IdVector {
    machine.read_vector(Table::TopkIds, first)
}

/// Whether the ids of so many assignments begin and end at the ends of vectors.
#[inline(always)]
pub fn has_vectors(args: &DispatchArgs, assignments: u32) -> bool {
    assignments.is_multiple_of(VECTOR_IDS) && args.topk_ids.is_multiple_of(4 * VECTOR_IDS as u64)
}
