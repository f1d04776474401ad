//! The check of a group's links, and the groups of GPUs that can be made with it.

mod check;
mod circle;
mod groups;
mod judge;

use self::check::Check;
use crate::error::Error;
use crate::error::links::LinkReport;
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
    /// It allocates windows of its own, which it frees, and once for a group a stream for each rank, which
    /// stays until the process ends. Takes about 10 ms if links are well (4 ranks that share an H200, or 2
    /// with one each), and at most 1 s more for each pair of ranks that loses or changes something. For
    /// groups over NVSHMEM, all ranks must be on one node and map each other's memory. Call it while the
    /// group has no work. Collective. Synchronizes.
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
    /// A bad link is none: the report names it. [`Error::Links`] on a process that drives some of several
    /// ranks, and for a row that was not tested; [`Error::PeerFailed`] if another rank has an error; those of
    /// [`Communicator::new`](crate::Communicator::new) and
    /// [`Communicator::close`](crate::Communicator::close).
    pub fn check_links(&self) -> Result<LinkReport, Error> {
        let mut check = Check::begin(self)?;
        let report = check.report();
        check.end(report)
    }
}

#[cfg(all(test, feature = "simulator"))]
mod tests;
