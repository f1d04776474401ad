//! The communicators of this process by GPU, and whether all kernels that wait for peers fit there at one
//! time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ferry_layout::Rank;

use crate::error::SharedGpuError;

/// Communicators that are open, or that a graph may launch.
static RESIDENTS: Mutex<Residents> = Mutex::new(Residents {
    all: Vec::new(),
    next: 0,
});

struct Residents {
    all: Vec<(u64, Resident)>,
    next: u64,
}

/// A rank of a communicator on a GPU.
#[derive(Clone, Debug)]
pub(crate) struct Resident {
    pub(crate) gpu: String,
    /// Multiprocessors of the GPU.
    pub(crate) multiprocessors: u32,
    /// Whether its group has other ranks there.
    pub(crate) is_shared: bool,
    /// Number that identifies its group.
    pub(crate) group: usize,
    /// Kind of its group: "local".
    pub(crate) kind: &'static str,
    pub(crate) rank: Rank,
    /// Most blocks of its kernels, a multiprocessor each.
    pub(crate) blocks: u32,
}

/// Keeps a rank of a communicator among the residents until it is dropped.
pub(crate) struct Residence(u64);

impl Drop for Residence {
    fn drop(&mut self) {
        all().all.retain(|&(number, _)| number != self.0);
    }
}

fn all() -> MutexGuard<'static, Residents> {
    RESIDENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Admits the ranks of a communicator, if with them all residents fit on each GPU.
///
/// Only the largest communicator of a rank counts: a rank's communicators may be ordered in one stream. GPUs
/// that no group shares are not checked. Ranks of other processes are not known here: a group divides a GPU
/// among all of its own, but two groups of the same processes are not added up.
pub(crate) fn admit(ranks: Vec<Resident>) -> Result<Vec<Residence>, SharedGpuError> {
    let mut residents = all();
    for new in &ranks {
        let known = residents.all.iter().map(|(_, known)| known);
        let here = known.chain(&ranks).filter(|other| other.gpu == new.gpu);
        require_room(here)?;
    }
    let admit = |resident| {
        residents.next += 1;
        let number = residents.next;
        residents.all.push((number, resident));
        Residence(number)
    };
    Ok(ranks.into_iter().map(admit).collect())
}

/// Checks that the residents of one GPU fit on it.
fn require_room<'r>(
    here: impl Iterator<Item = &'r Resident> + Clone,
) -> Result<(), SharedGpuError> {
    let multiprocessors = here.clone().map(|resident| resident.multiprocessors).max();
    let multiprocessors = multiprocessors.unwrap_or(0);
    let is_shared = here.clone().any(|resident| resident.is_shared);
    let mut largest: Vec<&Resident> = Vec::new();
    for resident in here {
        let of_rank =
            |other: &&mut &Resident| (other.group, other.rank) == (resident.group, resident.rank);
        match largest.iter_mut().find(of_rank) {
            Some(known) if known.blocks < resident.blocks => *known = resident,
            Some(_) => {}
            None => largest.push(resident),
        }
    }
    let blocks = largest.iter().map(|resident| u64::from(resident.blocks));
    let Some(first) = largest.first().filter(|_| is_shared) else {
        return Ok(());
    };
    if blocks.sum::<u64>() <= u64::from(multiprocessors) {
        return Ok(());
    }
    Err(SharedGpuError::NoRoom {
        device: first.gpu.clone(),
        multiprocessors,
        ranks: largest
            .iter()
            .map(|resident| (resident.kind, resident.rank, resident.blocks))
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident(gpu: &str, group: usize, rank: u32, blocks: u32) -> Resident {
        Resident {
            gpu: gpu.into(),
            multiprocessors: 100,
            is_shared: group > 0,
            group,
            kind: "local",
            rank: Rank(rank),
            blocks,
        }
    }

    #[test]
    fn of_each_rank_the_largest_communicator_counts() {
        let gpu = "largest";
        let first = admit(vec![resident(gpu, 1, 0, 50), resident(gpu, 1, 1, 50)]).unwrap();
        let second = admit(vec![resident(gpu, 1, 0, 40), resident(gpu, 1, 1, 50)]).unwrap();
        drop(first);
        // The first one's 50 are gone, and 40 + 50 leave room for 10.
        let other = admit(vec![resident(gpu, 2, 0, 10)]).unwrap();
        let SharedGpuError::NoRoom {
            multiprocessors: 100,
            ranks,
            ..
        } = admit(vec![resident(gpu, 1, 0, 41)]).err().unwrap()
        else {
            panic!("no room")
        };
        let wanted = [(0, 41), (1, 50), (0, 10)];
        assert_eq!(
            ranks,
            wanted.map(|(rank, blocks)| ("local", Rank(rank), blocks))
        );
        drop((second, other));
        drop(admit(vec![resident(gpu, 1, 0, 100)]).unwrap());
    }

    #[test]
    fn the_error_lists_whose_kernels_find_no_room() {
        let gpu = "GPU-7";
        let _held = admit(vec![resident(gpu, 1, 0, 60), resident(gpu, 1, 1, 40)]).unwrap();
        let refused = admit(vec![resident(gpu, 2, 3, 8)]).err().unwrap();
        assert_eq!(
            refused.to_string(),
            "kernels that wait for peers do not fit on GPU-7 at one time: it has 100 multiprocessors, and \
             they take 60 (rank 0, local group), 40 (rank 1, local group), 8 (rank 3, local group); lower \
             max_sms, or close a communicator first (one that was dropped counts while graphs of its calls \
             are alive, and for ever if others made them)"
        );
        // Another GPU has room.
        drop(admit(vec![resident("GPU-8", 2, 3, 8)]).unwrap());
    }

    #[test]
    fn a_gpu_that_no_group_shares_is_not_looked_at() {
        let gpu = "alone";
        let alone = admit(vec![resident(gpu, 0, 0, 100)]).unwrap();
        let again = admit(vec![Resident {
            rank: Rank(1),
            ..resident(gpu, 0, 0, 100)
        }]);
        assert!(again.is_ok());
        // A group that shares it finds them there.
        assert!(admit(vec![resident(gpu, 1, 0, 1)]).is_err());
        drop(alone);
    }
}
