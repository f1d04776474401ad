//! Tests of what may take effect when, in every order.

use super::*;
use crate::frame::{Atomic, AtomicRequest};

fn put(to: u64, bytes: usize) -> Request {
    Request::Put {
        to,
        bytes: vec![to as u8; bytes],
    }
}

fn atomic(at: u64, operation: Atomic) -> Request {
    Request::Atomic(AtomicRequest {
        at,
        size: 8,
        operation,
        value: 1,
        comparand: 0,
        fetch: None,
    })
}

fn signal(at: u64) -> Request {
    atomic(at, Atomic::Signal)
}

/// Lets all take effect. Returns the numbers of the requests in the order in
/// which they took effect as a whole.
fn play(settings: &Settings, requests: &[Request]) -> Vec<u64> {
    let begin = Instant::now();
    let mut clock = Clock::new(settings.clone(), 0, begin);
    let mut schedule = Schedule::new(settings.order);
    for request in requests {
        schedule.push(request.clone(), begin, &mut clock);
    }
    let mut numbers = Vec::new();
    let mut now = begin;
    while !schedule.is_empty() {
        let Batch { puts, others, .. } = schedule.take(now, &mut clock);
        if puts.is_empty() && others.is_empty() {
            let dues = schedule.waiting.iter().map(|one| one.due);
            match dues.filter(|due| *due > now).min() {
                Some(next) => now = next,
                // A fence behind all was the last.
                None => assert!(schedule.is_empty(), "{:?}", schedule.waiting),
            }
            continue;
        }
        let order: Vec<Waiting> = match settings.order {
            Order::Broken => others.into_iter().chain(puts).collect(),
            _ => puts.into_iter().chain(others).collect(),
        };
        let finished = order.iter().filter(|one| schedule.finish(one));
        numbers.extend(finished.map(|one| one.number));
    }
    assert_eq!(schedule.bytes, 0);
    assert!(schedule.pieces.is_empty());
    numbers
}

/// Rows as put-with-signal sends them: put, fence, signal.
fn rows(count: u64) -> Vec<Request> {
    rows_with(count, signal)
}

/// Rows with flags that follow them.
fn rows_with(count: u64, flag: impl Fn(u64) -> Request) -> Vec<Request> {
    let row = |row: u64| {
        [
            put(0x1000 + 0x100 * row, 128),
            Request::Fence,
            flag(8 * row),
        ]
    };
    (0..count).flat_map(row).collect()
}

fn with_delays(order: Order, seed: u64) -> Settings {
    Settings {
        seed,
        delay_us: 50,
        signal_delay_us: 50,
        pieces: 64,
        ..Settings::new(order)
    }
}

/// Whether each signal comes after its put, and the number of neighbours in another order than sent.
fn judge(numbers: &[u64]) -> (bool, usize) {
    let place = |number: u64| numbers.iter().position(|one| *one == number).unwrap();
    let rows = numbers.iter().filter(|number| *number % 3 == 0);
    let well = rows.clone().all(|row| place(*row) < place(row + 2));
    (
        well,
        numbers.windows(2).filter(|pair| pair[0] > pair[1]).count(),
    )
}

#[test]
fn every_order_but_the_broken_one_has_data_before_its_signal() {
    for seed in 0..20 {
        let of = |order| judge(&play(&with_delays(order, seed), &rows(30)));
        assert_eq!(of(Order::Fifo), (true, 0));
        // Each put has a fence behind it, so only signals and later puts swap.
        let (well, swaps) = of(Order::Fence);
        assert!(well && swaps > 3, "{swaps}");
        let (well, swaps) = of(Order::Relaxed);
        assert!(well && swaps > 15, "{swaps}");
        assert!(!of(Order::Broken).0);
    }
}

#[test]
fn a_word_behind_a_fence_comes_after_its_row_in_every_order_but_the_broken_one() {
    let flagged = rows_with(30, |at| put(at, 8));
    let mut swaps = [0, 0];
    for seed in 0..20 {
        let of = |order| judge(&play(&with_delays(order, seed), &flagged));
        assert_eq!(of(Order::Fifo), (true, 0));
        let [fence, relaxed] = [Order::Fence, Order::Relaxed].map(of);
        assert!(fence.0 && relaxed.0, "seed {seed}");
        swaps = [swaps[0] + fence.1, swaps[1] + relaxed.1];
        assert!(!of(Order::Broken).0, "seed {seed}");
    }
    // A row passes fences only in the second one.
    assert!(swaps[0] > 40 && swaps[1] > swaps[0], "{swaps:?}");
}

#[test]
fn only_the_broken_order_tears_words() {
    let begin = Instant::now();
    for order in [Order::Fifo, Order::Fence, Order::Relaxed, Order::Broken] {
        let mut clock = Clock::new(with_delays(order, 1), 0, begin);
        let mut schedule = Schedule::new(order);
        let pieces = schedule.push(put(0x1000, 8), begin, &mut clock);
        assert_eq!(pieces, if order == Order::Broken { 4 } else { 0 });
    }
}

#[test]
fn nothing_crosses_a_fence_in_that_order() {
    for seed in 0..50 {
        let mut requests = Vec::new();
        for epoch in 0..8 {
            let base = 0x1000 * (epoch + 1);
            requests.extend((0..5).map(|i| put(base + 0x100 * i, 100)));
            requests.extend((0..3).map(|i| signal(base + 8 * i)));
            requests.push(Request::Get {
                from: base,
                bytes: 8,
                id: 1,
            });
            requests.push(Request::Fence);
        }
        let numbers = play(&with_delays(Order::Fence, seed), &requests);
        assert_eq!(numbers.len(), 8 * 9);
        let epochs: Vec<u64> = numbers.iter().map(|number| number / 10).collect();
        assert!(epochs.is_sorted(), "seed {seed}: {epochs:?}");
        assert!(!numbers.is_sorted(), "seed {seed}");
    }
}

#[test]
fn operations_on_one_word_keep_their_order_except_signals() {
    let word = |value| Request::Word {
        to: 8,
        size: 8,
        value,
    };
    for order in [Order::Fence, Order::Relaxed, Order::Broken] {
        let (mut words_swap, mut adds_swap, mut signals_swap) = (false, false, false);
        for seed in 0..30 {
            let is_sorted =
                |requests: Vec<Request>| play(&with_delays(order, seed), &requests).is_sorted();
            words_swap |= !is_sorted((0..6).map(word).collect());
            adds_swap |= !is_sorted(vec![atomic(8, Atomic::Add); 6]);
            signals_swap |= !is_sorted(vec![signal(8); 6]);
        }
        assert!(!words_swap && !adds_swap, "{order:?}");
        assert_eq!(signals_swap, order != Order::Fence, "{order:?}");
    }
}

#[test]
fn pieces_are_words_that_come_apart_and_no_word_is_cut() {
    let settings = Settings {
        delay_us: 40,
        pieces: 256,
        ..Settings::new(Order::Relaxed)
    };
    let begin = Instant::now();
    let (mut apart, mut lengths) = (0, HashSet::new());
    for (seed, shift) in (0..64).map(|seed| (seed, seed % 16)) {
        let mut clock = Clock::new(
            Settings {
                seed,
                ..settings.clone()
            },
            0,
            begin,
        );
        let mut schedule = Schedule::new(Order::Relaxed);
        let pieces = schedule.push(put(0x1000 + shift, 1000), begin, &mut clock);
        assert_eq!(pieces as usize, schedule.waiting.len());
        let mut next = 0x1000 + shift;
        let mut first: Option<Instant> = None;
        for waiting in &schedule.waiting {
            let Request::Put { to, bytes } = &waiting.request else {
                panic!("{:?}", waiting.request);
            };
            assert_eq!(*to, next);
            next += bytes.len() as u64;
            assert!(next % 8 == 0 || next == 0x1000 + shift + 1000, "{next:#x}");
            lengths.insert(bytes.len());
            // The first two words of the put.
            if *to == 0x1008 {
                apart += usize::from(first.is_some_and(|due| due != waiting.due));
            }
            first.get_or_insert(waiting.due);
        }
        assert_eq!(next, 0x1000 + shift + 1000);
    }
    assert!(apart > 4, "{apart}");
    assert!(lengths.contains(&8) && lengths.contains(&16) && lengths.contains(&24));
    assert!(lengths.iter().all(|bytes| *bytes <= 256));
}

#[test]
fn pieces_of_eight_bytes_are_all_of_them() {
    let settings = Settings {
        pieces: 8,
        ..Settings::new(Order::Fence)
    };
    let begin = Instant::now();
    let mut clock = Clock::new(settings, 0, begin);
    let mut schedule = Schedule::new(Order::Fence);
    assert_eq!(schedule.push(put(0x1000, 80), begin, &mut clock), 10);
    assert_eq!(schedule.push(put(0x1000, 8), begin, &mut clock), 0);
}

#[test]
fn a_link_takes_its_time() {
    let settings = Settings {
        gbit: 8,
        latency_us: 100,
        ..Settings::new(Order::Fifo)
    };
    let begin = Instant::now();
    let mut clock = Clock::new(settings, 0, begin);
    let mut schedule = Schedule::new(Order::Fifo);
    // A byte a nanosecond.
    for row in 0..3 {
        schedule.push(put(0x1000 * row, 1_000 - HEADER), begin, &mut clock);
    }
    let dues: Vec<u128> = (schedule.waiting.iter())
        .map(|one| (one.due - begin).as_nanos())
        .collect();
    assert_eq!(dues, [101_000, 102_000, 103_000]);
}

#[test]
fn what_waits_is_bounded_by_bytes_of_gets_too() {
    let begin = Instant::now();
    let mut clock = Clock::new(Settings::new(Order::Fifo), 0, begin);
    let mut schedule = Schedule::new(Order::Fifo);
    let get = Request::Get {
        from: 0,
        bytes: crate::frame::MOST_BYTES,
        id: 0,
    };
    let mut count = 0;
    while !schedule.is_full() {
        schedule.push(get.clone(), begin, &mut clock);
        count += 1;
    }
    assert_eq!(count, 64);
    let mut schedule = Schedule::new(Order::Fifo);
    for _ in 0..MOST_WAITING {
        assert!(!schedule.is_full());
        schedule.push(signal(0), begin, &mut clock);
    }
    assert!(schedule.is_full());
}

#[test]
fn addresses_at_the_end_of_all_are_cut_without_an_overflow() {
    let begin = Instant::now();
    let mut clock = Clock::new(with_delays(Order::Relaxed, 1), 0, begin);
    let mut schedule = Schedule::new(Order::Relaxed);
    assert!(schedule.push(put(u64::MAX - 20, 100), begin, &mut clock) > 1);
}
