//! Medians and tails.

use serde::Serialize;

/// Summary of many samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// The median.
    pub median: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The least sample.
    pub min: f64,
}

impl Summary {
    /// Summarises samples; all zeros if there are none.
    pub fn of(mut samples: Vec<f64>) -> Self {
        if samples.is_empty() {
            return Self::default();
        }
        samples.sort_unstable_by(f64::total_cmp);
        let count = samples.len();
        let median = f64::midpoint(samples[(count - 1) / 2], samples[count / 2]);
        let p99 = samples[(count * 99).div_ceil(100) - 1];
        Self {
            median,
            p99,
            min: samples[0],
        }
    }

    /// Divides what was measured of `count` calls together.
    #[must_use]
    pub fn over(self, count: f64) -> Self {
        Self {
            median: self.median / count,
            p99: self.p99 / count,
            min: self.min / count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_and_the_tail() {
        assert_eq!(Summary::of(vec![]), Summary::default());
        let one = Summary::of(vec![3.0]);
        assert_eq!((one.median, one.p99, one.min), (3.0, 3.0, 3.0));
        let hundred = Summary::of((1..=100).rev().map(f64::from).collect());
        assert_eq!(
            (hundred.median, hundred.p99, hundred.min),
            (50.5, 99.0, 1.0)
        );
        let of_ten = hundred.over(10.0);
        assert_eq!((of_ten.median, of_ten.p99, of_ten.min), (5.05, 9.9, 0.1));
    }
}
