//! Launches, and waits that end at their deadline.

use ferry_layout::{
    Common, Counter, Epoch, Fault, FaultKind, Kernel, LastRecord, Rank, Region, Table,
};

use crate::machine::Machine;
use crate::sync::culprit;

/// A launch that aborted. The fault record has the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aborted;

/// [`Counter::Aborted`] of a rank of which a warp waited for another warp in vain. That other warp may still
/// record the peer that it waits for.
const ABORTED_BY_ITSELF: u64 = 1;
/// Value of [`Counter::Aborted`] after the fault record has the final reason: later time-outs record nothing.
const ABORTED: u64 = 2;

/// A launch of a kernel on a warp: the machine, the arguments that all kernels have, and the round of the
/// launch.
pub struct Launch<'a, M> {
    pub machine: &'a M,
    pub common: &'a Common,
    pub kernel: Kernel,
    /// Tokens of this rank in this round.
    pub tokens: u32,
    pub epoch: Epoch,
    /// Whether the user's expert ids are i64: false unless the launch reads them.
    pub wide_ids: bool,
    /// Whether launches of the communicator have different numbers of blocks. A constant.
    pub varies: bool,
}

/// The object of a lane's wait, for the record.
#[derive(Clone, Copy)]
pub struct Awaited {
    pub peer: Rank,
    pub region: Region,
    pub index: u64,
    pub saw: u64,
}

impl<'a, M: Machine> Launch<'a, M> {
    /// Reads the round from the device, so that a replayed graph advances by itself. `is_counted`: the
    /// round's first launch read the number of tokens on the device. Call [`enter`](Self::enter) next.
    #[inline(always)]
    pub fn begin(machine: &'a M, common: &'a Common, kernel: Kernel, is_counted: bool) -> Self {
        let loading = machine.begin();
        let tokens = match is_counted {
            true => {
                let kept = machine.lanes(|_| machine.read(Table::CountedTokens, 0));
                common.tokens.min(machine.broadcast(kept, 0))
            }
            false => common.tokens,
        };
        machine.clear_block();
        Self::begun(machine, common, kernel, tokens, loading)
    }

    /// Builds the launch after the machine's first steps: `loading` is the result of [`Machine::begin`], and
    /// the block is [clear](Machine::clear_block). See [`begin`](Self::begin).
    #[inline(always)]
    pub fn begun(
        machine: &'a M,
        common: &'a Common,
        kernel: Kernel,
        tokens: u32,
        loading: M::Loading,
    ) -> Self {
        machine.keep(loading);
        machine.block_barrier();
        Self {
            machine,
            common,
            kernel,
            tokens,
            epoch: Epoch::after(machine.peek(Counter::Finished)),
            wide_ids: false,
            varies: false,
        }
    }

    /// Fails if an earlier launch aborted. Not a part of [`begin`](Self::begin): in a `Result` the kernel's
    /// name would no longer be a constant to the compiler, and occupy a register.
    #[inline(always)]
    pub fn check(&self) -> Result<(), Aborted> {
        match self.machine.peek(Counter::Aborted) {
            0 => Ok(()),
            _ => Err(Aborted),
        }
    }

    /// The round of the launch before this one, and of the credits that this one waits for, if it does: 0
    /// before the first round.
    #[inline(always)]
    pub fn follows(&self) -> Epoch {
        match self.kernel {
            Kernel::Dispatch | Kernel::DispatchAsync => Epoch(self.machine.peek(Counter::Finished)),
            _ => self.epoch,
        }
    }

    /// Waits until `ready` returns a value on every lane. `awaited` is called only if the wait times out, for
    /// a lane that is not ready.
    #[inline(always)]
    pub fn wait_lanes<T: Copy>(
        &self,
        ready: impl FnMut(u32) -> Option<T>,
        awaited: impl Fn(u32) -> Awaited,
    ) -> Result<M::Lanes<Option<T>>, Aborted> {
        self.wait_lanes_until(u64::MAX, ready, awaited)
    }

    /// Waits like [`wait_lanes`](Self::wait_lanes), but no longer than until `deadline`.
    #[inline(always)]
    pub fn wait_lanes_until<T: Copy>(
        &self,
        deadline: u64,
        mut ready: impl FnMut(u32) -> Option<T>,
        awaited: impl Fn(u32) -> Awaited,
    ) -> Result<M::Lanes<Option<T>>, Aborted> {
        let machine = self.machine;
        loop {
            let values = machine.lanes(&mut ready);
            let missing = machine.ballot(machine.lanes(|lane| machine.own(values, lane).is_none()));
            if missing == 0 {
                machine.converge();
                return Ok(values);
            }
            if machine.timed_out_by(deadline) {
                let lane = missing.trailing_zeros();
                return self.time_out(FaultKind::PeerTimeout, lane, awaited);
            }
        }
    }

    /// Waits until `ready` is true on some of `lanes`, and returns those lanes. `awaited` is called as in
    /// [`wait_lanes`](Self::wait_lanes).
    #[inline(always)]
    pub fn wait_any(
        &self,
        lanes: u32,
        ready: impl Fn(u32) -> bool,
        awaited: impl Fn(u32) -> Awaited,
    ) -> Result<u32, Aborted> {
        let machine = self.machine;
        loop {
            let found = machine.lanes(|lane| lanes >> lane & 1 != 0 && ready(lane));
            let found = machine.ballot(found);
            if found != 0 {
                machine.converge();
                return Ok(found);
            }
            if machine.timed_out() {
                return self.time_out(FaultKind::PeerTimeout, lanes.trailing_zeros(), awaited);
            }
        }
    }

    /// Waits until a counter of this GPU satisfies `ready`.
    #[inline(always)]
    pub fn wait_local(
        &self,
        counter: Counter,
        region: Region,
        ready: impl Fn() -> bool,
    ) -> Result<(), Aborted> {
        let machine = self.machine;
        // Lanes look at different times, so one may leave before the others: nothing in the loop needs all.
        let mut look = 0;
        let is_late = loop {
            if ready() {
                break false;
            }
            look += 1;
            if machine.lane_timed_out(look) {
                break true;
            }
        };
        machine.converge();
        if machine.ballot(machine.lanes(|_| is_late)) != 0 {
            let awaited = |_| Awaited {
                peer: self.common.rank(),
                region,
                index: 0,
                // This counter holds the epoch, and a bit for too many rows.
                saw: machine.load(counter) >> matches!(counter, Counter::OffsetsReady) as u32,
            };
            return self.time_out(FaultKind::LocalTimeout, 0, awaited);
        }
        Ok(())
    }

    /// Times out a wait of the whole warp.
    #[inline(always)]
    pub fn time_out_on<T>(&self, awaited: Awaited) -> Result<T, Aborted> {
        self.time_out(FaultKind::PeerTimeout, 0, |_| awaited)
    }

    /// Records the reason why lane `lane` waits in vain, and stops every warp of this rank.
    #[inline(always)]
    pub(super) fn time_out<T>(
        &self,
        kind: FaultKind,
        lane: u32,
        awaited: impl Fn(u32) -> Awaited,
    ) -> Result<T, Aborted> {
        let machine = self.machine;
        let aborted = match kind {
            FaultKind::LocalTimeout => ABORTED_BY_ITSELF,
            _ => ABORTED,
        };
        if machine.load(Counter::Aborted) < aborted {
            machine.lanes(|own| {
                if own == lane {
                    let Awaited {
                        peer,
                        region,
                        index,
                        saw,
                    } = awaited(lane);
                    let peer = Rank(machine.late(peer.0));
                    let culprit = culprit::culprit(machine, self.common, peer);
                    let wanted = match region {
                        Region::Credit => self.follows(),
                        _ => self.epoch,
                    };
                    let fault = Fault {
                        peer,
                        culprit,
                        region,
                        index,
                        wanted: wanted.0,
                        saw,
                        ..self.fault()
                    };
                    self.record(kind, fault);
                }
            });
        }
        machine.store(Counter::Aborted, aborted);
        Err(Aborted)
    }

    /// Stops every warp of this rank, in this launch and in later ones.
    #[inline(always)]
    pub fn abort<T>(&self) -> Result<T, Aborted> {
        self.machine.store(Counter::Aborted, ABORTED);
        Err(Aborted)
    }

    /// Ends the round for this rank's later launches, after all blocks of this one have read its number. All
    /// lanes.
    #[inline(always)]
    pub fn end_round(&self) {
        let machine = self.machine;
        machine.leave(Counter::CreditsDue, machine.deadline());
        machine.leave(Counter::Finished, self.epoch.0);
    }

    /// Ends the launch. If the launch timed out on a peer, one warp tells the other ranks the culprit.
    #[inline(always)]
    pub fn end(&self, ended: Result<(), Aborted>) -> Result<(), Aborted> {
        if ended.is_err() {
            let machine = self.machine;
            let record = LastRecord(machine.load(Counter::FaultRecord));
            let is_first = machine.lanes(|lane| {
                let is_told = record.culprit().is_some() && lane == 0;
                is_told && machine.raise(Counter::CulpritTold, 1)
            });
            if let (true, Some(culprit)) = (machine.ballot(is_first) != 0, record.culprit()) {
                culprit::tell_culprit(machine, self.common, culprit);
            }
        }
        ended
    }

    /// A fault of this launch, to be filled in.
    #[inline(always)]
    pub fn fault(&self) -> Fault {
        Fault {
            kind: FaultKind::LocalTimeout,
            kernel: self.kernel,
            rank: self.common.rank(),
            peer: self.common.rank(),
            culprit: self.common.rank(),
            region: Region::Output,
            index: 0,
            wanted: 0,
            saw: 0,
            epoch: self.epoch.0,
            patience_ms: None,
            gpu_ranks: None,
            is_culprit_behind: false,
        }
    }

    /// Records a fault of the input, once a round: with a fault in every token, all warps would queue for the
    /// page. `lanes`: the lanes with a fault; that of the first one is recorded.
    #[inline(always)]
    pub fn record_input(&self, kind: FaultKind, lanes: u32, fault: impl Fn(u32) -> Fault) {
        self.machine.lanes(|lane| {
            let is_first = lanes != 0 && lane == lanes.trailing_zeros();
            if is_first && self.machine.raise(Counter::InputFault, self.epoch.0) {
                self.record(kind, fault(lane));
            }
        });
    }

    /// Records `fault` under `kind`. For one lane.
    #[inline(always)]
    pub fn record(&self, kind: FaultKind, fault: Fault) {
        self.machine.record(&Fault { kind, ..fault });
    }
}
