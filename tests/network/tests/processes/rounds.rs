//! The tasks of the processes.

use core::ffi::c_int;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use crate::pe::{Job, Pe, say};

const ROUNDS: u64 = 8;
/// Rounds of a row and its signal.
const SOME_ROUNDS: u64 = 150;
/// Rows from each PE to each other one, and words of a row.
const ROWS: usize = 16;
const WORDS: usize = 37;
/// Longest wait for a flag.
const WAIT_MS: u64 = 10_000;

/// Layout of a PE's memory.
struct Heap {
    pes: usize,
}

impl Heap {
    const fn row(&self, from: usize, row: usize) -> usize {
        (from * ROWS + row) * WORDS
    }

    const fn staging(&self, to: usize, row: usize) -> usize {
        self.row(self.pes + to, row)
    }

    const fn flag(&self, from: usize, row: usize) -> usize {
        2 * self.pes * ROWS * WORDS + from * ROWS + row
    }

    const fn credit(&self, from: usize) -> usize {
        self.flag(self.pes, 0) + from
    }

    /// Words of its own use.
    const fn own(&self, index: usize) -> usize {
        self.credit(self.pes) + index
    }
}

/// A word of a row.
const fn pattern(round: u64, from: usize, to: usize, row: usize, word: usize) -> u64 {
    let place = ((from * 64 + to) * ROWS + row) * WORDS + word;
    (round << 32 | place as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

pub fn run(job: &Job) {
    let heap = Heap { pes: job.pes };
    let Some(pe) = Pe::connect(job, heap.own(64)) else {
        return;
    };
    match job.role.as_str() {
        "rounds" => rounds(&pe, &heap),
        "words" => words(&pe, &heap),
        "until-lost" => until_lost(&pe, &heap),
        "without-quiet" => while send(&pe, &heap, 1) == 0 {},
        "some-rounds" => some_rounds(&pe, &heap),
        "rounds-with-one-that-left" if pe.pe == 1 => {}
        "rounds-with-one-that-left" => {
            // Longer than an end waits for others.
            thread::sleep(Duration::from_millis(2_500));
            let begin = Instant::now();
            some_rounds(&pe, &heap);
            say("told-ms", begin.elapsed().as_millis());
        }
        "end-at-once" => (0..200).for_each(|row| {
            let peer = 1 - pe.pe;
            let row = row % ROWS;
            let code = pe.put(peer, heap.row(pe.pe, row), heap.staging(peer, row), WORDS);
            assert_eq!(code, 0);
        }),
        other => panic!("{other}"),
    }
    pe.finalize();
}

/// Rows as Ferry sends them, compared the moment their flag is seen; then a credit.
fn rounds(pe: &Pe, heap: &Heap) {
    let mut wrong = 0;
    for round in 1..=ROUNDS {
        for to in pe.others() {
            for row in 0..ROWS {
                let from = heap.staging(to, row);
                for word in 0..WORDS {
                    let value = pattern(round, pe.pe, to, row, word);
                    pe.word(from + word).store(value, Ordering::Relaxed);
                }
                assert_eq!(pe.put(to, heap.row(pe.pe, row), from, WORDS), 0);
                assert_eq!(pe.fence(to), 0);
                assert_eq!(pe.signal(to, heap.flag(pe.pe, row), round), 0);
            }
        }
        for from in pe.others() {
            for row in 0..ROWS {
                if pe.wait(heap.flag(from, row), round, WAIT_MS).is_none() {
                    say("timeout", format!("round {round}, row {row} of {from}"));
                    std::process::exit(1);
                }
                for word in 0..WORDS {
                    let value = pe.word(heap.row(from, row) + word).load(Ordering::Relaxed);
                    wrong += u64::from(value != pattern(round, from, pe.pe, row, word));
                }
            }
            assert_eq!(pe.signal(from, heap.credit(pe.pe), round), 0);
        }
        for from in pe.others() {
            pe.wait(heap.credit(from), round, WAIT_MS)
                .expect("a credit");
            assert_eq!(pe.quiet(from), 0);
        }
        assert_eq!(pe.progress(), 0);
    }
    pe.barrier();
    say("wrong", wrong);
}

/// Values, sums, gets and old values.
fn words(pe: &Pe, heap: &Heap) {
    let mut wrong = 0;
    let (counter, value, back, got) = (heap.own(0), heap.own(8), heap.own(16), heap.own(24));
    for round in 1..=ROUNDS {
        for to in pe.others() {
            assert_eq!(pe.put_value(to, value + pe.pe, round), 0);
            assert_eq!(pe.add(to, counter, 1), 0);
            let places = back + 2 * to;
            pe.word(places + 1).store(0, Ordering::Relaxed);
            assert_eq!(
                pe.fetch_add(to, counter + 1 + pe.pe, [round, 2 * round + 1], places),
                0
            );
            // The flag is written behind the value, without a quiet.
            pe.wait(places + 1, 2 * round + 1, WAIT_MS).expect("a flag");
            let old = pe.word(places).load(Ordering::Relaxed);
            wrong += u64::from(old != round * (round - 1) / 2);
            assert_eq!(pe.quiet(to), 0);
            assert_eq!(pe.get(to, got, value + pe.pe, 1), 0);
            assert_eq!(pe.quiet(to), 0);
            wrong += u64::from(pe.word(got).load(Ordering::Relaxed) != round);
        }
    }
    pe.barrier();
    let sum = pe.word(counter).load(Ordering::Relaxed);
    wrong += u64::from(sum != ROUNDS * (pe.pes as u64 - 1));
    say("wrong", wrong);
}

/// A round to all others without a wait for theirs. The first code that is no 0.
fn send(pe: &Pe, heap: &Heap, round: u64) -> c_int {
    let others: Vec<usize> = pe.others().collect();
    let mut codes = others.iter().flat_map(|&to| {
        let row = round as usize % ROWS;
        let put = pe.put(to, heap.row(pe.pe, row), heap.staging(to, row), WORDS);
        let signal = pe.signal(to, heap.flag(pe.pe, row), round);
        [put, pe.fence(to), signal]
    });
    codes.find(|code| *code != 0).unwrap_or(0)
}

/// Sends until it is told of a lost peer, and says how long it took.
fn until_lost(pe: &Pe, heap: &Heap) {
    let mut last = Instant::now();
    for round in 1.. {
        let quiet = |code: c_int, to: usize| if code == 0 { pe.quiet(to) } else { code };
        let sent = send(pe, heap, round);
        if pe.others().fold(sent, quiet) != 0 {
            break;
        }
        last = Instant::now();
    }
    say("told-ms", last.elapsed().as_millis());
}

/// Sends some rounds, and says whether it was told of anything.
fn some_rounds(pe: &Pe, heap: &Heap) {
    let fails = |round| send(pe, heap, round) != 0 || pe.others().any(|to| pe.quiet(to) != 0);
    let told = (1..=SOME_ROUNDS).any(fails);
    say("told", if told { "of a failure" } else { "nothing" });
}
