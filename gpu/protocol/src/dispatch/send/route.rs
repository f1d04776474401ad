//! Routes of tokens, from the user's tables.

use ferry_layout::{
    DispatchArgs, Fault, FaultKind, NOT_ROUTED, Rank, Region, Table, assignment_index,
};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::send::ids::whole_id;
use crate::machine::Machine;
use crate::tactics::Numbering;
use crate::work::lanes::lane_or_none;
use crate::work::rank_set::RankSet;

/// Route of a token. `L`: one value a lane.
#[derive(Clone, Copy)]
pub struct Route<L> {
    /// The token.
    pub token: u32,
    /// Its experts, one a lane.
    pub experts: L,
    /// The router's weights for them, as f32 bits, if the user passed any.
    pub weights: L,
    /// Whether the user passed weights.
    pub is_weighted: bool,
    /// The ranks of its experts.
    pub ranks: RankSet,
}

impl<M: Machine> Dispatch<'_, M> {
    /// Reads the experts of a token and keeps them for combine. Ids that do not exist are reported and left
    /// out.
    #[inline(always)]
    pub fn read_route(&self, numbering: Numbering, token: u32) -> Route<M::Lanes<u32>> {
        let (machine, common) = (self.machine, self.common);
        let shape = &common.shape;
        let given = machine.lanes(|lane| {
            lane_or_none(lane, shape.top_k, || {
                let index = assignment_index(shape.top_k, token, lane);
                self.read_expert_id(numbering, index)
            })
        });
        let is_weighted = self.args.topk_weights != 0;
        let weights = read_weights(machine, self.args, token);
        if common.debug_checks != 0 {
            self.report_duplicates(token, shape.experts, given);
        }
        self.report_invalid(token, shape.experts, given);
        let experts = machine.lanes(|lane| {
            let id = machine.own(given, lane);
            let id = if id < shape.experts { id } else { NOT_ROUTED };
            if lane < shape.top_k {
                machine.write(
                    Table::Routes,
                    assignment_index(shape.top_k, token, lane),
                    id,
                );
            }
            id
        });
        Route {
            token,
            experts,
            weights,
            is_weighted,
            ranks: RankSet::of_experts(machine, shape, experts),
        }
    }
}

/// The router's weights of a token, as f32 bits; arbitrary if the user passed none. Always loaded, from the
/// words of the ids if there are no weights, and tested only when it is written: the assembler would wait for
/// a conditional load before the payload is read.
#[inline(always)]
pub fn read_weights<M: Machine>(machine: &M, args: &DispatchArgs, token: u32) -> M::Lanes<u32> {
    let top_k = args.common.shape.top_k;
    let table = match args.topk_weights != 0 {
        true => Table::TopkWeights,
        false => Table::TopkIds,
    };
    let last = top_k - 1;
    machine.lanes(|lane| machine.read(table, assignment_index(top_k, token, lane.min(last))))
}

impl<M: Machine> Dispatch<'_, M> {
    /// Reports ids that are not below `experts`, except [`NOT_ROUTED`].
    #[inline(always)]
    pub fn report_invalid(&self, token: u32, experts: u32, given: M::Lanes<u32>) {
        let machine = self.machine;
        let is_invalid = |id: u32| id >= experts && id != NOT_ROUTED;
        let invalid = machine.ballot(machine.lanes(|lane| is_invalid(machine.own(given, lane))));
        if invalid != 0 {
            self.record_input(FaultKind::InvalidExpert, invalid, |lane| Fault {
                peer: Rank(lane),
                region: Region::TopkIds,
                index: token as u64,
                wanted: experts as u64,
                saw: whole_id(
                    machine,
                    self.wide_ids,
                    assignment_index(self.common.shape.top_k, token, lane),
                    machine.own(given, lane),
                ),
                ..self.fault()
            });
        }
    }

    /// Reports an expert below `experts` that a token lists twice. Of ids that are i32 also a number that is
    /// none of an expert: the record has all of it, and the host reports that it [does not
    /// exist](report_invalid).
    #[inline(always)]
    pub fn report_duplicates(&self, token: u32, experts: u32, given: M::Lanes<u32>) {
        let (machine, common) = (self.machine, self.common);
        for k in 1..common.shape.top_k {
            let id = machine.broadcast(given, k);
            let same = machine.ballot(machine.lanes(|lane| machine.own(given, lane) == id));
            if id == NOT_ROUTED || same & ((1 << k) - 1) == 0 || self.wide_ids && id >= experts {
                continue;
            }
            self.record_input(FaultKind::DuplicateExpert, 1 << k, |_| Fault {
                peer: Rank(k),
                region: Region::TopkIds,
                index: token as u64,
                saw: id as u64,
                ..self.fault()
            });
        }
    }
}
