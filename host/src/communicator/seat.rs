//! The part of a GPU that a rank of a communicator takes.

use std::sync::Arc;

use ferry_layout::Rank;

use crate::device::sharing::one_stream::{Order, Turn};
use crate::device::sharing::residents::{Residence, Resident, admit};
use crate::error::Error;
use crate::group::Group;
use crate::plan::Plan;

/// A rank of this process on its GPU.
pub(super) struct Seat {
    pub(super) rank: Rank,
    /// Most multiprocessors of its kernels; `None` for all.
    pub(super) max_sms: Option<u32>,
    /// Number of this process's ranks on the GPU, if there are several.
    pub(super) gpu_ranks: Option<u32>,
    /// Present if other ranks of this process share the GPU.
    pub(super) turn: Option<Turn>,
    /// Room on the GPU, for kernels that wait for peers.
    pub(super) residence: Option<Residence>,
}

/// The seats of all ranks of this process, ascending. Not collective.
pub(super) fn seats(group: &Group, plan: &Plan) -> Result<Vec<Seat>, Error> {
    let (ranks, max_sms) = (group.local_ranks(), plan.config().max_sms);
    let seat = |&rank: &Rank| {
        let gpu = group.gpu_ranks(rank);
        let here = gpu.map(|gpu| gpu.ranks().filter(|other| ranks.contains(other)).count());
        Seat {
            rank,
            max_sms: gpu.map_or(max_sms, |gpu| gpu.limit(rank, max_sms)),
            gpu_ranks: here.filter(|&here| here > 1).map(|here| here as u32),
            turn: None,
            residence: None,
        }
    };
    let mut seats: Vec<Seat> = ranks.iter().map(seat).collect();
    // Nothing travels, so no kernel waits for a peer.
    if plan.config().skip_a2a {
        return Ok(seats);
    }
    for (seat, residence) in seats.iter_mut().zip(residences(group, &ranks, max_sms)?) {
        seat.residence = residence;
    }
    for turn in turns(group, &ranks) {
        if let Some(seat) = seats.iter_mut().find(|seat| seat.rank == turn.rank()) {
            seat.turn = Some(turn);
        }
    }
    Ok(seats)
}

/// Reserves room for the kernels of these ranks on their GPUs; `None` for a rank without a GPU.
fn residences(
    group: &Group,
    ranks: &[Rank],
    max_sms: Option<u32>,
) -> Result<Vec<Option<Residence>>, Error> {
    let resident = |&rank: &Rank| {
        let gpu = group.gpu_ranks(rank)?;
        Some(Resident {
            gpu: gpu.gpu().to_owned(),
            multiprocessors: gpu.multiprocessors(),
            is_shared: gpu.is_shared(),
            group: Arc::as_ptr(&group.fabric).addr(),
            kind: group.name(),
            rank,
            blocks: gpu.blocks(rank, max_sms),
        })
    };
    let mut admitted = admit(ranks.iter().filter_map(resident).collect())?.into_iter();
    let residence = |&rank| group.gpu_ranks(rank).and_then(|_| admitted.next());
    Ok(ranks.iter().map(residence).collect())
}

/// The turns of those of these ranks that share a GPU with another one of them.
fn turns(group: &Group, ranks: &[Rank]) -> Vec<Turn> {
    let mut turns = Vec::new();
    let mut left = ranks.to_vec();
    while let Some(&first) = left.first() {
        let gpu = group.gpu_ranks(first);
        let is_with = |rank: &Rank| {
            *rank == first || gpu.is_some_and(|gpu| gpu.ranks().any(|other| other == *rank))
        };
        let (here, others) = left.into_iter().partition(is_with);
        left = others;
        let here: Vec<Rank> = here;
        if here.len() > 1 {
            turns.extend(Order::of(here));
        }
    }
    turns
}
