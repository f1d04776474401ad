//! A check of the links between two ranks: each sends to the other as dispatch does, and looks at what comes.
//! No part of a round: it has a communicator of its own, with which nothing else is done.
//!
//! ```text
//! sender:    write the rows ; release ; flag := n       inline rows: no release, no flag
//! receiver:  flag >= n ; look at the rows ; release ; its own flag := n        (the answer)
//! sender:    that flag >= n : the time from the first store to here is the link's
//! ```
//!
//! A launch is for disjoint pairs of ranks, and one of a pair sends at a time, in a half of its own: so a
//! link has the way to itself, its time is no other link's, and no rank is late because it waited for a third
//! one. A half ends when both are done, and at the latest at a time that follows from the launch's begin.
//! What does not come is noted by the rank to which it was sent. The answer may also be missing because its
//! question was: the host knows both.
//!
//! A word has the flags of both halves in turn, each one more than the last. A peer that has given up the
//! first half may be in the second one already, and marks its flags.

mod awaited;
mod rows;

use ferry_layout::{
    Counter, Epoch, Kernel, LinkOutcome, LinkRecord, LinkTest, LinksArgs, Rank, Signal, Table,
};

use self::awaited::{Awaited, GAVE_UP, Seen};
use crate::machine::{LANES, Machine};
use crate::sync::launch::Launch;
use crate::wire::flagged::publish;

/// A warp's share of a launch: the rows `warp`, `warp + warps`, and so on, one a lane.
struct Links<'a, M> {
    machine: &'a M,
    args: &'a LinksArgs,
    test: LinkTest,
    /// The other rank of the pair.
    peer: Rank,
    /// Rows of this warp, at most one a lane.
    count: u32,
}

/// Exchanges with a peer, if there is one, and notes what came of it for the host. The warps of a rank divide
/// the rows among them, at most 32 each. Collective, of a communicator without rounds; waits for as long as
/// the arguments say. [`Counter::Arrivals`] is 0 as it begins.
#[inline(always)]
pub fn links<M: Machine>(machine: &M, args: &LinksArgs) {
    let launch = Launch::begin(machine, &args.common, Kernel::Links, false);
    let (common, me) = (launch.common, launch.common.rank());
    let (test, peer) = (LinkTest::of_number(args.test), Rank(args.peer as u32));
    let left = test.rows(&common.shape).saturating_sub(machine.warp());
    let count = left.div_ceil(machine.warp_position().warps());
    debug_assert!(count <= LANES, "{count} rows of a warp of {LANES} lanes");
    if count == 0 || peer == me {
        return;
    }
    let links = Links {
        machine,
        args,
        test,
        peer,
        count,
    };
    links.prepare();
    let begin = machine.deadline().wrapping_sub(common.deadline_ns);
    let (mut half, mut flag, mut gave_up) = (0, args.flags_before, 0);
    while half < 2 {
        let first = Awaited {
            flag: flag + 1,
            last: flag + args.repeats,
            end: args.flags_before + 2 * args.repeats,
            gave_up,
            until: begin + (half + 1) * args.wait_ns,
        };
        let is_over = match (me.0 < peer.0) == (half == 0) {
            true => links.send(first),
            false => links.receive(first),
        };
        gave_up = if is_over { 0 } else { GAVE_UP };
        half += 1;
        flag += args.repeats;
    }
}

impl<M: Machine> Links<'_, M> {
    /// The row of a lane, and whether it has one.
    #[inline(always)]
    fn row(&self, lane: u32) -> (u32, bool) {
        let warps = self.machine.warp_position().warps();
        (self.machine.warp() + lane * warps, lane < self.count)
    }

    /// Flag of a row of `source`, which also has its answers.
    #[inline(always)]
    fn flag(&self, source: Rank, row: u32) -> Signal {
        self.args.common.window.dispatch_flag(source, row)
    }

    /// Sends to the peer as often as the launch says, waits for its answers, and keeps the shortest time. The
    /// first time does not count: the peer may have come later, and looks at what it gets. Returns whether
    /// all answers came.
    #[inline(always)]
    fn send(&self, mut awaited: Awaited) -> bool {
        let (mut begun, mut ended) = (0, u64::MAX);
        // What this rank sends is in no way of what its other warps still answer.
        self.meet(awaited, 1);
        let mut outcome = self.exchange(awaited);
        self.meet(awaited, 2);
        while outcome == LinkOutcome::Well && awaited.flag < awaited.last {
            awaited = awaited.next();
            let from = self.machine.now();
            outcome = self.exchange(awaited);
            let to = self.machine.now();
            if outcome == LinkOutcome::Well && to - from < ended - begun {
                (begun, ended) = (from, to);
            }
        }
        self.note(LinkRecord::SENT, outcome as u32);
        self.note_time(LinkRecord::BEGUN, begun);
        self.note_time(LinkRecord::ENDED, ended);
        outcome == LinkOutcome::Well
    }

    /// Sends to the peer, and waits for its answers.
    #[inline(always)]
    fn exchange(&self, awaited: Awaited) -> LinkOutcome {
        self.store_rows();
        if self.test == LinkTest::Rows {
            self.machine.release();
        }
        if self.test != LinkTest::Inline {
            self.set_flags(awaited);
        }
        self.wait_for_flags(awaited)
    }

    /// Lets the warps of this rank that send go on together, for the `time`-th time, so that their rows are
    /// under way at one time.
    #[inline(always)]
    fn meet(&self, awaited: Awaited, time: u64) {
        let machine = self.machine;
        let rows = self.test.rows(&self.args.common.shape);
        let warps = machine.warp_position().warps().min(rows) as u64;
        machine.count(Counter::Arrivals);
        loop {
            let have_come = machine.load_relaxed(Counter::Arrivals) >= time * warps;
            // Lanes looked at different times, but leave together.
            let have_come = machine.ballot(machine.lanes(|_| have_come)) != 0;
            if have_come || machine.timed_out_by(awaited.until) {
                return;
            }
        }
    }

    /// Waits for what the peer sends, and answers. Looks at the first, and notes what came of that: a peer
    /// that gets no answer sends nothing more. Returns whether all came.
    #[inline(always)]
    fn receive(&self, mut awaited: Awaited) -> bool {
        let machine = self.machine;
        let mut outcome = self.wait_for_rows(awaited);
        if outcome == LinkOutcome::Well {
            outcome = self.look();
        }
        let mut latest = outcome;
        while latest == LinkOutcome::Well {
            if self.test == LinkTest::Inline {
                self.re_arm();
            }
            // Before the peer writes the rows again.
            machine.release();
            self.set_flags(awaited);
            if awaited.flag == awaited.last {
                break;
            }
            awaited = awaited.next();
            latest = self.wait_for_rows(awaited);
            // That one is missing may be the fault of an answer.
            if latest == LinkOutcome::Wrong {
                outcome = latest;
            }
        }
        self.note(LinkRecord::RECEIVED, outcome as u32);
        latest == LinkOutcome::Well
    }

    /// Waits for what the peer sends.
    #[inline(always)]
    fn wait_for_rows(&self, awaited: Awaited) -> LinkOutcome {
        match self.test {
            LinkTest::Inline => self.wait_for_words(awaited),
            _ => self.wait_for_flags(awaited),
        }
    }

    /// Sets this rank's flags of this warp's rows in the peer's window.
    #[inline(always)]
    fn set_flags(&self, awaited: Awaited) {
        let me = self.args.common.rank();
        self.machine.lanes(|lane| {
            let (row, has_row) = self.row(lane);
            if has_row {
                let epoch = Epoch(awaited.flag | awaited.gave_up);
                publish(self.machine, self.peer, self.flag(me, row), epoch);
            }
        });
    }

    /// Waits for the peer's flags. The rows that they announce can be read afterwards.
    #[inline(always)]
    fn wait_for_flags(&self, awaited: Awaited) -> LinkOutcome {
        let machine = self.machine;
        loop {
            let seen = machine.lanes(|lane| match self.row(lane) {
                (row, true) => awaited.seen(machine.load_signal(self.flag(self.peer, row))),
                _ => Seen::Awaited,
            });
            let any = |wanted: Seen| {
                machine.ballot(machine.lanes(|lane| machine.own(seen, lane) == wanted)) != 0
            };
            if any(Seen::Wrong) {
                return LinkOutcome::Wrong;
            }
            if any(Seen::NextHalf) {
                return LinkOutcome::Missing;
            }
            if !any(Seen::Earlier) {
                machine.converge();
                return LinkOutcome::Well;
            }
            if machine.timed_out_by(awaited.until) {
                return LinkOutcome::Missing;
            }
        }
    }

    /// Writes a word of the records of this warp's rows.
    #[inline(always)]
    fn note(&self, word: u32, value: u32) {
        let machine = self.machine;
        machine.lanes(|lane| {
            let (row, has_row) = self.row(lane);
            if has_row {
                let index = LinkRecord::index(&self.args.common.shape, self.peer, row, word);
                machine.write(Table::RowMap, index, value);
            }
        });
    }

    /// Writes a time into the two words of the records from `word` on.
    #[inline(always)]
    fn note_time(&self, word: u32, time: u64) {
        self.note(word, time as u32);
        self.note(word + 1, (time >> 32) as u32);
    }
}
