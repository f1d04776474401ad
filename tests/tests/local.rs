//! Where every rank has all tokens, dispatch and combine on simulated ranks give what the oracle gives of each
//! rank's share, bit for bit, whatever the order of events.

use std::ops::Range;
use std::time::Duration;

use ferry::Group;
use ferry::simulator::Options;
use ferry_tests::local::LocalCase;
use ferry_tests::simulated::Dice;

/// Runs one case for each seed.
fn all(seeds: Range<u64>, case: impl Fn(u64) -> LocalCase) {
    for seed in seeds {
        let (case, mut dice) = (case(seed), Dice::new(!seed));
        let group = Group::simulated_with(Options {
            warps: 1 + dice.below(8) as u32,
            stall_one_in: dice.pick(&[0, 8, 64]),
            patience: Some(Duration::ZERO),
            ..Options::new(case.ranks as u32, seed)
        });
        let result = case.run(&group.unwrap(), Duration::from_secs(3600));
        result.unwrap_or_else(|error| panic!("{error:#}"));
    }
}

#[test]
fn any_case_1() {
    all(0..200, LocalCase::any);
}

#[test]
fn any_case_2() {
    all(200..400, LocalCase::any);
}
