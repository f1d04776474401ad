//! When simulated time passes, and with it deadlines.

use std::time::{Duration, Instant};

use super::{Running, TURN_NS, World};
use crate::SimulatorError;

/// Turns that a warp may take after its deadline, if all warps that run take as many.
const LATE_TURNS: u64 = 100_000;

impl World {
    /// Reports a launch that does not end although its deadline has passed.
    pub(super) fn find_overdue(&self) {
        let late_ns = |warp: &Running| self.shared.clock.get().saturating_sub(warp.deadline);
        let allowed_ns = LATE_TURNS * TURN_NS * self.running.len() as u64;
        if let Some(warp) = self.running.iter().find(|warp| late_ns(warp) > allowed_ns) {
            let error = SimulatorError::Overdue {
                seed: self.shared.seed,
                rank: warp.rank,
                late_ns: late_ns(warp),
            };
            self.shared.violation.borrow_mut().get_or_insert(error);
        }
    }

    /// How long launches are waited for until the next deadline passes: the patience that was set,
    /// or as long as that deadline allows. `None`: every rank has something running, or never will,
    /// so that no launch can begin before.
    pub(super) fn patience(&self) -> Option<Duration> {
        let is_running = |rank| self.running.iter().any(|warp| warp.rank == rank);
        let everyone_runs =
            (0..self.options.ranks).all(|rank| self.lost[rank as usize] || is_running(rank));
        let next = self
            .running
            .iter()
            .min_by_key(|warp| warp.times_out_at.get());
        let allowed = next.map_or(0, |warp| warp.deadline_ns);
        (!everyone_runs).then(|| {
            let allowed = Duration::from_nanos(allowed);
            self.options.patience.unwrap_or(allowed)
        })
    }

    /// How long nothing may happen, from `idle_since`, until the next deadline passes.
    pub(super) fn longest_idle(&self) -> Duration {
        let next = self
            .running
            .iter()
            .map(|warp| warp.times_out_at.get())
            .min();
        let left_ns = next.unwrap_or(0).saturating_sub(self.shared.clock.get());
        let left = Duration::from_nanos(left_ns);
        self.options.patience.unwrap_or(left)
    }

    /// Counts the wall time in which nothing happened as simulated time, unless a patience was set:
    /// a launch that begins now has its deadline so much later than those that began before. No
    /// deadline passes by it.
    pub(super) fn count_idle_time(&mut self) {
        let Some(since) = self.idle_since.filter(|_| self.options.patience.is_none()) else {
            return;
        };
        let now = Instant::now();
        let idle = (now - since).min(self.longest_idle());
        let clock = &self.shared.clock;
        clock.set(clock.get().saturating_add(idle.as_nanos() as u64));
        self.idle_since = Some(now);
    }

    /// Lets time pass until the next deadline, and wakes everybody. `patience` is what made it pass.
    pub(super) fn pass_deadline(&mut self, patience: Option<Duration>) {
        self.idle_since = None;
        if let Some(deadline) = self
            .running
            .iter()
            .map(|warp| warp.times_out_at.get())
            .min()
        {
            let clock = &self.shared.clock;
            clock.set(clock.get().max(deadline));
            self.shared.patience.set(patience);
            self.shared.bump_all();
        }
    }
}
