//! Times of calls on each rank, and their summary over all ranks.

use anyhow::{Result, ensure};

use super::statistics::Summary;

/// A call's GPU time and host time, in microseconds.
pub type Sample = (f64, f64);
/// A rank's samples: by stage, then iteration.
pub type Samples = Vec<Vec<Sample>>;

/// Bytes of a sample in a message.
const SAMPLE_BYTES: usize = size_of::<[f64; 2]>();

/// Times of a stage, in microseconds.
#[derive(Clone, Debug, Default)]
pub struct Timed {
    /// GPU time between events, the slowest rank of each iteration.
    pub gpu_us: Summary,
    /// Host time of the call, of any rank.
    pub host_us: Summary,
}

/// Numbers of a rank's samples.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    /// Stages.
    pub stages: usize,
    /// Iterations of each.
    pub iterations: usize,
}

/// Encodes the samples of some ranks for another process.
pub fn to_bytes(ranks: &[Samples]) -> Vec<u8> {
    let samples = ranks.iter().flatten().flatten();
    samples
        .flat_map(|&(gpu, host)| [gpu.to_le_bytes(), host.to_le_bytes()])
        .flatten()
        .collect()
}

/// Decodes the bytes of [`to_bytes`].
///
/// # Errors
/// The bytes are none, or not those of whole ranks.
pub fn from_bytes(bytes: &[u8], counts: Counts) -> Result<Vec<Samples>> {
    let Counts { stages, iterations } = counts;
    let of_a_rank = stages * iterations * SAMPLE_BYTES;
    ensure!(
        of_a_rank > 0 && !bytes.is_empty() && bytes.len().is_multiple_of(of_a_rank),
        "a process sent {} bytes of samples, not {of_a_rank} for each of its ranks; do all have \
         the same flags?",
        bytes.len()
    );
    let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().unwrap_or_default());
    let sample = |bytes: &[u8]| (number(&bytes[..8]), number(&bytes[8..]));
    let stage = |bytes: &[u8]| bytes.chunks(SAMPLE_BYTES).map(sample).collect();
    let rank = |bytes: &[u8]| bytes.chunks(iterations * SAMPLE_BYTES).map(stage).collect();
    Ok(bytes.chunks(of_a_rank).map(rank).collect())
}

/// Summarises a stage over all ranks.
pub fn summary(ranks: &[Samples], stage: usize) -> Timed {
    let iterations = ranks[0][stage].len();
    let slowest = |iteration: usize| {
        ranks
            .iter()
            .map(|rank| rank[stage][iteration].0)
            .fold(0.0, f64::max)
    };
    let host = ranks
        .iter()
        .flat_map(|rank| rank[stage].iter().map(|&(_, host)| host));
    Timed {
        gpu_us: Summary::of((0..iterations).map(slowest).collect()),
        host_us: Summary::of(host.collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTS: Counts = Counts {
        stages: 2,
        iterations: 3,
    };

    fn rank(add: f64) -> Samples {
        let stage = |first: f64| (0..3).map(|i| (first + add + f64::from(i), 0.5)).collect();
        vec![stage(10.0), stage(20.0)]
    }

    #[test]
    fn samples_come_back_from_bytes() {
        let ranks = vec![rank(0.25), rank(100.0)];
        assert_eq!(from_bytes(&to_bytes(&ranks), COUNTS).unwrap(), ranks);
    }

    #[test]
    fn parts_of_ranks_and_nothing_are_refused() {
        let bytes = to_bytes(&[rank(0.0)]);
        assert!(from_bytes(&bytes[..bytes.len() - 16], COUNTS).is_err());
        assert!(from_bytes(&[], COUNTS).is_err());
    }

    #[test]
    fn each_iteration_counts_with_its_slowest_rank() {
        let mut ranks = vec![rank(0.0), rank(0.0)];
        ranks[1][0][0].0 = 50.0;
        let timed = summary(&ranks, 0);
        assert_eq!(timed.gpu_us.median, 12.0);
        assert_eq!(timed.gpu_us.p99, 50.0);
        assert_eq!(timed.host_us.median, 0.5);
    }
}
