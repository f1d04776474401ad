//! The seeds of a test's cases: all of them, a part that the quick tests draw, or one to repeat a failure.

use std::env;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::ops::Range;

/// Variable that says which seeds tests take: `some:TEXT` for a part that the text decides, or `all`, the
/// default.
const SEEDS: &str = "FERRY_SEEDS";
/// Variable with the only seed for tests that have it among theirs.
const ONE_SEED: &str = "FERRY_SEED";

/// The quick tests take one of so many seeds, but [`LEAST`] of each range.
const ONE_OF: u64 = 8;
/// Cases often take turns by the remainder of their seed.
const LEAST: u64 = 4;

/// Seeds of a range that this process takes, in their order. If the case of one panics, tells how to repeat
/// it.
pub fn drawn(range: Range<u64>) -> impl Iterator<Item = u64> {
    drawn_and(range, None)
}

/// The same with one more seed, a new one each time. Any seed can be repeated here.
pub fn drawn_and(range: Range<u64>, new: Option<u64>) -> impl Iterator<Item = u64> {
    let one = variable(ONE_SEED);
    let range = match (&one, new) {
        (Some(_), Some(_)) => 0..u64::MAX,
        _ => range,
    };
    Drawn {
        new: new.filter(|_| one.is_none()),
        left: choose(range, one.as_deref(), variable(SEEDS).as_deref()),
        last: None,
    }
}

/// Whether tests take all seeds of their ranges, so that what must come up in some of them does.
pub fn draws_all() -> bool {
    part(variable(SEEDS).as_deref()).is_none() && variable(ONE_SEED).is_none()
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// The text that decides which part is taken, if not all is.
fn part(seeds: Option<&str>) -> Option<&str> {
    let seeds = seeds.filter(|&seeds| seeds != "all")?;
    let text = seeds.strip_prefix("some:");
    Some(text.unwrap_or_else(|| panic!("{SEEDS} is `{seeds}`: it takes `all` and `some:TEXT`")))
}

/// The part of a range that the variables name: neighbours, so that cases that take turns come up alike.
pub fn choose(range: Range<u64>, one: Option<&str>, seeds: Option<&str>) -> Range<u64> {
    if let Some(one) = one {
        let seed: u64 = one
            .parse()
            .unwrap_or_else(|_| panic!("{ONE_SEED} is `{one}`, no number"));
        return if range.contains(&seed) {
            seed..seed + 1
        } else {
            range
        };
    }
    let Some(text) = part(seeds) else {
        return range;
    };
    let length = range.end.saturating_sub(range.start);
    let count = length.div_ceil(ONE_OF).max(LEAST).min(length);
    let mut hasher = DefaultHasher::new();
    (text, range.start).hash(&mut hasher);
    let first = range.start + hasher.finish() % (length - count + 1);
    first..first + count
}

/// An iterator that knows which seed is being tried.
struct Drawn {
    left: Range<u64>,
    new: Option<u64>,
    last: Option<u64>,
}

impl Iterator for Drawn {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.last = self.left.next().or_else(|| self.new.take());
        self.last
    }
}

impl Drop for Drawn {
    fn drop(&mut self) {
        if let (true, Some(seed)) = (std::thread::panicking(), self.last) {
            println!("this seed again, and no other: {ONE_SEED}={seed}");
        }
    }
}
