//! The smallest pieces of the protocol under a model checker: every interleaving, up to a few
//! preemptions, and every value that the memory model lets a load return.
//!
//! Signals are system-scope words and counters device-scope words of a GPU; here both are C11 atomics with
//! the orderings that the kernels require. Payload words are relaxed atomics: without a release and an
//! acquire between them, the reader may see an old value. The mutants weaken one thing each and must be
//! caught.

mod host;
mod inline_flags;
mod run;
mod view;

use std::sync::Arc;

use ferry_layout::{Counter, Epoch, Rank, SENTINEL, Shape, Signal, Window};
use ferry_protocol::wire::credit::{self, Credit};
use ferry_protocol::wire::flagged;
use ferry_protocol::{Counters, Signals, arrivals};
use inline_flags::{LOST, Rows, copy_model, sum_model};
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;
use run::{check, finds};

/// Message of a reader that came before the writer was done.
const NOT_WHOLE: &str = "a row was read before it was whole";
/// Message of a reader that came too late.
const OVERWRITTEN: &str = "a row was overwritten before it was read";

const ROUNDS: u64 = 2;

/// Operation that is weaker than it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weak {
    Nothing,
    /// `release` does nothing after rows were written.
    RowRelease,
    /// `release` does nothing before a rank says that it has read its rows.
    ConsumedRelease,
    /// `load_signal` acquires nothing.
    Acquire,
    /// A rank writes the next round without having heard `has_credit` of this one.
    ReuseGuard,
    /// `add` neither releases nor acquires.
    Add,
    /// A rank returns its credit before its user has read the view.
    EarlyCredit,
    /// A rank fills a view after it has returned the credit.
    LateFill,
}

/// The two signal words of a window that a model uses.
struct Words {
    flag: AtomicU64,
    consumed: AtomicU64,
}

/// Two ranks that are each other's only peer, and the counters of the one GPU of a model.
struct Memory {
    weak: Weak,
    window: Window,
    words: [Words; 2],
    /// The row in each rank's window.
    rows: [AtomicU64; 2],
    /// Rows with inline flags, in the window of rank 1.
    inline: Rows,
    counters: Vec<AtomicU64>,
}

/// A warp of a rank.
struct Warp<'a> {
    memory: &'a Memory,
    rank: usize,
    /// The mutant in which this warp's `release` does nothing.
    weak_release: Weak,
}

impl Memory {
    fn new(weak: Weak) -> Arc<Self> {
        let shape = Shape {
            ranks: 2,
            p2p_world_size: 2,
            experts: 2,
            top_k: 1,
            hidden: 8,
            max_tokens_per_rank: 1,
            combine_mode: 0,
            token_format: 0,
        };
        let words = || Words {
            flag: AtomicU64::new(0),
            consumed: AtomicU64::new(0),
        };
        Arc::new(Self {
            weak,
            window: Window::of(&shape),
            words: [words(), words()],
            rows: [AtomicU64::new(0), AtomicU64::new(0)],
            inline: Rows::new(),
            counters: (0..Counter::COUNT).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    /// The flag of the row that `source` writes.
    fn flag(&self, source: usize) -> Signal {
        self.window.dispatch_flag(Rank(source as u32), 0)
    }

    /// The word in which `peer` says that it has read its row.
    fn consumed(&self, peer: usize) -> Signal {
        self.window.credit(Rank(peer as u32))
    }

    /// A signal word of a rank, which its peer stores.
    fn word(&self, rank: usize, at: Signal) -> &AtomicU64 {
        let peer = 1 - rank;
        if at == self.flag(peer) {
            &self.words[rank].flag
        } else {
            assert_eq!(at, self.consumed(peer), "a word that no model uses");
            &self.words[rank].consumed
        }
    }

    fn warp(&self, rank: usize) -> Warp<'_> {
        Warp {
            memory: self,
            rank,
            weak_release: Weak::RowRelease,
        }
    }

    /// Waits like a dispatch of `epoch` before it writes: for the credit of the round before.
    fn await_credit(&self, warp: &Warp<'_>, peer: usize, epoch: Epoch) {
        if self.weak != Weak::ReuseGuard {
            let before = Epoch(epoch.0 - 1);
            wait(|| credit::has_credit(warp, self.consumed(peer), before));
        }
    }

    /// Tells `to` that `rank` has read the row of `epoch`, as the kernels do.
    fn say_consumed(&self, rank: usize, to: usize, epoch: Epoch) {
        let warp = Warp {
            weak_release: Weak::ConsumedRelease,
            ..self.warp(rank)
        };
        let consumed = Credit::release(&warp, self.consumed(rank), epoch);
        consumed.return_to(&warp, Rank(to as u32));
    }
}

impl Signals for Warp<'_> {
    fn release(&self) {
        if self.memory.weak != self.weak_release {
            fence(Ordering::AcqRel);
        }
    }

    fn signal(&self, to: Rank, at: Signal, value: u64) {
        let word = self.memory.word(to.0 as usize, at);
        word.store(value, Ordering::Relaxed);
    }

    fn load_signal(&self, at: Signal) -> u64 {
        let order = match self.memory.weak {
            Weak::Acquire => Ordering::Relaxed,
            _ => Ordering::Acquire,
        };
        self.memory.word(self.rank, at).load(order)
    }
}

impl Counters for Warp<'_> {
    fn add(&self, counter: Counter, amount: u64) -> u64 {
        let order = match self.memory.weak {
            Weak::Add => Ordering::Relaxed,
            _ => Ordering::AcqRel,
        };
        self.memory.counters[counter as usize].fetch_add(amount, order)
    }

    fn load(&self, counter: Counter) -> u64 {
        self.memory.counters[counter as usize].load(Ordering::Acquire)
    }

    fn load_relaxed(&self, counter: Counter) -> u64 {
        self.memory.counters[counter as usize].load(Ordering::Relaxed)
    }

    fn store(&self, counter: Counter, value: u64) {
        self.memory.counters[counter as usize].store(value, Ordering::Release);
    }

    fn raise(&self, counter: Counter, value: u64) -> bool {
        self.memory.counters[counter as usize].fetch_max(value, Ordering::Relaxed) < value
    }
}

fn wait(mut ready: impl FnMut() -> bool) {
    while !ready() {
        thread::yield_now();
    }
}

/// Reads a payload word that must hold `wanted`; later rounds write larger values.
fn read(row: &AtomicU64, wanted: u64) {
    let found = row.load(Ordering::Relaxed);
    assert!(found >= wanted, "{NOT_WHOLE}");
    assert!(found <= wanted, "{OVERWRITTEN}");
}

/// Rank 0 sends a row a round into the same slot of rank 1.
fn sender(memory: &Arc<Memory>) -> thread::JoinHandle<()> {
    let memory = memory.clone();
    thread::spawn(move || {
        let warp = memory.warp(0);
        for epoch in (1..=ROUNDS).map(Epoch) {
            memory.await_credit(&warp, 1, epoch);
            memory.rows[1].store(epoch.0, Ordering::Relaxed);
            warp.release();
            flagged::publish(&warp, Rank(1), memory.flag(0), epoch);
        }
    })
}

/// Rank 1 says that it has read each row of its sender's.
fn slot_model(weak: Weak) {
    let memory = Memory::new(weak);
    let sender = sender(&memory);
    let warp = memory.warp(1);
    for epoch in (1..=ROUNDS).map(Epoch) {
        wait(|| flagged::is_full(&warp, memory.flag(0), epoch));
        read(&memory.rows[1], epoch.0);
        memory.say_consumed(1, 0, epoch);
    }
    sender.join().unwrap();
}

/// A word with inline flags: one warp of rank 0 looks for the credit, and another one of its block writes.
/// They meet at the block's barrier, modelled as a counter.
fn block_model(weak: Weak) {
    let memory = Memory::new(weak);
    let sentinel = u64::from(SENTINEL);
    let last = Epoch(2);
    // The row of the round before.
    memory.rows[1].store(1, Ordering::Relaxed);
    let looker = thread::spawn({
        let memory = memory.clone();
        move || {
            memory.await_credit(&memory.warp(0), 1, last);
            memory.warp(0).add(Counter::Arrivals, 1);
        }
    });
    let writer = thread::spawn({
        let memory = memory.clone();
        move || {
            wait(|| memory.warp(0).load(Counter::Arrivals) == 1);
            memory.rows[1].store(last.0, Ordering::Relaxed);
        }
    });
    read(&memory.rows[1], 1);
    memory.rows[1].store(sentinel, Ordering::Relaxed);
    memory.say_consumed(1, 0, Epoch(1));
    looker.join().unwrap();
    writer.join().unwrap();
    assert!(memory.rows[1].load(Ordering::Relaxed) != sentinel, "{LOST}");
}

/// Rank 1 has two warps that re-arm a word each. Both count, one of them looks at the counter without
/// acquiring anything and tells rank 0, which writes both words again.
fn tell_model(weak: Weak) {
    let memory = Memory::new(weak);
    let sentinel = u64::from(SENTINEL);
    let other = thread::spawn({
        let memory = memory.clone();
        move || {
            memory.rows[1].store(sentinel, Ordering::Relaxed);
            memory.warp(1).count(Counter::Reads);
        }
    });
    let writer = thread::spawn({
        let memory = memory.clone();
        move || {
            let warp = memory.warp(0);
            memory.await_credit(&warp, 1, Epoch(2));
            let rows = memory.rows.iter();
            rows.for_each(|row| row.store(2, Ordering::Relaxed));
        }
    });
    let warp = memory.warp(1);
    memory.rows[0].store(sentinel, Ordering::Relaxed);
    warp.count(Counter::Reads);
    wait(|| warp.load_relaxed(Counter::Reads) == 2);
    memory.say_consumed(1, 0, Epoch(1));
    other.join().unwrap();
    writer.join().unwrap();
    for row in &memory.rows {
        assert!(row.load(Ordering::Relaxed) != sentinel, "{LOST}");
    }
}

/// Both ranks send each other a row a round, and neither runs a round ahead.
fn handshake_model(weak: Weak) {
    let memory = Memory::new(weak);
    let run = |rank: usize| {
        let memory = memory.clone();
        move || {
            let (warp, peer) = (memory.warp(rank), 1 - rank);
            let to = Rank(peer as u32);
            for epoch in (1..=ROUNDS).map(Epoch) {
                memory.await_credit(&warp, peer, epoch);
                memory.rows[peer].store(epoch.0, Ordering::Relaxed);
                warp.release();
                flagged::publish(&warp, to, memory.flag(rank), epoch);
                wait(|| flagged::is_full(&warp, memory.flag(peer), epoch));
                read(&memory.rows[rank], epoch.0);
                memory.say_consumed(rank, peer, epoch);
            }
        }
    };
    let other = thread::spawn(run(0));
    run(1)();
    other.join().unwrap();
}

/// Two warps do a part each and a third waits for both; then the next launch follows.
fn gather_model(weak: Weak) {
    let memory = Memory::new(weak);
    for epoch in (1..=ROUNDS).map(Epoch) {
        let workers = [0, 1].map(|part| {
            let memory = memory.clone();
            thread::spawn(move || {
                memory.rows[part].store(epoch.0, Ordering::Relaxed);
                arrivals::part_done(&memory.warp(0), Counter::ScansDone, epoch, 2);
            })
        });
        let warp = memory.warp(0);
        wait(|| arrivals::is_done(&warp, Counter::ScansDone, epoch, 2));
        memory.rows.iter().for_each(|row| read(row, epoch.0));
        for worker in workers {
            worker.join().unwrap();
        }
    }
}

/// Two warps pass a point of a launch, twice. The last one, and no other, ends it, after it has seen the
/// writes of both.
fn pass_model(weak: Weak) {
    let memory = Memory::new(weak);
    let run = |part: usize| {
        let memory = memory.clone();
        move || {
            let warp = memory.warp(0);
            for epoch in (1..=ROUNDS).map(Epoch) {
                wait(|| warp.load(Counter::Finished) + 1 == epoch.0);
                memory.rows[part].store(epoch.0, Ordering::Relaxed);
                let mut is_last = false;
                arrivals::pass(&warp, Counter::Arrivals, 2, || {
                    memory.rows.iter().for_each(|row| read(row, epoch.0));
                    assert_eq!(warp.load(Counter::Finished), epoch.0 - 1);
                    is_last = true;
                });
                // The next launch of a stream starts after this one has ended and reset the counter.
                if is_last {
                    warp.store(Counter::Finished, epoch.0);
                }
                wait(|| warp.load(Counter::Finished) >= epoch.0);
            }
        }
    };
    let other = thread::spawn(run(0));
    run(1)();
    other.join().unwrap();
    assert_eq!(memory.warp(0).load(Counter::Finished), ROUNDS);
}

/// Two warps of a block write a row each and arrive on a block arrival counter; the last one releases both
/// rows at once and flags them (`Machine::hand_to_last`). A counter of the workspace models that of the
/// block: there is one round, so it needs no reset.
fn hand_over_model(weak: Weak) {
    let memory = Memory::new(weak);
    let epoch = Epoch(1);
    let run = |part: usize| {
        let memory = memory.clone();
        move || {
            let warp = memory.warp(0);
            memory.rows[part].store(epoch.0, Ordering::Relaxed);
            if warp.add(Counter::Arrivals, 1) + 1 == 2 {
                warp.release();
                flagged::publish(&warp, Rank(1), memory.flag(0), epoch);
            }
        }
    };
    let warps = [0, 1].map(|part| thread::spawn(run(part)));
    let reader = memory.warp(1);
    wait(|| flagged::is_full(&reader, memory.flag(0), epoch));
    memory.rows.iter().for_each(|row| read(row, epoch.0));
    for warp in warps {
        warp.join().unwrap();
    }
}

#[test]
fn a_slot_is_read_whole_and_reused_only_when_read() {
    check(slot_model, Weak::Nothing);
}

#[test]
fn an_inline_flag_row_needs_no_release_and_is_rearmed_before_it_is_written_again() {
    check(copy_model, Weak::Nothing);
}

#[test]
fn inline_flag_rows_are_summed_whole_and_rearmed_before_they_are_written_again() {
    check(sum_model, Weak::Nothing);
}

#[test]
fn one_warp_acquires_a_credit_for_its_block() {
    check(block_model, Weak::Nothing);
}

#[test]
fn one_release_tells_what_all_warps_have_read() {
    check(tell_model, Weak::Nothing);
}

#[test]
fn no_rank_runs_a_round_ahead() {
    check(handshake_model, Weak::Nothing);
}

#[test]
fn gathered_work_is_seen_by_those_who_wait() {
    check(gather_model, Weak::Nothing);
}

#[test]
fn the_last_one_to_pass_sees_everything() {
    check(pass_model, Weak::Nothing);
}

#[test]
fn one_release_is_enough_for_those_who_handed_over() {
    check(hand_over_model, Weak::Nothing);
}

#[test]
fn a_missing_release_of_rows_is_found() {
    finds(hand_over_model, Weak::RowRelease, NOT_WHOLE);
    finds(slot_model, Weak::RowRelease, NOT_WHOLE);
    finds(handshake_model, Weak::RowRelease, NOT_WHOLE);
}

#[test]
fn a_missing_release_of_what_was_read_is_found() {
    // The other models only read the rows that they report as read, and loom delays no load.
    finds(copy_model, Weak::ConsumedRelease, LOST);
    finds(sum_model, Weak::ConsumedRelease, LOST);
    finds(block_model, Weak::ConsumedRelease, LOST);
    finds(tell_model, Weak::ConsumedRelease, LOST);
}

#[test]
fn a_missing_acquire_is_found() {
    finds(hand_over_model, Weak::Acquire, NOT_WHOLE);
    finds(slot_model, Weak::Acquire, NOT_WHOLE);
    finds(handshake_model, Weak::Acquire, NOT_WHOLE);
    finds(copy_model, Weak::Acquire, LOST);
    finds(sum_model, Weak::Acquire, LOST);
    finds(block_model, Weak::Acquire, LOST);
    finds(tell_model, Weak::Acquire, LOST);
}

#[test]
fn a_missing_reuse_guard_is_found() {
    finds(slot_model, Weak::ReuseGuard, OVERWRITTEN);
    finds(handshake_model, Weak::ReuseGuard, OVERWRITTEN);
    finds(copy_model, Weak::ReuseGuard, OVERWRITTEN);
    finds(sum_model, Weak::ReuseGuard, OVERWRITTEN);
    finds(block_model, Weak::ReuseGuard, LOST);
    finds(tell_model, Weak::ReuseGuard, LOST);
}

#[test]
fn a_relaxed_add_is_found() {
    finds(hand_over_model, Weak::Add, NOT_WHOLE);
    finds(gather_model, Weak::Add, NOT_WHOLE);
    finds(pass_model, Weak::Add, NOT_WHOLE);
    finds(block_model, Weak::Add, LOST);
    finds(tell_model, Weak::Add, LOST);
}
