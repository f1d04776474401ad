//! Choices of cases, and how often each pair of their values comes.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

use ferry::ReceiveLayout;
use ferry::layout::OutputElement;
use ferry_reference::workload::Routing;

use ferry_rig::{Case, ROW_FORMATS, ROW_LAYOUTS};

/// Every choice, and its values.
const CHOICES: [(&str, &[&str]); 26] = [
    ("receive", &["view", "strided", "compact"]),
    (
        "format",
        &["bf16", "fp8", "mxfp8", "mxfp4", "nvfp4", "nvfp4-row"],
    ),
    ("scales", &["row-major", "transposed"]),
    ("absent rows", &["kept", "cleared"]),
    ("room", &["enough", "too little"]),
    ("weights back", &["no", "yes"]),
    ("initial", &["none", "first", "second", "both"]),
    ("ids", &["i32", "i64", "i32 and i64"]),
    ("calls", &["fused", "split", "fused and split"]),
    ("weights", &["given", "none", "of some ranks"]),
    ("nodes", &["one", "two ranks each", "one rank each"]),
    ("ranks", &["2", "3 or 4", "6 or 8"]),
    ("counted", &["no", "all rows", "fewer"]),
    ("checks", &["off", "on"]),
    ("steps", &["none", "some"]),
    ("element", &["bf16", "f16", "f32"]),
    ("numbers", &["finite", "any bits"]),
    ("tokens", &["few", "many"]),
    ("row", &["short", "long"]),
    ("slots", &["one", "more"]),
    ("routing", &["uniform", "zipf", "twice", "holes"]),
    ("waits", &["at the end", "each call", "for views"]),
    ("multiprocessors", &["the plan's", "each call's"]),
    ("given up", &["no round", "some"]),
    ("counts", &["on the device", "on the host, too"]),
    ("given", &["bf16", "encoded"]),
];

/// Values that exclude all but one value of another choice.
const NEEDS: [[Name; 2]; 6] = [
    [("scales", "transposed"), ("format", "fp8")],
    [("absent rows", "cleared"), ("receive", "strided")],
    [("room", "too little"), ("receive", "compact")],
    [("waits", "for views"), ("receive", "view")],
    [("steps", "none"), ("element", "bf16")],
    // Many long rows would take long.
    [("tokens", "many"), ("row", "short")],
];

/// Values that exclude each other, in the order of their choices.
const EXCLUDED: [[Name; 2]; 4] = [
    [("nodes", "two ranks each"), ("ranks", "2")],
    [("calls", "fused"), ("counts", "on the host, too")],
    [("format", "bf16"), ("given", "encoded")],
    [("format", "nvfp4-row"), ("given", "encoded")],
];

/// A choice and a value, by index.
type Value = (usize, usize);
/// The same by name.
type Name = (&'static str, &'static str);

fn names(value: Value) -> Name {
    let (choice, values) = CHOICES[value.0];
    (choice, values[value.1])
}

/// Whether no case can have both.
fn exclude_each_other(pair: [Value; 2]) -> bool {
    let [one, other] = pair.map(names);
    let needed_by = |value: Name| NEEDS.iter().filter(move |[by, _]| *by == value);
    let is_missed = |value: Name, other: Name| {
        needed_by(value).any(|[_, needed]| needed.0 == other.0 && needed.1 != other.1)
    };
    let other_needs = |[_, needed]: &[Name; 2]| {
        needed_by(other).any(|[_, others]| needed.0 == others.0 && needed.1 != others.1)
    };
    is_missed(one, other)
        || is_missed(other, one)
        || needed_by(one).any(other_needs)
        || EXCLUDED.contains(&[one, other])
}

/// The value of each choice, by index.
fn values(case: &Case) -> [usize; CHOICES.len()] {
    let flag = usize::from;
    let of_ranks = |bits: u64| match (bits & u64::MAX >> (64 - case.ranks)).count_ones() as usize {
        0 => 0,
        all if all == case.ranks => 1,
        _ => 2,
    };
    let element = case.finish.map(|options| options.element);
    let position = |is_value: &mut dyn FnMut(usize) -> bool| (0..6).position(is_value).unwrap_or(6);
    let most = case.tokens.iter().flatten().max().copied().unwrap_or(0);
    let bytes = case.format.sizes().payload_bytes(case.hidden as u32);
    [
        position(&mut |at| ROW_LAYOUTS.get(at) == Some(&case.receive)),
        position(&mut |at| ROW_FORMATS[at] == case.format),
        flag(case.transposed_scales),
        flag(case.clear_absent),
        flag(case.short),
        flag(case.combine_weights),
        flag(case.initial[0]) + 2 * flag(case.initial[1]),
        of_ranks(case.wide_ids),
        of_ranks(case.split),
        of_ranks(case.unweighted),
        match case.p2p_world_size {
            size if size == case.ranks => 0,
            1 => 2,
            _ => 1,
        },
        flag(case.ranks > 2) + flag(case.ranks > 4),
        case.counted.map_or(0, |more| 1 + flag(more > 0)),
        flag(case.debug_checks),
        flag(element.is_some()),
        match element {
            None | Some(OutputElement::Bf16) => 0,
            Some(OutputElement::F16) => 1,
            Some(OutputElement::F32) => 2,
        },
        flag(case.specials),
        flag(most >= 90),
        flag(bytes > 512),
        flag(case.top_k > 1),
        match case.routing {
            Routing::Uniform
            | Routing::AllToOne { .. }
            | Routing::Hot { .. }
            | Routing::Grouped { .. } => 0,
            Routing::Zipf { .. } => 1,
            Routing::Duplicates => 2,
            Routing::Holes { .. } => 3,
        },
        match (case.synchronize, case.receive) {
            (true, _) => 1,
            (false, ReceiveLayout::View) if case.reads_views => 2,
            _ => 0,
        },
        flag(case.limits),
        flag(case.given_up & ((1 << case.tokens.len()) - 1) != 0),
        flag(case.counts && of_ranks(case.split) > 0),
        flag(case.gives_encoded()),
    ]
}

/// Cases by pairs of values of two choices.
#[derive(Default)]
pub struct Counts(BTreeMap<[Value; 2], u64>);

impl Counts {
    /// Counts a case.
    pub fn add(&mut self, case: &Case) {
        let values: Vec<Value> = values(case).into_iter().enumerate().collect();
        for (index, &one) in values.iter().enumerate() {
            for &other in &values[index + 1..] {
                *self.0.entry([one, other]).or_default() += 1;
            }
        }
    }

    /// Every pair that a case can have, by choices.
    fn pairs() -> impl Iterator<Item = [Value; 2]> {
        let all = |choice: usize| (0..CHOICES[choice].1.len()).map(move |value| (choice, value));
        let choices = (0..CHOICES.len())
            .flat_map(|one| (one + 1..CHOICES.len()).map(move |other| (one, other)));
        choices
            .flat_map(move |(one, other)| {
                all(one).flat_map(move |one| all(other).map(move |other| [one, other]))
            })
            .filter(|&pair| !exclude_each_other(pair))
    }

    fn count(&self, pair: [Value; 2]) -> u64 {
        self.0.get(&pair).copied().unwrap_or(0)
    }

    /// The pair that came least, and how often it did.
    pub fn least(&self) -> (String, u64) {
        let pairs = Self::pairs().map(|pair| (self.count(pair), pair));
        let (count, pair) = pairs.min().expect("there are choices");
        let [one, other] = pair.map(names);
        (
            format!("{} {} with {} {}", one.0, one.1, other.0, other.1),
            count,
        )
    }
}

impl Display for Counts {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut last = [usize::MAX; 2];
        for pair in Self::pairs() {
            let [one, other] = pair.map(names);
            if last != pair.map(|value| value.0) {
                last = pair.map(|value| value.0);
                write!(f, "\n{} x {}:", one.0, other.0)?;
            }
            write!(f, " {}+{} {},", one.1, other.1, self.count(pair))?;
        }
        writeln!(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::case_of;

    #[test]
    fn values_are_named() {
        let mut seen = vec![std::collections::BTreeSet::new(); CHOICES.len()];
        for seed in 0..5_400 {
            let case = case_of(seed);
            let values = values(&case);
            let [receive, format] = [0, 1].map(|choice| names((choice, values[choice])).1);
            assert_eq!((receive, format), (case.receive.name(), case.format.name()));
            for (seen, value) in seen.iter_mut().zip(values) {
                seen.insert(value);
            }
        }
        for (seen, (choice, values)) in seen.iter().zip(CHOICES) {
            assert!(
                seen.iter().copied().eq(0..values.len()),
                "{choice}: {seen:?}"
            );
        }
    }

    /// The rest is what cases can have.
    #[test]
    fn pairs_that_never_come_are_those_that_exclude_each_other() {
        let mut counts = Counts::default();
        (0..20_000).for_each(|seed| counts.add(&case_of(seed)));
        for pair in counts.0.keys() {
            assert!(!exclude_each_other(*pair), "{:?}", pair.map(names));
        }
        let (pair, count) = counts.least();
        assert!(count > 150, "{pair}: {count}");
    }
}
