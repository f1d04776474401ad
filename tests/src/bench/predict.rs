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

/// Lines with predicted times of dispatch and combine (reduced mode, no rank late) on `ranks` GPUs, all on
/// one switch with links of the same speed.
pub fn predict(records: &[Record], limits: &Limits, ranks: usize) -> Vec<String> {
    let records = records.iter().filter(|record| {
        record.mode == "reduced"
            && record.routing == "uniform"
            && record.late_us == 0
            && record.experts.is_multiple_of(ranks)
    });
    let mut lines = Vec::new();
    for record in records {
        let remote = remote_ranks(record, ranks);
        let growth = remote / remote_ranks(record, record.ranks).max(f64::MIN_POSITIVE);
        let times = [&record.dispatch, &record.combine].map(|phase| predicted_us(phase, growth));
        let [Some(dispatch), Some(combine)] = times else {
            continue;
        };
        if lines.is_empty() {
            lines.push(format!(
                "\npredicted for {ranks} GPUs: a token touches {remote:.2} other ranks, {growth:.2} \
                 times as many; measured times, the wire's share at {:.0} GB/s scaled by as much",
                limits.wire_gb_per_s
            ));
        }
        let (tokens, format) = (record.tokens, record.format);
        let [l2, kernels] = [record.cache(), record.kernels()];
        lines.push(format!(
            "{tokens:>5} {l2} {kernels} {format}: dispatch {dispatch:>7.1} µs, combine {combine:>7.1} µs"
        ));
    }
    lines
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
    fn a_line_names_its_kernels_and_no_rank_is_late() {
        let phase = || Phase {
            floor_us: Some(0.0),
            ..Phase::default()
        };
        let record = |specialised, late_us| Record {
            ranks: 2,
            tokens: 128,
            experts: 256,
            top_k: 8,
            format: "fp8",
            mode: "reduced",
            routing: "uniform".to_owned(),
            specialised,
            late_us,
            dispatch: phase(),
            combine: phase(),
            ..Record::default()
        };
        let records = [record(true, 0), record(false, 0), record(true, 50)];
        let lines = predict(&records, &Limits::default(), 4);
        let heads = lines[1..].iter().map(|line| line.split(':').next());
        let wanted = ["  128 warm special fp8", "  128 warm general fp8"];
        assert_eq!(heads.collect::<Vec<_>>(), wanted.map(Some));
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
