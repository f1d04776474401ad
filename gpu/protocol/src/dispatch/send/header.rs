//! The headers of dispatch's rows: the words of a token's assignments, and its weights.

use ferry_layout::{ByteOffset, Header, SENTINEL, avoid_sentinel};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::send::route::Route;
use crate::machine::Machine;
use crate::tactics::Numbering;
use crate::wire::remote;
use crate::work::item::RowLocation;

impl<M: Machine> Dispatch<'_, M> {
    /// The words of a token's assignments in a small batch; else its experts.
    #[inline(always)]
    pub fn count_assignments(
        &self,
        numbering: Numbering,
        route: Route<M::Lanes<u32>>,
    ) -> M::Lanes<u32> {
        match numbering {
            Numbering::InBlock => {
                let ranks = self.count_before(route.token, route.experts);
                self.assignment_words(route.experts, ranks)
            }
            Numbering::Tiles => route.experts,
        }
    }

    /// The words of a token's assignments, after the tiles are scanned.
    #[inline(always)]
    pub fn numbered_assignments(&self, route: Route<M::Lanes<u32>>) -> M::Lanes<u32> {
        let ranks = self.read_ranks_in_expert(route.token, route.experts);
        self.assignment_words(route.experts, ranks)
    }

    /// The words of a token's assignments without their ranks within experts, for rows that stay as they
    /// came.
    #[inline(always)]
    pub fn unnumbered_assignments(&self, route: Route<M::Lanes<u32>>) -> M::Lanes<u32> {
        self.assignment_words(route.experts, self.machine.lanes(|_| 0))
    }

    /// The words of assignments, one a lane.
    #[inline(always)]
    fn assignment_words(
        &self,
        experts: M::Lanes<u32>,
        ranks_in_expert: M::Lanes<u32>,
    ) -> M::Lanes<u32> {
        let (machine, shape) = (self.machine, &self.common.shape);
        machine.lanes(|lane| {
            let rank_in_expert = machine.own(ranks_in_expert, lane);
            let expert = machine.own(experts, lane);
            shape.assignment_words().encode(expert, rank_in_expert)
        })
    }

    /// Writes a token's header after its payload, an assignment a lane: to its ranks of this node, and into
    /// the staging area if the row also goes to others. Every part brings the assignments: a reader that sees
    /// the part's flag sees them, too. Each inline part has a header of its own. The weights, which combine
    /// reads, go with the first part.
    #[inline(always)]
    pub fn write_header(
        &self,
        route: Route<M::Lanes<u32>>,
        location: RowLocation,
        part: u32,
        words: M::Lanes<u32>,
    ) {
        let (machine, common) = (self.machine, self.common);
        let (shape, window, me) = (&common.shape, &common.window, common.rank());
        let Route { token, ranks, .. } = route;
        let p2p = remote::p2p_ranks(machine, common, ranks);
        let staging = window.dispatch_staging(token).plus(common.row.header);
        let write = |to, header: ByteOffset| {
            machine.lanes(|lane| {
                if lane < shape.top_k {
                    let at = header.plus(Header::assignment(lane));
                    let word = machine.own(words, lane);
                    debug_assert_ne!(word, SENTINEL, "a reader may wait for another word");
                    machine.write_word(to, at, word);
                    if part == 0 {
                        let weight = header.plus(Header::weight(shape.top_k, lane));
                        let bits = match route.is_weighted {
                            true => machine.own(route.weights, lane),
                            false => 1f32.to_bits(),
                        };
                        machine.write_word(to, weight, avoid_sentinel(bits));
                    }
                }
            });
        };
        p2p.for_each(|rank| write(rank, location.row.plus(location.header)));
        if ranks != p2p {
            write(me, staging);
        }
    }
}
