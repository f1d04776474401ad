//! Predictions for another number of GPUs from the measured limits.

use super::record::{Limits, Phase, Record};
use super::traffic::touch_probability;

/// Mean number of other ranks that a token touches under uniform routing.
fn remote_ranks(record: &Record, ranks: usize) -> f64 {
    (ranks - 1) as f64 * touch_probability(ranks, record.experts, record.top_k)
}

/// Time of `phase` if it moved `growth` times the bytes: only the wire's share grows.
fn predicted_us(phase: &Phase, growth: f64) -> Option<f64> {
    let floor = phase.floor_us?;
    Some(phase.gpu_us.median - floor + floor * growth)
}

/// Prints predicted times of dispatch and combine (reduced mode) on `ranks` GPUs, all on one switch with
/// links of the same speed.
pub fn predict(records: &[Record], limits: &Limits, ranks: usize) {
    let records = records.iter().filter(|record| {
        record.mode == "reduced"
            && record.routing == "uniform"
            && record.experts.is_multiple_of(ranks)
    });
    let mut is_first = true;
    for record in records {
        let remote = remote_ranks(record, ranks);
        let growth = remote / remote_ranks(record, record.ranks).max(f64::MIN_POSITIVE);
        let times = [&record.dispatch, &record.combine].map(|phase| predicted_us(phase, growth));
        let [Some(dispatch), Some(combine)] = times else {
            continue;
        };
        if std::mem::take(&mut is_first) {
            println!(
                "\npredicted for {ranks} GPUs: a token touches {remote:.2} other ranks, {growth:.2} \
                 times as many; measured times, the wire's share at {:.0} GB/s scaled by as much",
                limits.wire_gb_per_s
            );
        }
        let l2 = if record.l2_flushed { "cold" } else { "warm" };
        println!(
            "{:>5} {l2} {}: dispatch {dispatch:>7.1} µs, combine {combine:>7.1} µs",
            record.tokens, record.format
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::statistics::Summary;
    use super::*;

    #[test]
    fn only_the_share_of_the_wire_grows() {
        let gpu_us = Summary {
            median: 30.0,
            p99: 31.0,
            min: 29.0,
        };
        let phase = Phase {
            gpu_us,
            floor_us: Some(20.0),
            ..Phase::default()
        };
        assert_eq!(predicted_us(&phase, 1.5), Some(40.0));
        assert_eq!(predicted_us(&Phase::default(), 1.5), None);
    }

    #[test]
    fn eight_ranks_are_touched_less_than_in_proportion() {
        let record = Record {
            experts: 256,
            top_k: 8,
            ..Record::default()
        };
        assert!((remote_ranks(&record, 8) - 4.63).abs() < 0.02);
        assert!((remote_ranks(&record, 4) - 2.71).abs() < 0.01);
    }
}
