//! Ids that a round keeps in the caller's memory.

use ferry::{Communicator, DataType, DevicePtr, Error, Tensor};

use super::Run;
use crate::case::Case;
use crate::dice::Dice;
use crate::inputs::Return;
use crate::tensors::Tensors;
use crate::verify::{POISON, download};

/// Whether a rank keeps its ids.
fn is_keeping(case: &Case, rank: usize) -> bool {
    let bits = Dice::new(case.seed ^ 0x6b65_6570).bits();
    let can_keep = case.how == Return::Reduced && !case.skip_a2a;
    can_keep && bits >> rank & 1 != 0
}

/// Gives a rank's dispatch memory for ids, full of poison and a row longer than they are, if it keeps them.
pub(super) fn give(case: &Case, rank: &Communicator, tensors: &mut Tensors) -> Result<(), Error> {
    if !is_keeping(case, super::number(rank)) {
        return Ok(());
    }
    let dims = tensors.input.topk_ids.dims;
    let bytes = 4 * ((dims[0] + 1) * dims[1]) as u64;
    let at = rank.device().alloc(bytes)?;
    rank.device().fill(at, POISON, bytes)?;
    tensors.input.kept_ids = Some(Tensor::contiguous(at, DataType::I32, dims));
    Ok(())
}

impl Run {
    /// Compares the ids that a rank has kept of a round.
    pub(super) fn compare_kept_ids(&self, round: usize, r: usize) {
        let (rank, tensors) = (&self.ranks[r], &self.tensors[round][r]);
        let Some(kept) = tensors.input.kept_ids else {
            return;
        };
        let (device, ids) = (&**rank.device(), tensors.input.topk_ids);
        let words = |at: DevicePtr| download::<u32>(device, at, at.bytes() as usize / 4).unwrap();
        let given = words(ids.at);
        let given: Vec<i64> = match ids.data_type {
            DataType::I64 => bytemuck::cast_slice(&given).to_vec(),
            _ => given.iter().map(|&id| i64::from(id as i32)).collect(),
        };
        let number = super::number(rank);
        let slots = self.expected[round].tokens(number) * self.case.top_k;
        let experts = 0..self.case.experts as i64;
        let kept_id = |id: &i64| {
            if experts.contains(id) {
                *id as u32
            } else {
                u32::MAX
            }
        };
        let found = words(kept.at);
        let mut wanted: Vec<u32> = given[..slots].iter().map(kept_id).collect();
        wanted.resize(found.len(), u32::from_ne_bytes([POISON; 4]));
        assert_eq!(
            found, wanted,
            "ids of rank {number}, round {round} of {:?}",
            self.case
        );
    }
}
