//! Checks that every process has a GPU of its own, or shares one only if all its ranks may.

use ferry_layout::Rank;

use crate::device::sharing::gpu_ranks::GpuRanks;
use crate::error::{Error, SharedGpuError};

/// File in which Linux names a machine's boot: the same in all its containers.
#[cfg(feature = "cuda")]
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A GPU and its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gpu {
    /// The driver's identifier; for a part of a GPU, that of the part.
    pub(crate) uuid: [u8; 16],
    /// The machine's boot; empty if it is not known.
    pub(crate) machine: String,
}

impl Gpu {
    /// A GPU of this machine.
    #[cfg(feature = "cuda")]
    pub(crate) fn here(uuid: [u8; 16]) -> Self {
        let machine = std::fs::read_to_string(BOOT_ID).unwrap_or_default();
        let machine = machine.trim().chars().take(255).collect();
        Self { uuid, machine }
    }

    /// Bytes for other ranks: the identifier, the length of the machine's name, the name.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let length = [self.machine.len() as u8];
        [&self.uuid, &length[..], self.machine.as_bytes()].concat()
    }

    /// Reads the bytes of [`to_bytes`](Self::to_bytes), and returns the rest, too.
    pub(crate) fn split_from(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (&uuid, rest) = bytes.split_first_chunk()?;
        let (&length, rest) = rest.split_first()?;
        let (machine, rest) = rest.split_at_checked(length.into())?;
        let machine = String::from_utf8_lossy(machine).into_owned();
        Some((Self { uuid, machine }, rest))
    }

    /// Name of the GPU, as the driver's tools write it.
    pub(crate) fn name(&self) -> String {
        let digits: String = self.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &digits[part]);
        format!("GPU-{}", parts.join("-"))
    }
}

/// Terms of a rank on its GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    /// Number of multiprocessors that its context reports.
    pub(crate) multiprocessors: u32,
    /// Whether other ranks may use the GPU, too.
    pub(crate) shares: bool,
    /// Whether its kernels run beside those of other processes (clients of MPS), instead of in turns.
    pub(crate) runs_beside_others: bool,
}

impl Terms {
    pub(crate) const BYTES: usize = 5;

    /// Bytes for other ranks.
    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let [a, b, c, d] = self.multiprocessors.to_le_bytes();
        let flags = u8::from(self.shares) | u8::from(self.runs_beside_others) << 1;
        [a, b, c, d, flags]
    }

    /// Reads the bytes of [`to_bytes`](Self::to_bytes), and returns the rest, too.
    pub(crate) fn split_from(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (&multiprocessors, rest) = bytes.split_first_chunk()?;
        let (&flags, rest) = rest.split_first()?;
        let terms = Self {
            multiprocessors: u32::from_le_bytes(multiprocessors),
            shares: flags & 1 != 0,
            runs_beside_others: flags & 2 != 0,
        };
        Some((terms, rest))
    }
}

/// The GPUs of all ranks, and the ranks on each. Refuses a GPU with two ranks, unless all of its ranks
/// share it, as their kernels wait for each other; and more ranks side by side than it has multiprocessors.
pub(crate) fn require_own(ranks: &[(Gpu, Terms)]) -> Result<Vec<GpuRanks>, Error> {
    let mut gpus = Vec::new();
    for (first, (gpu, terms)) in ranks.iter().enumerate() {
        if ranks[..first].iter().any(|(other, _)| other == gpu) {
            continue;
        }
        let here = (0..).zip(ranks).filter(|(_, (other, _))| other == gpu);
        let mut others = here.clone().skip(1);
        let refused = if terms.shares {
            others.find(|(_, (_, terms))| !terms.shares)
        } else {
            others.next()
        };
        if let Some((second, _)) = refused {
            return Err(Error::GpuShared {
                first: Rank(first as u32),
                second: Rank(second),
                device: gpu.name(),
            });
        }
        let beside = here
            .clone()
            .filter(|(_, (_, terms))| terms.runs_beside_others);
        let beside = beside.count();
        let here = here.map(|(rank, (_, terms))| (Rank(rank), terms.multiprocessors));
        let here = GpuRanks::new(gpu.name(), here);
        let multiprocessors = here.multiprocessors();
        if here.is_shared() && beside > multiprocessors as usize {
            return Err(SharedGpuError::TooManyRanks {
                device: gpu.name(),
                multiprocessors,
                ranks: beside,
            }
            .into());
        }
        gpus.push(here);
    }
    Ok(gpus)
}

/// The first rank that shares its GPU and whose kernels take turns there with other processes'.
pub(crate) fn takes_turns(gpus: &[GpuRanks], ranks: &[(Gpu, Terms)]) -> Option<Rank> {
    let shared = gpus.iter().filter(|gpu| gpu.is_shared());
    let takes_turns = |rank: &Rank| !ranks[rank.0 as usize].1.runs_beside_others;
    shared.flat_map(GpuRanks::ranks).filter(takes_turns).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(number: u8, machine: &str) -> Gpu {
        let mut uuid = [0x10; 16];
        uuid[15] = number;
        let machine = machine.into();
        Gpu { uuid, machine }
    }

    fn with(shares: bool) -> impl Fn(Gpu) -> (Gpu, Terms) {
        let terms = Terms {
            multiprocessors: 132,
            shares,
            runs_beside_others: false,
        };
        move |gpu| (gpu, terms)
    }

    #[test]
    fn two_ranks_on_one_gpu_are_named_with_it() {
        let gpus = [gpu(1, "a"), gpu(2, "a"), gpu(3, "a"), gpu(2, "a")];
        let Err(error) = require_own(&gpus.map(with(false))) else {
            panic!("ranks 1 and 3 share a GPU");
        };
        assert!(matches!(
            error,
            Error::GpuShared {
                first: Rank(1),
                second: Rank(3),
                ..
            }
        ));
        let text = error.to_string();
        assert!(
            text.contains("ranks 1 and 3")
                && text.contains("GPU-10101010-1010-1010-1010-101010101002")
                && text.contains("share_gpus"),
            "{text}"
        );
    }

    #[test]
    fn ranks_that_all_say_so_share_their_gpus() {
        let gpus = [gpu(1, "a"), gpu(2, "a"), gpu(1, "b"), gpu(2, "a")];
        let mut ranks = gpus.map(with(true));
        let found = require_own(&ranks).unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|gpu| gpu.ranks().collect::<Vec<_>>())
            .collect();
        let wanted = [vec![Rank(0)], vec![Rank(1), Rank(3)], vec![Rank(2)]];
        assert_eq!(found, wanted);
        // A rank that is alone need not say it.
        ranks[0].1.shares = false;
        require_own(&ranks).unwrap();
        for refuser in [1, 3] {
            let mut ranks = ranks.clone();
            ranks[refuser].1.shares = false;
            let refused = require_own(&ranks).unwrap_err();
            let text = refused.to_string();
            assert!(text.starts_with("ranks 1 and 3"), "{text}");
        }
    }

    #[test]
    fn side_by_side_there_are_at_most_as_many_ranks_as_multiprocessors() {
        let ranks = |count, runs_beside_others| {
            let terms = Terms {
                multiprocessors: 3,
                shares: true,
                runs_beside_others,
            };
            require_own(&vec![(gpu(1, "a"), terms); count])
        };
        ranks(3, true).unwrap();
        let refused = ranks(4, true).unwrap_err();
        assert!(
            matches!(
                refused,
                Error::SharedGpu(SharedGpuError::TooManyRanks {
                    multiprocessors: 3,
                    ranks: 4,
                    ..
                })
            ),
            "{refused}"
        );
        // In turns, each rank has all multiprocessors.
        ranks(4, false).unwrap();
    }

    #[test]
    fn a_rank_that_takes_turns_is_named_where_it_shares_its_gpu() {
        let gpus = [gpu(1, "a"), gpu(2, "a"), gpu(2, "a")];
        let mut ranks = gpus.map(with(true));
        let gpus = require_own(&ranks).unwrap();
        assert_eq!(takes_turns(&gpus, &ranks), Some(Rank(1)));
        ranks[1].1.runs_beside_others = true;
        assert_eq!(takes_turns(&gpus, &ranks), Some(Rank(2)));
        ranks[2].1.runs_beside_others = true;
        assert_eq!(takes_turns(&gpus, &ranks), None);
    }

    #[test]
    fn gpus_of_different_machines_or_numbers_are_different() {
        let gpus = [gpu(1, "a"), gpu(2, "a"), gpu(1, "b"), gpu(2, "b")];
        let gpus = require_own(&gpus.map(with(false))).unwrap();
        assert!(gpus.len() == 4 && gpus.iter().all(|gpu| !gpu.is_shared()));
    }

    #[test]
    fn a_gpu_survives_the_way_through_bytes() {
        for machine in ["", "0f1e2d3c"] {
            let gpu = gpu(9, machine);
            let bytes = [gpu.to_bytes(), vec![5, 6]].concat();
            assert_eq!(Gpu::split_from(&bytes), Some((gpu, &[5, 6][..])));
        }
        for (shares, runs_beside_others) in [(false, true), (true, false)] {
            let terms = Terms {
                multiprocessors: 1 << 9 | 3,
                shares,
                runs_beside_others,
            };
            let bytes = [&terms.to_bytes()[..], &[5]].concat();
            assert_eq!(Terms::split_from(&bytes), Some((terms, &[5][..])));
        }
        assert_eq!(Terms::split_from(&[0; Terms::BYTES - 1]), None);
        assert_eq!(Gpu::split_from(&[1; 16]), None);
        assert_eq!(Gpu::split_from(&[200; 20]), None);
    }
}
