//! Notifications of a source to its peers: its number of tokens, the tokens that go to each rank, and the
//! number of assignments for each expert. These words carry their epoch, so no fence is needed. At the source
//! no row waits for them. Those for a rank of another node are staged, and two puts carry them all.

use ferry_layout::{Counter, Rank, Region, Tagged, assignment_index};

use crate::dispatch::launch::Dispatch;
use crate::machine::puts::Put;
use crate::machine::{LANES, Machine};
use crate::sync::arrivals;
use crate::sync::launch::Aborted;
use crate::tactics::Numbering;
use crate::wire::remote;
use crate::work::lanes::on_each_rank;
use crate::work::partition::Partition;
use crate::work::rank_set::RankSet;
use crate::work::tasks::{expert_groups, tiles};

/// Words that a lane has in flight.
/// measured: T-014, H200
const DEPTH: usize = 8;

impl<M: Machine> Dispatch<'_, M> {
    /// Sends this warp's partition of the notifications. The number of assignments for each expert results
    /// from numbering them.
    #[inline(always)]
    pub fn notify(&self, numbering: Numbering, partition: Partition) -> Result<(), Aborted> {
        if partition.index == 0 {
            self.notify_tokens();
        }
        let (machine, shape) = (self.machine, &self.common.shape);
        let tile_count = tiles(shape.top_k, self.tokens);
        let experts = expert_groups(shape.experts);
        let first_tasks = match numbering {
            Numbering::InBlock => experts,
            Numbering::Tiles => tile_count,
        };
        let groups = self.tokens.div_ceil(LANES);
        for task in partition.tasks(first_tasks + groups) {
            if task >= first_tasks {
                self.notify_presence(numbering, task - first_tasks);
            } else if numbering == Numbering::InBlock {
                self.notify_experts(task, self.count_experts(task));
            } else {
                self.number_tile(task);
                continue;
            }
            if machine.spans_nodes() {
                self.staged()?;
            }
        }
        if numbering == Numbering::Tiles && partition.index < experts {
            self.wait_local(Counter::TilesDone, Region::RanksInExpert, || {
                machine.load(Counter::TilesDone) >= tile_count as u64
            })?;
            for task in partition.tasks(experts) {
                self.notify_experts(task, self.scan_tiles(tile_count, task));
                if machine.spans_nodes() {
                    self.staged()?;
                }
            }
        }
        Ok(())
    }

    /// Notifies every rank of this one's number of tokens: those of other nodes in
    /// [`put_notices`](Self::put_notices).
    #[inline(always)]
    fn notify_tokens(&self) {
        let (machine, common, epoch) = (self.machine, self.common, self.epoch);
        let word = common.window.token_count(common.rank());
        let value = Tagged::new(epoch, self.tokens).0;
        on_each_rank(machine, common.shape.ranks, |rank| {
            if remote::is_p2p(machine, common, rank) {
                machine.signal(rank, word, value);
            }
        });
    }

    /// Counts a part of the notifications as staged; the last one puts them all.
    #[inline(always)]
    fn staged(&self) -> Result<(), Aborted> {
        let (machine, shape) = (self.machine, &self.common.shape);
        let mut is_last = false;
        let parts = expert_groups(shape.experts) + self.tokens.div_ceil(LANES);
        arrivals::pass(machine, Counter::Arrivals, parts, || is_last = true);
        match is_last {
            true => self.put_notices(),
            false => Ok(()),
        }
    }

    /// Puts the notifications to the ranks of other nodes. One warp, which sees those that all have staged.
    #[inline(always)]
    fn put_notices(&self) -> Result<(), Aborted> {
        let (machine, common, me) = (self.machine, self.common, self.common.rank());
        let (shape, window) = (&common.shape, &common.window);
        let tokens = Tagged::new(self.epoch, self.tokens).0;
        on_each_rank(machine, shape.ranks, |rank| {
            if !remote::is_p2p(machine, common, rank) {
                machine.stage(window.staged_count(rank, shape.local_experts()), tokens);
            }
        });
        machine.release();
        remote::put_words(self, |peer| Put {
            peer,
            from: window.staged_count(peer, 0),
            to: window.count(me, 0).place(),
            bytes: 8 * (shape.local_experts() + 1),
        })?;
        match self.tokens.div_ceil(LANES) {
            // Nobody awaits any.
            0 => Ok(()),
            words => remote::put_words(self, |peer| Put {
                peer,
                from: window.staged_presence(peer, 0),
                to: window.presence(me, 0).place(),
                bytes: 8 * words,
            }),
        }
    }

    /// Notifies every rank of the tokens that come to it, among 32.
    #[inline(always)]
    fn notify_presence(&self, numbering: Numbering, group: u32) {
        let (machine, common, epoch) = (self.machine, self.common, self.epoch);
        let shape = &common.shape;
        let touched = machine.lanes(|lane| {
            let token = group * LANES + lane;
            let (mut ranks, mut first) = (RankSet::NONE, 0);
            while first < shape.top_k {
                // Repeats loads rather than branch.
                let ids = core::array::from_fn::<u32, DEPTH, _>(|step| {
                    let k = (first + step as u32).min(shape.top_k - 1);
                    let token = token.min(self.tokens - 1);
                    self.read_expert_id(numbering, assignment_index(shape.top_k, token, k))
                });
                core::array::from_fn::<(), DEPTH, _>(|step| {
                    ranks = ranks.with(RankSet::of_expert(shape, ids[step]));
                });
                first += DEPTH as u32;
            }
            match token < self.tokens {
                true => ranks,
                false => RankSet::NONE,
            }
        });
        let word = common.window.presence(common.rank(), group);
        for first in (0..shape.ranks).step_by(LANES as usize) {
            let mut bits = machine.lanes(|_| 0);
            for rank in first..shape.ranks.min(first + LANES) {
                let come = machine.lanes(|lane| machine.own(touched, lane).contains(Rank(rank)));
                let come = machine.ballot(come);
                bits = machine.lanes(|lane| match first + lane == rank {
                    true => come,
                    false => machine.own(bits, lane),
                });
            }
            machine.lanes(|lane| {
                if first + lane < shape.ranks {
                    let value = Tagged::new(epoch, machine.own(bits, lane)).0;
                    let rank = Rank(first + lane);
                    match remote::is_p2p(machine, common, rank) {
                        true => machine.signal(rank, word, value),
                        false => machine.stage(common.window.staged_presence(rank, group), value),
                    }
                }
            });
        }
    }

    /// Notifies the ranks of 32 experts of the number of assignments for each.
    #[inline(always)]
    fn notify_experts(&self, task: u32, totals: M::Lanes<u32>) {
        let (machine, common, epoch) = (self.machine, self.common, self.epoch);
        let shape = &common.shape;
        machine.lanes(|lane| {
            let expert = task * LANES + lane;
            if expert < shape.experts {
                let local = expert % shape.local_experts();
                let word = common.window.count(common.rank(), local);
                let value = Tagged::new(epoch, machine.own(totals, lane)).0;
                let rank = shape.rank_of(expert);
                match remote::is_p2p(machine, common, rank) {
                    true => machine.signal(rank, word, value),
                    false => machine.stage(common.window.staged_count(rank, local), value),
                }
            }
        });
        let scans = expert_groups(shape.experts);
        if arrivals::part_done(machine, Counter::ScansDone, epoch, scans) {
            // All waits for the tiles are over: ready for the next round.
            machine.store(Counter::TilesDone, 0);
        }
    }
}
