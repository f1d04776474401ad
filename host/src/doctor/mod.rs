//! The check of a group's links, and the groups of GPUs that can be made with it.

mod check;
mod groups;
mod judge;

use ferry_layout::LinkTest;

use self::check::Check;
use self::judge::{Cells, judge};
use crate::communicator::Communicator;
use crate::error::Error;
use crate::error::links::{LinkReport, LinksError};
use crate::group::Group;

impl Group {
    /// Checks every link between two ranks, in both directions: rank after rank stores into the memory of
    /// each other one as dispatch does (a flag of 8 bytes; a row of 4 KiB whose words are flags; rows of 1
    /// MiB with a flag each), and the other one looks at what arrives, and answers. Ranks meet in pairs, and
    /// one of a pair stores at a time. Simulated ranks store 16 KiB instead of 1 MiB.
    ///
    /// What the driver says about access between GPUs is not what arrives: on a machine whose IOMMU or PCIe
    /// bridges are set up wrongly, stores get lost, and the first round ends with a
    /// [`PeerTimeout`](crate::FaultKind::PeerTimeout) that names a rank at which nothing is wrong. [The
    /// guide](crate::guide::doctor) says what to look at.
    ///
    /// It allocates windows of its own, which it frees unless it fails, and a stream for each rank, which
    /// stays until the process ends. On 8 ranks with a GPU each it is meant to take less than 2 s if links
    /// are well, up to 4 s if many are bad. It has not run on a GPU yet, and is not to be: the guide says
    /// what is known to be wrong. For groups over NVSHMEM, all ranks must be on one node and map each other's
    /// memory. Call it while the group has no work. Collective. Synchronizes.
    ///
    /// ```
    /// use ferry::Group;
    ///
    /// # fn main() -> Result<(), ferry::Error> {
    /// let group = Group::simulated(4, 7)?;
    /// let report = group.check_links()?;
    /// assert!(report.is_well(), "{report}");
    /// # group.close()
    /// # }
    /// ```
    ///
    /// # Errors
    /// A bad link is none: the report names it. [`LinksError::SomeRanks`]; those of
    /// [`Communicator::new`](crate::Communicator::new) and
    /// [`Communicator::close`](crate::Communicator::close).
    pub fn check_links(&self) -> Result<LinkReport, Error> {
        let (ranks, local) = (self.ranks(), self.local_ranks());
        if local.len() != 1 && local.len() != ranks as usize {
            let local = local.iter().map(|rank| rank.0).collect();
            return Err(LinksError::SomeRanks { local, ranks }.into());
        }
        let shared = local.iter().filter_map(|&rank| self.gpu_ranks(rank));
        // The same in all processes: a GPU that ranks share is in all lists.
        let on_a_gpu = shared
            .map(|gpu| gpu.ranks().count() as u64)
            .max()
            .unwrap_or(1);
        let on_a_gpu = self
            .fabric
            .all_gather(on_a_gpu)?
            .into_iter()
            .max()
            .unwrap_or(1);
        let mut check = Check::begin(self, on_a_gpu)?;
        let mut report = LinkReport {
            ranks,
            group: self.name(),
            judges_times: on_a_gpu == 1,
            links: Vec::new(),
        };
        let mut peers = Cells::all_peers(ranks);
        for test in LinkTest::ALL {
            let cells = check.run(test, &peers)?;
            judge(
                &mut report,
                (test, check.bytes(test)),
                check.floor(),
                &cells,
            );
            cells.leave_out_bad(&mut peers);
        }
        let closed = Communicator::close_all(check.into_ranks());
        match closed.map_err(|failed| failed.into_failures()) {
            Ok(()) => Ok(report),
            Err(failures) => match failures.into_iter().next() {
                Some((_, failure)) => Err(failure.error),
                None => Ok(report),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::tests::Elsewhere;

    #[test]
    fn a_process_with_some_of_several_ranks_is_refused() {
        let group = Group::with_fabric(Box::new(Elsewhere(3, &[0, 2]))).unwrap();
        let refused = group.check_links().unwrap_err();
        assert_eq!(
            refused.to_string(),
            "check_links: this process drives ranks [0, 2] of 3; of a group of processes, each has one rank"
        );
    }
}
