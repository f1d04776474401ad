//! A view: rows of the window that the user's kernels read between dispatch and combine.

use ferry_layout::{Epoch, SENTINEL};
use ferry_protocol::wire::flagged;
use loom::sync::atomic::Ordering;
use loom::thread;

use super::inline_flags::LOST;
use super::run::{check, finds};
use super::{Memory, NOT_WHOLE, OVERWRITTEN, ROUNDS, Weak, read, sender, wait};

/// Rank 0 sends a row a round. Rank 1's dispatch sees it arrive and writes nothing. After it in the stream a
/// kernel of the user's reads the row, without a fence; then combine fills it, as with debug checks, and
/// returns the credit.
fn view_model(weak: Weak) {
    let memory = Memory::new(weak);
    let sender = sender(&memory);
    let warp = memory.warp(1);
    for epoch in (1..=ROUNDS).map(Epoch) {
        wait(|| flagged::is_full(&warp, memory.flag(0), epoch));
        if weak == Weak::EarlyCredit {
            memory.say_consumed(1, 0, epoch);
        }
        read(&memory.rows[1], epoch.0);
        if weak != Weak::EarlyCredit {
            memory.rows[1].store(0, Ordering::Relaxed);
            memory.say_consumed(1, 0, epoch);
        }
    }
    sender.join().unwrap();
}

/// Rank 1 fills the view of the round before while rank 0 sends the next row.
fn refill_model(weak: Weak) {
    let memory = Memory::new(weak);
    memory.rows[1].store(1, Ordering::Relaxed);
    let sender = thread::spawn({
        let memory = memory.clone();
        move || {
            memory.await_credit(&memory.warp(0), 1, Epoch(2));
            memory.rows[1].store(2, Ordering::Relaxed);
        }
    });
    let fill = || memory.rows[1].store(SENTINEL.into(), Ordering::Relaxed);
    if weak != Weak::LateFill {
        fill();
    }
    memory.say_consumed(1, 0, Epoch(1));
    if weak == Weak::LateFill {
        fill();
    }
    sender.join().unwrap();
    assert!(memory.rows[1].load(Ordering::Relaxed) == 2, "{LOST}");
}

#[test]
fn a_view_is_whole_when_dispatch_has_ended_and_stays_until_combine() {
    check(view_model, Weak::Nothing);
    check(refill_model, Weak::Nothing);
}

#[test]
fn a_credit_that_comes_before_a_view_was_read_is_found() {
    finds(view_model, Weak::EarlyCredit, OVERWRITTEN);
}

#[test]
fn a_view_that_is_filled_after_its_credit_is_found() {
    finds(refill_model, Weak::LateFill, LOST);
}

#[test]
fn a_view_whose_rows_dispatch_has_not_acquired_is_found() {
    finds(view_model, Weak::Acquire, NOT_WHOLE);
    finds(view_model, Weak::RowRelease, NOT_WHOLE);
}
