//! Rounds that were run, by format and size.

use std::collections::BTreeMap;
use std::fmt::Write;

use ferry::ReceiveLayout;
use serde::Serialize;

use ferry_rig::Case;

/// Starts of the size classes, in tokens of the rank that has most.
const SIZES: [usize; 7] = [0, 1, 2, 8, 32, 128, 512];

/// Name of a case's format, and of its layout of received rows unless that is by expert.
pub fn name_of(case: &Case) -> String {
    match case.receive {
        ReceiveLayout::ByExpert => format!("{:?}", case.format),
        receive => format!("{:?} {receive}", case.format),
    }
}

/// Rounds, by format and size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    seeds: u64,
    /// Rounds by format, then by index of a size.
    rounds: BTreeMap<String, [u64; SIZES.len()]>,
}

impl Tally {
    /// Counts one round of one seed, in which no rank has more than `tokens`.
    pub fn of_round(format: &str, tokens: usize) -> Self {
        let mut sizes = [0; SIZES.len()];
        sizes[SIZES.partition_point(|&start| start <= tokens) - 1] = 1;
        Self {
            seeds: 1,
            rounds: BTreeMap::from([(format.into(), sizes)]),
        }
    }

    /// Returns the same rounds as of one seed.
    pub fn of_one_seed(self) -> Self {
        Self { seeds: 1, ..self }
    }

    /// Adds another tally.
    pub fn add(&mut self, other: &Self) {
        self.seeds += other.seeds;
        for (format, others) in &other.rounds {
            let sizes = self.rounds.entry(format.clone()).or_default();
            sizes
                .iter_mut()
                .zip(others)
                .for_each(|(own, other)| *own += other);
        }
    }

    /// Seeds that were run.
    pub fn seeds(&self) -> u64 {
        self.seeds
    }

    /// Rounds that were run.
    pub fn rounds(&self) -> u64 {
        self.rounds.values().flatten().sum()
    }

    /// Rounds by format and size, with the sizes' names.
    pub fn by_format(&self) -> BTreeMap<&str, BTreeMap<String, u64>> {
        let named = |sizes: &[u64; SIZES.len()]| {
            let counted = sizes.iter().enumerate().filter(|(_, count)| **count > 0);
            counted.map(|(size, &count)| (name(size), count)).collect()
        };
        let formats = self.rounds.iter();
        formats
            .map(|(format, sizes)| (format.as_str(), named(sizes)))
            .collect()
    }

    /// Table of the rounds.
    pub fn table(&self) -> String {
        let mut text = format!("{:34}", "rounds, by tokens of a rank");
        for size in 0..SIZES.len() {
            let _ = write!(text, "{:>10}", name(size));
        }
        for (format, sizes) in &self.rounds {
            let _ = write!(text, "\n{format:34}");
            for count in sizes {
                let _ = write!(text, "{count:>10}");
            }
        }
        text + "\n"
    }
}

/// A size's name: "2..7".
fn name(size: usize) -> String {
    match (SIZES[size], SIZES.get(size + 1)) {
        (start, Some(&next)) if next == start + 1 => start.to_string(),
        (start, Some(&next)) => format!("{start}..{}", next - 1),
        (start, None) => format!("{start}.."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_add_up_by_format_and_size() {
        let mut tally = Tally::default();
        for (format, tokens) in [("Bf16", 0), ("Bf16", 7), ("Bf16", 2), ("Mxfp8", 600)] {
            tally.add(&Tally::of_round(format, tokens));
        }
        assert_eq!((tally.rounds(), tally.seeds()), (4, 4));
        let by_format = serde_json::to_string(&tally.by_format()).unwrap();
        assert_eq!(
            by_format,
            r#"{"Bf16":{"0":1,"2..7":2},"Mxfp8":{"512..":1}}"#
        );
        assert_eq!(tally.table().lines().count(), 3);
        assert_eq!(tally.of_one_seed().seeds(), 1);
    }
}
