//! The ranks of a group on one GPU, and each one's part of it.

use ferry_layout::{Kernel, Rank};

/// A GPU and the ranks of a group on it, of any process. There is more than one only
/// if the group shares GPUs (`GroupOptions::share_gpus`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuRanks {
    gpu: String,
    ranks: Vec<(Rank, u32)>,
}

impl GpuRanks {
    /// The GPU with this unique name, and its ranks, each with the number of multiprocessors that
    /// its context reports.
    pub fn new(gpu: impl Into<String>, ranks: impl IntoIterator<Item = (Rank, u32)>) -> Self {
        let (gpu, ranks) = (gpu.into(), ranks.into_iter().collect());
        Self { gpu, ranks }
    }

    /// The GPU of `rank`, among these.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn of(gpus: &[Self], rank: Rank) -> Option<&Self> {
        gpus.iter()
            .find(|gpu| gpu.ranks().any(|other| other == rank))
    }

    /// Name of the GPU, as the driver's tools write it.
    pub fn gpu(&self) -> &str {
        &self.gpu
    }

    /// The ranks, in the order of [`new`](Self::new).
    pub fn ranks(&self) -> impl ExactSizeIterator<Item = Rank> + '_ {
        self.ranks.iter().map(|&(rank, _)| rank)
    }

    /// Whether there is more than one rank.
    pub const fn is_shared(&self) -> bool {
        self.ranks.len() > 1
    }

    /// Number of multiprocessors of the GPU, as far as its ranks know: the largest that the context of any of
    /// them reports. Under MPS with a percentage for each process a context reports only its share, so this
    /// is the largest share if all processes have one.
    pub fn multiprocessors(&self) -> u32 {
        let most = self.ranks.iter().map(|&(_, reported)| reported).max();
        most.unwrap_or(0).max(1)
    }

    /// Most multiprocessors that a kernel of `rank` occupies, if its [`Config::max_sms`](crate::Config)
    /// is `max_sms`; `None` for all. For a rank that shares the GPU it is the least of that, of the number
    /// that its context reports, and of [the GPU's](Self::multiprocessors) divided by the number of
    /// ranks, but at least 1. So the kernels of all ranks fit at one time; side by side, there
    /// are at most as many ranks. Percentages of MPS that divide the GPU would divide it twice: set none.
    pub fn limit(&self, rank: Rank, max_sms: Option<u32>) -> Option<u32> {
        let Some(reported) = self.reported(rank).filter(|_| self.is_shared()) else {
            return max_sms;
        };
        let divided = self.multiprocessors() / self.ranks.len() as u32;
        let part = divided.min(reported).max(1);
        Some(max_sms.map_or(part, |most| most.min(part)))
    }

    /// Number of multiprocessors that the context of `rank` reports, if it is on this GPU.
    fn reported(&self, rank: Rank) -> Option<u32> {
        let mut ranks = self.ranks.iter();
        let &(_, reported) = ranks.find(|&&(other, _)| other == rank)?;
        Some(reported)
    }

    /// Number of blocks of a kernel of `rank` with its [`limit`](Self::limit).
    pub(crate) fn blocks(&self, rank: Rank, max_sms: Option<u32>) -> u32 {
        let reported = self.reported(rank).unwrap_or(1);
        Kernel::blocks(self.limit(rank, max_sms), reported)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(reported: &[u32]) -> GpuRanks {
        GpuRanks::new("GPU-1", (0..).map(Rank).zip(reported.iter().copied()))
    }

    #[test]
    fn ranks_that_share_a_gpu_divide_its_multiprocessors() {
        for (reported, rank, max_sms, wanted) in [
            (&[132][..], 0, None, None),
            (&[132], 0, Some(5), Some(5)),
            (&[132; 2], 1, None, Some(66)),
            (&[132; 4], 2, None, Some(33)),
            (&[132; 4], 2, Some(8), Some(8)),
            (&[132; 4], 2, Some(90), Some(33)),
            (&[132; 5], 4, None, Some(26)),
            // A process with a tenth under MPS, beside one without a limit.
            (&[132, 14], 0, None, Some(66)),
            (&[132, 14], 1, None, Some(14)),
            // Percentages that divide the GPU already divide it twice: 4 processes at 25 %.
            (&[33; 4], 2, None, Some(8)),
            (&[3; 8], 7, None, Some(1)),
            (&[0; 2], 0, None, Some(1)),
        ] {
            let found = gpu(reported).limit(Rank(rank), max_sms);
            assert_eq!(found, wanted, "{reported:?}, rank {rank}, {max_sms:?}");
        }
    }

    #[test]
    fn the_kernels_of_all_ranks_find_room_on_the_gpu() {
        for ranks in 1..=64 {
            for full in [64, 108, 132, 148] {
                let gpu = gpu(&vec![full; ranks]);
                let all: u32 = gpu.ranks().map(|rank| gpu.blocks(rank, None)).sum();
                assert!(
                    all <= full && all + ranks as u32 > full,
                    "{ranks} ranks: {all} of {full}"
                );
            }
        }
    }

    #[test]
    fn a_rank_that_is_elsewhere_has_no_part() {
        assert_eq!(gpu(&[132; 2]).limit(Rank(2), Some(7)), Some(7));
    }
}
