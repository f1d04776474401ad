//! Counts of dispatches on the host, beside those of the inputs.

use std::hint::spin_loop;

use ferry::simulator::SimulatorError;
use ferry::{Communicator, Error, ReceivedCounts};
use ferry_reference::Problem;

use super::{Outcome, Run, number};
use crate::case::Case;

impl Run {
    /// Enqueues the counts of a round's split dispatches, and compares those that come.
    pub(super) fn look_at_counts(&mut self, round: usize) {
        let asked: Vec<usize> = (0..self.ranks.len())
            .filter(|&r| {
                let is_here = self.case.absent != Some(r) && self.case.is_split(r);
                is_here && self.outcomes[r] == Outcome::Finished
            })
            .collect();
        for &r in &asked {
            let enqueued = self.ranks[r].dispatch_counts(self.streams[r]);
            self.note(r, enqueued);
        }
        for r in asked {
            if self.outcomes[r] != Outcome::Finished {
                continue;
            }
            match received(&self.ranks[r]) {
                Ok(counts) => self.compare_counts(round, r, &counts),
                Err(error) => self.note(r, Err(error)),
            }
        }
    }

    /// Notes the end of a rank, if an error is one.
    fn note(&mut self, r: usize, result: Result<(), Error>) {
        match result {
            Ok(()) => {}
            Err(Error::Fault(fault) | Error::Poisoned(fault)) => {
                self.outcomes[r] = Outcome::Fault(fault);
            }
            Err(Error::Simulator(SimulatorError::RankLost { .. })) => {
                self.outcomes[r] = Outcome::Lost;
            }
            Err(error) => panic!("{:?}: rank {r}: {error}", self.case),
        }
    }

    fn compare_counts(&self, round: usize, r: usize, found: &ReceivedCounts) {
        let rank = number(&self.ranks[r]);
        let about = || format!("rank {rank}, round {round} of {:?}", self.case);
        let (source_rows, expert_rows) = rows_of(&self.case, &self.problems[round], rank);
        assert_eq!(found.source_counts, source_rows, "sources: {}", about());
        assert_eq!(found.expert_counts, expert_rows, "experts: {}", about());
        let plan = self.ranks[r].plan();
        let receive = plan.config().receive.layout();
        let is_tiled = plan.shape().has_tiled_scales();
        let needed = match receive {
            ferry::ReceiveLayout::ByExpert => {
                let (oracle, number) = self.expected[round].oracle(rank);
                let mut needed = oracle.placement(number).capacity();
                if self.case.shared_expert {
                    // Also room for all rows of `x`.
                    let rows = self.case.rows(self.problems[round].inputs[rank].tokens);
                    let least = rows.next_multiple_of(plan.row_alignment() as usize);
                    needed.rows = needed.rows.max(least);
                    needed.scale_blocks = needed.scale_blocks.max(least.div_ceil(128));
                }
                needed
            }
            ferry::ReceiveLayout::Compact => ferry::Capacity {
                rows: source_rows.iter().sum::<u32>() as usize,
                ..ferry::Capacity::default()
            },
            _ => ferry::Capacity::max(plan),
        };
        assert_eq!(found.capacity.rows, needed.rows, "rows: {}", about());
        if is_tiled {
            let blocks = found.capacity.scale_blocks;
            assert_eq!(blocks, needed.scale_blocks, "blocks: {}", about());
        }
    }
}

/// Waits for a rank's counts.
fn received(rank: &Communicator) -> Result<ReceivedCounts, Error> {
    loop {
        if let Some(counts) = rank.received()? {
            return Ok(counts);
        }
        spin_loop();
    }
}

/// Rows of each source on a rank, and assignments to each of its experts, from the inputs.
fn rows_of(case: &Case, problem: &Problem, rank: usize) -> (Vec<u32>, Vec<u32>) {
    let here = problem.experts / problem.ranks;
    let experts = (rank * here) as i32..((rank + 1) * here) as i32;
    let mut of_expert = vec![0; here];
    let mut rows = |input: &ferry_reference::RankInput| {
        let tokens = input.topk_ids.chunks(problem.top_k).take(input.tokens);
        let of_tokens = tokens.map(|ids| {
            let ids = ids.iter().filter(|id| experts.contains(id));
            let assignments = ids.map(|id| of_expert[(id - experts.start) as usize] += 1);
            let assignments = assignments.count() as u32;
            match case.receive.keeps_rows() {
                true => assignments.min(1),
                false => assignments,
            }
        });
        of_tokens.sum()
    };
    let of_source = problem.inputs.iter().map(&mut rows).collect();
    (of_source, of_expert)
}
