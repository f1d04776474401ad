//! Groups of GPUs. Without their feature they are errors that name it.

use crate::error::Error;
#[cfg(any(feature = "cuda", test))]
use crate::error::links::LinksError;
use crate::group::Group;
use crate::group::bootstrap::Bootstrap;
#[cfg(feature = "cuda")]
use crate::group::local::LocalFabric;
#[cfg(feature = "cuda")]
use crate::group::node::{fabric::NodeFabric, ipc::Ipc};
#[cfg(feature = "nvshmem")]
use crate::group::nvshmem::NvshmemFabric;
use crate::group::options::GroupOptions;

impl Group {
    /// Group of one rank per GPU, all driven by this process, over peer access. `devices` are CUDA device
    /// numbers; rank `r` is `devices[r]`. Not collective. Synchronizes the devices.
    ///
    /// ```no_run
    /// use ferry::{Group, GroupOptions};
    ///
    /// # fn main() -> Result<(), ferry::Error> {
    /// let group = Group::local(&[0, 1, 2, 3], &GroupOptions::default())?;
    /// # group.close()
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NotBuilt`] without the feature `cuda`; [`Error::RankCount`], [`Error::DeviceListedTwice`],
    /// [`Error::NoSuchDevice`], [`Error::NoPeerAccess`], [`Error::LibraryMissing`] without a CUDA driver,
    /// [`Error::Driver`], also for kernels of other devices, [`Error::SharedGpu`], [`Error::Cuda`].
    pub fn local(devices: &[usize], options: &GroupOptions) -> Result<Self, Error> {
        #[cfg(feature = "cuda")]
        {
            let fabric = LocalFabric::new(devices, options)?;
            Self::with_fabric(Box::new(fabric))?.checked(options.check_links)
        }
        #[cfg(not(feature = "cuda"))]
        not_built("Group::local", "cuda", (devices, options))
    }

    /// Group of one process per GPU, all on one node, over peer access. Needs nothing but the driver: the
    /// processes exchange their windows as CUDA IPC handles, through `bootstrap`, which also numbers the
    /// ranks. `device` is the number of this process's GPU among those that it sees; it need not
    /// see the others. Collective. Synchronizes.
    ///
    /// Setup is all-or-nothing: a rank that cannot take part returns the reason, and all others return
    /// [`Error::PeerFailed`] with its number. The wait for a rank that does not come at all ends at the
    /// bootstrap's deadline. Before this returns, each rank has mapped a small
    /// window of every other one, so that a machine without CUDA IPC is found here. Processes in
    /// containers need one IPC namespace and one PID namespace.
    ///
    /// # Errors
    /// [`Error::NotBuilt`] without the feature `cuda`; [`Error::Node`] (different nodes, different numbers of
    /// ranks, no peer access, no CUDA IPC), [`Error::GpuShared`], [`Error::SharedGpu`],
    /// [`Error::PeerFailed`], [`Error::Bootstrap`], [`Error::RankCount`], [`Error::NoSuchDevice`],
    /// [`Error::LibraryMissing`] without a CUDA driver, [`Error::Driver`], also for kernels of other devices,
    /// [`Error::Cuda`].
    pub fn node(
        bootstrap: Box<dyn Bootstrap>,
        device: usize,
        options: &GroupOptions,
    ) -> Result<Self, Error> {
        #[cfg(feature = "cuda")]
        {
            let fabric = NodeFabric::join(bootstrap, || Ipc::open(device, options))?;
            Self::with_fabric(Box::new(fabric))?.checked(options.check_links)
        }
        #[cfg(not(feature = "cuda"))]
        not_built("Group::node", "cuda", (bootstrap, device, options))
    }

    /// Group of one process per GPU, over NVLink inside a node and NVSHMEM between nodes. `device` is the
    /// number of this process's GPU. Kernels of yours must be linked with NVSHMEM's device code, as Ferry's
    /// are. Collective. Synchronizes.
    ///
    /// # Errors
    /// [`Error::NotBuilt`] without the feature `nvshmem`; [`Error::Bootstrap`], [`Error::GpuShared`],
    /// [`Error::LibraryMissing`] without a CUDA driver or NVSHMEM's library, [`Error::Nvshmem`],
    /// [`Error::NoSuchDevice`], [`Error::Cuda`]; [`Error::Driver`], also for kernels of other devices, and
    /// [`Error::Kernels`](Error) for kernels that were built without NVSHMEM; [`Error::SharedGpu`] if ranks
    /// share a GPU without MPS.
    pub fn nvshmem(
        bootstrap: Box<dyn Bootstrap>,
        device: usize,
        options: &GroupOptions,
    ) -> Result<Self, Error> {
        #[cfg(feature = "nvshmem")]
        {
            let fabric = NvshmemFabric::new(bootstrap, device, options)?;
            Self::with_fabric(Box::new(fabric))?.checked(options.check_links)
        }
        #[cfg(not(feature = "nvshmem"))]
        not_built("Group::nvshmem", "nvshmem", (bootstrap, device, options))
    }
}

#[cfg(any(feature = "cuda", test))]
impl Group {
    /// This group, after a [check](Self::check_links) of its links if the options ask for one.
    fn checked(self, check_links: bool) -> Result<Self, Error> {
        if !check_links {
            return Ok(self);
        }
        let refused = match self.check_links() {
            Ok(report) if report.is_well() => return Ok(self),
            Ok(report) => LinksError::Bad(Box::new(report)).into(),
            Err(error) => error,
        };
        // On all ranks, as all have the same report, or an error.
        if let Err(error) = self.close() {
            tracing::warn!(%error, "a group whose links were to be checked is not closed");
        }
        Err(refused)
    }
}

/// Error of a call that takes a feature which this build lacks.
#[cfg(not(all(feature = "cuda", feature = "nvshmem")))]
fn not_built<T>(call: &'static str, feature: &'static str, given: T) -> Result<Group, Error> {
    drop(given);
    Err(Error::NotBuilt { call, feature })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group of no GPUs is refused for that, if there are groups of GPUs.
    #[test]
    fn a_group_of_gpus_names_the_feature_that_it_takes() {
        let refused = Group::local(&[], &GroupOptions::default()).err();
        match cfg!(feature = "cuda") {
            true => assert!(matches!(refused, Some(Error::RankCount { ranks: 0 }))),
            false => assert_eq!(
                refused.map(|error| error.to_string()).as_deref(),
                Some(
                    "Group::local needs the feature `cuda` of the crate ferry-ep, which this build lacks"
                )
            ),
        }
    }

    #[cfg(feature = "simulator")]
    #[test]
    fn a_group_with_a_bad_link_is_refused_and_closed_if_its_links_are_checked() {
        use ferry_simulator::{BadLink, BadLinkKind, Options};

        let made = |check_links, kind| {
            let bad_link = Some(BadLink {
                from: 0,
                to: 1,
                kind,
            });
            let options = Options {
                bad_link,
                ..Options::new(2, 3)
            };
            let group = Group::simulated_with(options).unwrap();
            let made = group.clone().checked(check_links);
            (group, made.map(drop))
        };
        for kind in [BadLinkKind::Lost, BadLinkKind::Corrupt, BadLinkKind::Slow] {
            assert!(made(false, kind).1.is_ok(), "{kind:?}");
            let (group, refused) = made(true, kind);
            let Err(Error::Links(LinksError::Bad(report))) = refused else {
                panic!("{kind:?}: {refused:?}");
            };
            assert!(report.bad().all(|link| link.from.0 == 0), "{report}");
            assert!(matches!(group.enter(), Err(Error::GroupClosed)));
        }
        let group = Group::simulated(2, 3).unwrap().checked(true).unwrap();
        assert!(group.enter().is_ok());
    }
}
