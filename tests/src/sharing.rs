//! Ranks that share GPUs: which GPU a rank has, how many have it, and how many hardware queues there are.

use std::env;
use std::ffi::OsStr;

use ferry::{Group, Rank};

/// Hardware queues of a process, which the driver reads when it is initialised. Streams beyond their number
/// share one, and a kernel that waits in it holds up the streams behind it.
pub const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// The most that the driver gives. It gives 8 to who does not ask.
const MOST_QUEUES: &str = "32";

/// The GPUs of a machine, and how its ranks have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpus {
    /// Number of GPUs.
    pub found: usize,
    /// Whether ranks share them.
    pub shared: bool,
}

impl Gpus {
    /// The GPU of a rank of this machine: one of its own, or in turns.
    pub fn of_rank(self, rank: usize) -> usize {
        if self.shared {
            rank % self.found.max(1)
        } else {
            rank
        }
    }
}

/// Most ranks of a group that have one GPU: 1 where each has one of its own, and in the simulator.
pub fn ranks_per_gpu(group: &Group) -> usize {
    let gpus = (0..group.ranks()).filter_map(|rank| group.gpu_ranks(Rank(rank)));
    gpus.map(|gpu| gpu.ranks().len()).max().unwrap_or(1)
}

/// Multiprocessors that a kernel of a rank of this process occupies on a GPU whose context reports so many.
pub fn multiprocessors(group: &Group, rank: Rank, reported: u32, max_sms: Option<u32>) -> u32 {
    let limit = match group.gpu_ranks(rank) {
        Some(gpu) => gpu.limit(rank, max_sms),
        None => max_sms,
    };
    limit.map_or(reported, |most| most.clamp(1, reported))
}

/// Value that [`QUEUES`] is to be set to if ranks share GPUs; `None` if it is set already, and stays.
fn wanted_queues(set: Option<&OsStr>) -> Option<&'static str> {
    set.is_none().then_some(MOST_QUEUES)
}

/// Asks the driver for as many hardware queues as it gives, unless somebody has asked for a number.
///
/// # Safety
/// No other thread of this process runs. (The driver, which reads it, is not initialised yet, or it has no
/// effect.)
pub unsafe fn ask_for_queues() {
    if let Some(wanted) = wanted_queues(env::var_os(QUEUES).as_deref()) {
        // SAFETY: no other thread of this process runs: documented on this function.
        unsafe { env::set_var(QUEUES, wanted) };
    }
}

/// Hardware queues that this process asks for; 8 if it does not, as the driver gives.
#[cfg(feature = "cuda")]
pub fn queues() -> usize {
    let set = env::var(QUEUES).ok();
    set.and_then(|set| set.parse().ok()).unwrap_or(8)
}

/// Title for people: how many ranks have a GPU, and how many hardware queues a process asks for. `None` if
/// every rank has a GPU of its own.
pub fn title(ranks_per_gpu: usize) -> Option<String> {
    let queues = env::var(QUEUES).unwrap_or_else(|_| "not set".into());
    (ranks_per_gpu > 1).then(|| format!("up to {ranks_per_gpu} ranks on a GPU, {QUEUES} {queues}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_ranks(ranks: usize, gpus: Gpus) -> Vec<usize> {
        (0..ranks).map(|rank| gpus.of_rank(rank)).collect()
    }

    #[test]
    fn ranks_have_the_gpus_that_are_there_in_turns() {
        let shared = |found| Gpus {
            found,
            shared: true,
        };
        assert_eq!(of_ranks(4, shared(1)), [0; 4]);
        assert_eq!(of_ranks(5, shared(2)), [0, 1, 0, 1, 0]);
        assert_eq!(of_ranks(2, shared(8)), [0, 1]);
        // The library says that there is none.
        assert_eq!(of_ranks(2, shared(0)), [0; 2]);
    }

    #[test]
    fn without_sharing_a_rank_asks_for_a_gpu_of_its_own_even_if_it_is_not_there() {
        let own = Gpus {
            found: 1,
            shared: false,
        };
        assert_eq!(of_ranks(3, own), [0, 1, 2]);
    }

    #[test]
    fn simulated_ranks_have_a_gpu_each_and_what_they_ask_for_of_it() {
        let group = Group::simulated(3, 1).unwrap();
        assert_eq!(ranks_per_gpu(&group), 1);
        let of = |max_sms| multiprocessors(&group, Rank(1), 132, max_sms);
        assert_eq!(
            [of(None), of(Some(8)), of(Some(500)), of(Some(0))],
            [132, 8, 132, 1]
        );
    }

    #[test]
    fn a_number_of_queues_that_is_set_stays() {
        assert_eq!(wanted_queues(None), Some("32"));
        for set in ["1", "8", "32", ""] {
            assert_eq!(wanted_queues(Some(set.as_ref())), None);
        }
    }

    #[test]
    fn who_has_a_gpu_alone_hears_nothing() {
        assert_eq!(title(1), None);
        let text = title(4).unwrap();
        assert!(text.starts_with("up to 4 ranks on a GPU, CUDA_DEVICE_MAX_CONNECTIONS "));
    }
}
