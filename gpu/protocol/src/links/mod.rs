//! A check of the links between ranks: each rank sends to each other one as dispatch does, and looks at what
//! comes. No part of a round: it has a communicator of its own, with which nothing else is done.
//!
//! ```text
//! sender:    write the rows ; release ; flag := n       inline rows: no release, no flag
//! receiver:  flag >= n ; look at the rows ; release ; its own flag := n        (the answer)
//! sender:    that flag >= n : the time from the first store to here is the link's
//! ```
//!
//! Ranks meet in pairs ([`circle`]), and one of a pair sends at a time, so that a link has the way to itself
//! and its time is no other link's. That is a slot. A slot ends when both are done, and at the latest at a
//! time that follows from the launch's begin: so a rank that waits for a bad peer in vain is late for the
//! next one, but not too late. What does not come is noted by the rank to which it was sent, which depends on
//! no other link. The answer may also be missing because its question was: the host knows both.
//!
//! A word has the flags of both halves in turn, each one more than the last. A peer that has given up the
//! first half may be in the second one already.

mod circle;
mod rows;

use ferry_layout::{
    Counter, Epoch, Kernel, LinkOutcome, LinkRecord, LinkTest, LinksArgs, Rank, Signal, Table,
};

use crate::machine::{LANES, Machine};
use crate::sync::launch::Launch;
use crate::wire::flagged::publish;

/// A warp's share of a launch: the rows `warp`, `warp + warps`, and so on, one a lane.
struct Links<'a, M> {
    machine: &'a M,
    args: &'a LinksArgs,
    test: LinkTest,
    /// Rows of this warp.
    count: u32,
}

/// Flags that a warp awaits from a peer.
#[derive(Clone, Copy)]
struct Awaited {
    peer: Rank,
    /// Value of the flags.
    flag: u64,
    /// Value of the last ones of this half of the round.
    last: u64,
    /// Time at which the wait ends.
    until: u64,
}

/// A flag, beside the awaited one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Seen {
    Earlier,
    Awaited,
    /// The peer has given up this half.
    NextHalf,
    /// Nobody sends this one.
    Wrong,
}

impl Awaited {
    /// The next flags of the same wait.
    #[inline(always)]
    fn next(self) -> Self {
        Self {
            flag: self.flag + 1,
            ..self
        }
    }
}

/// Exchanges with each of the peers, and notes what came of it for the host. The warps of a rank divide the
/// rows among them, at most 32 each. Collective, of a communicator without rounds; waits for each peer for as
/// long as the arguments say. [`Counter::Arrivals`] is 0 as it begins.
#[inline(always)]
pub fn links<M: Machine>(machine: &M, args: &LinksArgs) {
    let launch = Launch::begin(machine, &args.common, Kernel::Links, false);
    let (common, me) = (launch.common, launch.common.rank());
    let test = LinkTest::of_number(args.test);
    let left = test.rows(&common.shape).saturating_sub(machine.warp());
    let count = left.div_ceil(machine.warp_position().warps()).min(LANES);
    if count == 0 {
        return;
    }
    let links = Links {
        machine,
        args,
        test,
        count,
    };
    links.prepare();
    let begin = machine.deadline().wrapping_sub(common.deadline_ns);
    let (mut slot, mut sends) = (0, 0);
    while slot < 2 * circle::rounds(common.shape.ranks) {
        let half = slot & 1;
        slot += 1;
        let peer = circle::partner(common.shape.ranks, (slot - 1) / 2, me);
        let Some(peer) = peer.filter(|peer| args.peers >> peer.0 & 1 != 0) else {
            continue;
        };
        let flag = args.flags_before + half as u64 * args.repeats;
        let awaited = Awaited {
            peer,
            flag,
            last: flag + args.repeats,
            until: begin + args.grace_ns + slot as u64 * args.slot_ns,
        };
        match (me.0 < peer.0) == (half == 0) {
            true => {
                sends += 1;
                links.send(awaited, sends);
            }
            false => links.receive(awaited),
        }
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

    /// Sends to a peer as often as the launch says, waits for its answers, and keeps the shortest time. The
    /// first time does not count: the peer may have come later, and looks at what it gets.
    #[inline(always)]
    fn send(&self, first: Awaited, sends: u64) {
        let (mut begun, mut ended) = (0, u64::MAX);
        let mut awaited = first.next();
        let mut outcome = self.exchange(awaited);
        self.meet(sends, awaited);
        while outcome == LinkOutcome::Well && awaited.flag < awaited.last {
            awaited = awaited.next();
            let from = self.machine.now();
            outcome = self.exchange(awaited);
            let to = self.machine.now();
            if outcome == LinkOutcome::Well && to - from < ended - begun {
                (begun, ended) = (from, to);
            }
        }
        self.note(first.peer, LinkRecord::SENT, outcome as u32);
        self.note_time(first.peer, LinkRecord::BEGUN, begun);
        self.note_time(first.peer, LinkRecord::ENDED, ended);
    }

    /// Sends to a peer, and waits for its answers.
    #[inline(always)]
    fn exchange(&self, awaited: Awaited) -> LinkOutcome {
        self.store_rows(awaited.peer);
        if self.test == LinkTest::Rows {
            self.machine.release();
        }
        if self.test != LinkTest::Inline {
            self.set_flags(awaited);
        }
        self.wait_for_flags(awaited)
    }

    /// Lets the warps of this rank that send go on together, for the `sends`-th time in the launch, so that
    /// their rows are under way at one time.
    #[inline(always)]
    fn meet(&self, sends: u64, awaited: Awaited) {
        let machine = self.machine;
        let rows = self.test.rows(&self.args.common.shape);
        let warps = machine.warp_position().warps().min(rows) as u64;
        machine.count(Counter::Arrivals);
        loop {
            let have_come = machine.load_relaxed(Counter::Arrivals) >= sends * warps;
            // Lanes looked at different times, but leave together.
            let have_come = machine.ballot(machine.lanes(|_| have_come)) != 0;
            if have_come || machine.timed_out_by(awaited.until) {
                return;
            }
        }
    }

    /// Waits for what a peer sends, and answers. Looks at the first, and notes what came of that: a peer that
    /// gets no answer sends nothing more.
    #[inline(always)]
    fn receive(&self, first: Awaited) {
        let machine = self.machine;
        let mut awaited = first.next();
        let mut outcome = self.wait_for_rows(awaited);
        if outcome == LinkOutcome::Well {
            outcome = self.look(first.peer);
        }
        let mut is_well = outcome == LinkOutcome::Well;
        while is_well {
            if self.test == LinkTest::Inline {
                self.re_arm(first.peer);
            }
            // Before the peer writes the rows again.
            machine.release();
            self.set_flags(awaited);
            if awaited.flag == awaited.last {
                break;
            }
            awaited = awaited.next();
            is_well = self.wait_for_rows(awaited) == LinkOutcome::Well;
        }
        self.note(first.peer, LinkRecord::RECEIVED, outcome as u32);
    }

    /// Waits for what a peer sends.
    #[inline(always)]
    fn wait_for_rows(&self, awaited: Awaited) -> LinkOutcome {
        match self.test {
            LinkTest::Inline => self.wait_for_words(awaited),
            _ => self.wait_for_flags(awaited),
        }
    }

    /// Sets this rank's flags of this warp's rows in a peer's window.
    #[inline(always)]
    fn set_flags(&self, awaited: Awaited) {
        let me = self.args.common.rank();
        self.machine.lanes(|lane| {
            let (row, has_row) = self.row(lane);
            if has_row {
                let epoch = Epoch(awaited.flag);
                publish(self.machine, awaited.peer, self.flag(me, row), epoch);
            }
        });
    }

    /// Waits for a peer's flags. The rows that they announce can be read afterwards.
    #[inline(always)]
    fn wait_for_flags(&self, awaited: Awaited) -> LinkOutcome {
        let machine = self.machine;
        loop {
            let seen = machine.lanes(|lane| match self.row(lane) {
                (row, true) => {
                    self.seen(awaited, machine.load_signal(self.flag(awaited.peer, row)))
                }
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

    /// Compares a flag with the awaited one.
    #[inline(always)]
    fn seen(&self, awaited: Awaited, flag: u64) -> Seen {
        let end = self.args.flags_before + 2 * self.args.repeats;
        if flag < awaited.flag {
            Seen::Earlier
        } else if flag == awaited.flag || (flag == awaited.last + 1 && awaited.flag == awaited.last)
        {
            // A peer that has answered the last one may have sent the first one of the other half.
            Seen::Awaited
        } else if flag > awaited.last && flag <= end {
            Seen::NextHalf
        } else {
            Seen::Wrong
        }
    }

    /// Writes a word of the records of this warp's rows with a peer.
    #[inline(always)]
    fn note(&self, peer: Rank, word: u32, value: u32) {
        let machine = self.machine;
        machine.lanes(|lane| {
            let (row, has_row) = self.row(lane);
            if has_row {
                let index = LinkRecord::index(&self.args.common.shape, peer, row, word);
                machine.write(Table::RowMap, index, value);
            }
        });
    }

    /// Writes a time into the two words of the records from `word` on.
    #[inline(always)]
    fn note_time(&self, peer: Rank, word: u32, time: u64) {
        self.note(peer, word, time as u32);
        self.note(peer, word + 1, (time >> 32) as u32);
    }
}
