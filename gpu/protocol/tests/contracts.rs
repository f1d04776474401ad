//! Debug builds refuse calls that break a contract.
#![cfg(debug_assertions)]

use std::cell::Cell;

use ferry_layout::{Counter, Epoch};
use ferry_protocol::{ByteRange, Counters, arrivals};

/// One counter for all names.
struct One(Cell<u64>);

impl Counters for One {
    fn add(&self, _: Counter, amount: u64) -> u64 {
        self.0.replace(self.0.get() + amount)
    }

    fn load(&self, _: Counter) -> u64 {
        self.0.get()
    }

    fn store(&self, _: Counter, value: u64) {
        self.0.set(value);
    }

    fn raise(&self, _: Counter, value: u64) -> bool {
        self.0.replace(self.0.get().max(value)) < value
    }
}

fn part_done(before: u64, epoch: u64, parts: u32) -> bool {
    let counter = One(Cell::new(before));
    arrivals::part_done(&counter, Counter::ScansDone, Epoch(epoch), parts)
}

#[test]
fn the_last_part_of_each_round_is_told() {
    let counter = One(Cell::new(0));
    for round in 1..=3 {
        let is_last =
            [(); 3].map(|()| arrivals::part_done(&counter, Counter::ScansDone, Epoch(round), 3));
        assert_eq!(is_last, [false, false, true], "round {round}");
    }
}

#[test]
#[should_panic(expected = "ScansDone: 3 parts before one of Epoch(1), which has 3")]
fn a_round_has_no_more_parts_than_it_says() {
    part_done(3, 1, 3);
}

#[test]
#[should_panic(expected = "ScansDone: 2 parts before one of Epoch(2), which has 3")]
fn a_round_begins_when_all_parts_of_the_last_one_are_done() {
    part_done(2, 2, 3);
}

#[test]
#[should_panic(expected = "Arrivals: 2 before one of 2")]
fn a_point_is_passed_by_no_more_than_its_parties() {
    arrivals::pass(&One(Cell::new(2)), Counter::Arrivals, 2, || {});
}

#[test]
#[should_panic(expected = "part 2 of 2")]
fn a_row_has_no_more_parts_than_it_says() {
    ByteRange::part(1024, 2, 2);
}
