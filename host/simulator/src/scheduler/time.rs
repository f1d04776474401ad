//! Simulated time and deadlines.

use std::time::{Duration, Instant};

use super::{Running, TURN_NS, World};
use crate::error::SimulatorError;

/// Most turns of a warp after its deadline while its rank does no work, if all running warps take as many.
const LATE_TURNS: u64 = 100_000;

impl World {
    /// Reports a launch that goes on waiting after its deadline. A deadline ends waits, but work may take
    /// longer: a rank that has worked since is not late.
    pub(super) fn find_overdue(&mut self) {
        let now = self.shared.clock.get();
        if now <= self.next_deadline {
            return;
        }
        let deadlines = self.running.iter().map(|warp| warp.deadline);
        self.next_deadline = deadlines.min().unwrap_or(u64::MAX);
        let allowed_ns = LATE_TURNS * TURN_NS * self.running.len() as u64;
        let is_overdue = |warp: &&Running| {
            let worked_at = self.shared.worked_at[warp.rank as usize].get();
            now.saturating_sub(warp.deadline.max(worked_at)) > allowed_ns
        };
        if let Some(warp) = self.running.iter().find(is_overdue) {
            self.shared.fail(SimulatorError::Overdue {
                seed: self.shared.seed,
                rank: warp.rank,
                late_ns: now - warp.deadline,
            });
        }
    }

    /// Wait for launches before the next deadline passes: the patience that was set, or the wait that this
    /// deadline, perhaps that of a combine before, allows from the beginning of its launch. `None` if every
    /// rank is running or lost, so that no launch can begin before.
    pub(super) fn patience(&self) -> Option<Duration> {
        let is_running = |rank| self.running.iter().any(|warp| warp.rank == rank);
        let everyone_runs =
            (0..self.options.ranks).all(|rank| self.lost[rank as usize] || is_running(rank));
        let next = self
            .running
            .iter()
            .min_by_key(|warp| warp.times_out_at.get());
        let allowed = next.map_or(0, |warp| {
            let sooner = warp.deadline - warp.times_out_at.get();
            warp.deadline_ns.saturating_sub(sooner)
        });
        (!everyone_runs).then(|| {
            let allowed = Duration::from_nanos(allowed);
            self.options.patience.unwrap_or(allowed)
        })
    }

    /// Longest time, from `idle_since`, in which nothing happens before the next deadline passes.
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

    /// Counts the wall time in which nothing happened as simulated time, unless a patience was set: the
    /// deadline of a launch that begins now is later by that much than those of earlier launches. Never lets
    /// a deadline pass.
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

    /// Lets time pass until the next deadline, and wakes all warps. `patience` is the one that ended.
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
            // After a rank was lost, the others may have waited less.
            let is_lost = self.lost.contains(&true);
            self.shared.patience.set(patience.filter(|_| !is_lost));
            self.shared.bump_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;
    use std::sync::Arc;

    use corosensei::{Coroutine, Yielder};

    use super::*;
    use crate::Options;
    use crate::addresses::Machine;
    use crate::lent::Lent;
    use crate::memory::Memory;
    use crate::shared::Shared;
    use crate::store_buffer::StoreBuffer;
    use crate::write::{Polled, Write};

    const DEADLINE_NS: u64 = 1_000_000;

    /// A machine of one rank with one warp, which runs `work` with its store buffer.
    fn world(
        work: impl FnOnce(&Shared, &RefCell<StoreBuffer>, &Yielder<(), ()>) + 'static,
    ) -> World {
        let machine = Machine::next();
        let mut world = World::new(Options::new(1, 1), Arc::new(Lent::new(1, machine)), machine);
        world.shared.memory.replace(Memory::new(1, machine));
        let buffer = Rc::new(RefCell::new(StoreBuffer::new(0)));
        let state = (world.shared.clone(), buffer.clone());
        world.running.push(Running {
            rank: 0,
            fibre: Coroutine::new(move |yielder, ()| work(&state.0, &state.1, yielder)),
            buffer,
            idle_at: Rc::new(Cell::new(None)),
            stalled_until: 0,
            deadline: DEADLINE_NS,
            times_out_at: Rc::new(Cell::new(DEADLINE_NS)),
            deadline_ns: DEADLINE_NS,
        });
        world
    }

    /// Runs it for at most so many turns, and returns the violation, if any.
    fn run(mut world: World, turns: u64) -> Option<SimulatorError> {
        for _ in 0..turns {
            world.step();
            let violation = world.shared.violation.borrow().clone();
            if violation.is_some() || world.running.is_empty() {
                return violation;
            }
        }
        panic!("goes on after {turns} turns");
    }

    #[test]
    fn a_launch_that_waits_on_after_its_deadline_is_reported() {
        let waiting = world(|_, _, yielder| {
            loop {
                yielder.suspend(());
            }
        });
        let reported = run(waiting, 2 * LATE_TURNS);
        let wanted = |late_ns| SimulatorError::Overdue {
            seed: 1,
            rank: 0,
            late_ns,
        };
        let late_ns = (LATE_TURNS + 1) * TURN_NS;
        assert_eq!(reported, Some(wanted(late_ns)));
    }

    #[test]
    fn long_work_after_the_deadline_is_not_reported() {
        let working = world(|shared, buffer, yielder| {
            let address = shared.memory.borrow_mut().alloc(0, 8).unwrap();
            for _ in 0..100 {
                let bytes = vec![7; 8];
                let (polled, barriers) = (Polled::No, 0);
                let write = Write {
                    address,
                    bytes,
                    polled,
                    barriers,
                };
                buffer.borrow_mut().push(write, shared);
                (0..LATE_TURNS / 10).for_each(|_| yielder.suspend(()));
            }
        });
        assert_eq!(run(working, 20 * LATE_TURNS), None);
    }
}
