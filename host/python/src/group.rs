//! Groups of ranks.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferry::Rank;
use ferry::layout::MAX_RANKS;
use ferry::simulator::{Lost, Options};
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::bootstrap::Bootstrap;
use crate::errors;
use crate::interrupt;
use crate::links::LinkReport;
use crate::process::Own;
use crate::scalars;

/// The ranks that exchange tokens. ``with`` closes it.
///
/// A handle is of use only in the process that made it: a fork gets :class:`ferry_ep.ForkError`.
#[pyclass(frozen, module = "ferry_ep")]
pub(crate) struct Group(Own<Mutex<Option<ferry::Group>>>);

#[pymethods]
impl Group {
    /// Makes ``ranks`` ranks without GPUs in this process, which run the same protocol on the CPU.
    ///
    /// ``seed`` decides every choice of the scheduler. ``warps``: of a kernel on each rank; one begins to
    /// stall in one of ``stall_one_in`` turns (0: never). ``lost=(rank, steps)``: dies after so many turns.
    /// ``patience``: seconds to wait for a missing rank, instead of the deadline. Not collective. Raises
    /// :class:`ferry_ep.GroupError` for other than 1 to 64 ranks, :class:`ferry_ep.ArgumentError`.
    #[staticmethod]
    #[pyo3(signature = (ranks, seed=0, *, warps=4, stall_one_in=64, lost=None, patience=None))]
    fn simulated(
        py: Python<'_>,
        #[pyo3(from_py_with = group_ranks)] ranks: u32,
        #[pyo3(from_py_with = scalars::seed)] seed: u64,
        #[pyo3(from_py_with = scalars::warps)] warps: u32,
        #[pyo3(from_py_with = scalars::stall_one_in)] stall_one_in: u32,
        #[pyo3(from_py_with = scalars::lost)] lost: Option<(u32, u64)>,
        #[pyo3(from_py_with = scalars::patience)] patience: Option<f64>,
    ) -> PyResult<Self> {
        if let Some((rank, _)) = lost.filter(|(rank, _)| *rank >= ranks && ranks > 0) {
            let text = format!("lost is rank {rank}, but there are {ranks} ranks, from 0 on");
            return Err(errors::raise("ArgumentError", text));
        }
        if warps == 0 {
            let text = "warps is 0, but a launch has at least 1";
            return Err(errors::raise("ArgumentError", text));
        }
        let options = Options {
            warps,
            stall_one_in,
            lost: lost.map(|(rank, after_steps)| Lost { rank, after_steps }),
            patience: patience
                .map(|patience| errors::seconds("patience", patience))
                .transpose()?,
            interrupted: Some(interrupt::is_interrupted),
            ..Options::new(ranks, seed)
        };
        Self::made(py.detach(|| ferry::Group::simulated_with(options)))
    }

    /// Makes simulated ranks that are processes, for tests and first steps with ``torchrun``.
    ///
    /// Rank 0's process runs the simulation, and the others talk to it over a Unix socket at ``path``, which
    /// other users cannot open; ``seed`` and ``patience`` are those of rank 0. Collective: returns after all
    /// have joined; ``timeout`` bounds this and later waits for a rank that does not come, in seconds.
    ///
    /// ``key``, bytes or text, names the job: a process with another one is sent away, and all others go on.
    /// Without keys, give each job a path of its own, as processes cannot tell whose rank 0 they found.
    /// Rank 0 replaces no file but a socket at which nobody listens, fails if another rank 0 listens
    /// there, and so do both jobs then, and removes the socket before this returns.
    ///
    /// A process that ends is a lost rank. If rank 0's ends, calls of the others raise
    /// :class:`ferry_ep.SimulatorError` at once.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "keywords of one Python call")]
    #[pyo3(signature = (path, rank, ranks, seed=0, *, patience=None, timeout=30.0, key=None))]
    fn simulated_at(
        py: Python<'_>,
        #[pyo3(from_py_with = scalars::path)] path: PathBuf,
        #[pyo3(from_py_with = scalars::rank)] rank: u32,
        #[pyo3(from_py_with = group_ranks)] ranks: u32,
        #[pyo3(from_py_with = scalars::seed)] seed: u64,
        #[pyo3(from_py_with = scalars::patience)] patience: Option<f64>,
        #[pyo3(from_py_with = scalars::timeout)] timeout: f64,
        #[pyo3(from_py_with = scalars::key)] key: Option<Vec<u8>>,
    ) -> PyResult<Self> {
        let patience = patience.map(|patience| errors::seconds("patience", patience));
        let options = Options {
            patience: patience.transpose()?,
            key: key.unwrap_or_default(),
            interrupted: Some(interrupt::is_interrupted),
            ..Options::new(ranks, seed)
        };
        let timeout = errors::seconds("timeout", timeout)?;
        Self::made(interrupt::detach(py, || {
            ferry::Group::simulated_at(&path, Rank(rank), &options, timeout)
        })?)
    }

    /// Makes a group of one rank per GPU, all driven by this process; rank ``r`` is CUDA device
    /// ``devices[r]``. ``share_gpus`` lets a device be listed twice, to develop and test. ``check_links``
    /// makes :meth:`check_links`, and refuses a group with a bad link. Not collective. Synchronizes.
    ///
    /// Raises :class:`ferry_ep.DeviceError` without a driver, :class:`ferry_ep.GroupError` for unfit devices.
    #[cfg(feature = "cuda")]
    #[staticmethod]
    #[pyo3(signature = (devices, *, share_gpus=false, check_links=false))]
    fn local(
        py: Python<'_>,
        #[pyo3(from_py_with = scalars::devices)] devices: Vec<usize>,
        #[pyo3(from_py_with = scalars::share_gpus)] share_gpus: bool,
        #[pyo3(from_py_with = scalars::check_links)] check_links: bool,
    ) -> PyResult<Self> {
        let options = options(share_gpus, check_links);
        Self::made(py.detach(|| ferry::Group::local(&devices, &options)))
    }

    /// Makes a group of one rank per GPU, all driven by this process; rank ``r`` is CUDA device
    /// ``devices[r]``. ``share_gpus`` lets a device be listed twice, to develop and test. ``check_links``
    /// makes :meth:`check_links`, and refuses a group with a bad link. Not collective. Synchronizes.
    ///
    /// Raises :class:`ferry_ep.DeviceError` without a driver, :class:`ferry_ep.GroupError` for unfit devices.
    #[cfg(not(feature = "cuda"))]
    #[staticmethod]
    #[pyo3(signature = (devices, *, share_gpus=false, check_links=false))]
    fn local(
        #[pyo3(from_py_with = scalars::devices)] devices: Vec<usize>,
        #[pyo3(from_py_with = scalars::share_gpus)] share_gpus: bool,
        #[pyo3(from_py_with = scalars::check_links)] check_links: bool,
    ) -> PyResult<Self> {
        let _ = (devices, share_gpus, check_links);
        Err(not_built("cuda"))
    }

    /// Makes a group of one process per GPU of one node, which needs nothing but the driver. ``device`` is
    /// this process's CUDA device. ``check_links`` as in :meth:`local`. Collective. Synchronizes.
    ///
    /// Raises as :meth:`local`, and :class:`ferry_ep.BootstrapError`, :class:`ferry_ep.PeerFailed`.
    #[staticmethod]
    #[pyo3(signature = (bootstrap, device, *, share_gpus=false, check_links=false))]
    fn node(
        py: Python<'_>,
        bootstrap: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = scalars::device)] device: usize,
        #[pyo3(from_py_with = scalars::share_gpus)] share_gpus: bool,
        #[pyo3(from_py_with = scalars::check_links)] check_links: bool,
    ) -> PyResult<Self> {
        #[cfg(feature = "cuda")]
        {
            let bootstrap = scalars::handle::<Bootstrap>("bootstrap", bootstrap)?;
            let (bootstrap, options) = (bootstrap.get().take()?, options(share_gpus, check_links));
            Self::made(py.detach(|| ferry::Group::node(bootstrap, device, &options)))
        }
        #[cfg(not(feature = "cuda"))]
        {
            scalars::handle::<Bootstrap>("bootstrap", bootstrap)?;
            let _ = (py, device, share_gpus, check_links);
            Err(not_built("cuda"))
        }
    }

    /// Makes a group of one process per GPU of several nodes, in a build with the feature ``nvshmem``;
    /// ``library`` is the path of NVSHMEM's. Collective. Synchronizes. Raises as :meth:`node`, and
    /// :class:`ferry_ep.NotBuiltError`.
    #[staticmethod]
    #[pyo3(signature = (bootstrap, device, *, share_gpus=false, check_links=false, library=None))]
    fn nvshmem(
        py: Python<'_>,
        bootstrap: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = scalars::device)] device: usize,
        #[pyo3(from_py_with = scalars::share_gpus)] share_gpus: bool,
        #[pyo3(from_py_with = scalars::check_links)] check_links: bool,
        #[pyo3(from_py_with = scalars::library)] library: Option<PathBuf>,
    ) -> PyResult<Self> {
        #[cfg(feature = "nvshmem")]
        {
            let options = ferry::GroupOptions {
                nvshmem_library: library,
                ..options(share_gpus, check_links)
            };
            let bootstrap = scalars::handle::<Bootstrap>("bootstrap", bootstrap)?;
            let bootstrap = bootstrap.get().take()?;
            Self::made(py.detach(|| ferry::Group::nvshmem(bootstrap, device, &options)))
        }
        #[cfg(not(feature = "nvshmem"))]
        {
            scalars::handle::<Bootstrap>("bootstrap", bootstrap)?;
            let _ = (py, device, share_gpus, check_links, library);
            Err(not_built("nvshmem"))
        }
    }

    /// ``"simulated"``, ``"local"``, ``"node"`` or ``"nvshmem"``.
    #[getter]
    fn kind(&self) -> PyResult<&'static str> {
        Ok(self.open()?.name())
    }

    /// Number of ranks of the whole group.
    #[getter]
    fn ranks(&self) -> PyResult<u32> {
        Ok(self.open()?.ranks())
    }

    /// Ranks that this process drives, ascending.
    #[getter]
    fn local_ranks(&self) -> PyResult<Vec<u32>> {
        let ranks = self.open()?.local_ranks();
        Ok(ranks.into_iter().map(|Rank(rank)| rank).collect())
    }

    /// Returns the device of a local rank: ``"cuda:0"``, or ``"simulated"``.
    fn device(&self, #[pyo3(from_py_with = scalars::rank)] rank: u32) -> PyResult<String> {
        let group = self.open()?;
        group.device(Rank(rank)).map_err(errors::from)?;
        Ok(device_name(&group, Rank(rank)))
    }

    /// Stores over every link between ranks, and says which are bad. Collective. Synchronizes.
    fn check_links(&self, py: Python<'_>) -> PyResult<LinkReport> {
        let group = self.open_outside_waits()?;
        let report = interrupt::detach(py, || group.check_links())?;
        report.map(LinkReport).map_err(errors::from)
    }

    /// Leaves the group. Collective. Synchronizes. Raises :class:`ferry_ep.InUseError` while it has open
    /// communicators: nothing was done then.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let group = self.open_outside_waits()?;
        interrupt::detach(py, || group.close())?.map_err(errors::from)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (kind, error, traceback))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        error: Option<&Bound<'_, PyAny>>,
        traceback: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _ = (error, traceback);
        if kind.is_none() {
            return self.close(py);
        }
        let group = self.open()?;
        if group.local_ranks().len() == group.ranks() as usize {
            // Waits for nobody. The exception under way says more than an error.
            let _ = py.detach(|| group.close());
        } else {
            drop(self.slot()?.take());
        }
        Ok(())
    }

    fn __repr__(&self) -> String {
        match (self.0.get("group").is_ok(), self.open()) {
            (false, _) => String::from("<ferry_ep.Group of another process>"),
            (_, Err(_)) => String::from("<ferry_ep.Group, left>"),
            (_, Ok(group)) => {
                let local: Vec<_> = group.local_ranks().iter().map(|rank| rank.0).collect();
                let (name, ranks) = (group.name(), group.ranks());
                format!("<ferry_ep.Group {name}, {ranks} ranks, here {local:?}>")
            }
        }
    }
}

impl Group {
    /// The group, unless this process is a fork or has left it.
    pub(crate) fn open(&self) -> PyResult<ferry::Group> {
        let group = self.slot()?.clone();
        group.ok_or_else(|| errors::raise("ClosedError", "the group was left with an exception"))
    }

    /// The group, for a call that takes its locks. `BusyError` in the handler of a signal that runs within a
    /// wait of this thread.
    pub(crate) fn open_outside_waits(&self) -> PyResult<ferry::Group> {
        if interrupt::is_within_wait() {
            let text = "a signal's handler, which runs within a wait of this thread, neither closes a group \
                        nor makes communicators";
            return Err(errors::raise("BusyError", text));
        }
        self.open()
    }

    fn slot(&self) -> PyResult<MutexGuard<'_, Option<ferry::Group>>> {
        let slot = self.0.get("group")?;
        Ok(slot.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn made(group: Result<ferry::Group, ferry::Error>) -> PyResult<Self> {
        group
            .map(|group| Self(Own::new(Mutex::new(Some(group)))))
            .map_err(errors::from)
    }
}

/// Reads the number of a group's ranks: any whole number is the group's to refuse.
fn group_ranks(given: &Bound<'_, PyAny>) -> PyResult<u32> {
    let read = scalars::ranks(given);
    let is_number = given.is_exact_instance_of::<PyInt>();
    read.map_err(|error| match is_number {
        true => {
            let text = format!("ranks is {given}, but a group has 1 to {MAX_RANKS}");
            errors::raise("GroupError", text)
        }
        false => error,
    })
}

/// Kind and number of a rank's device.
pub(crate) fn device_name(group: &ferry::Group, rank: Rank) -> String {
    #[cfg(feature = "cuda")]
    if let Some(cuda) = group.cuda(rank) {
        return format!("cuda:{}", cuda.ordinal());
    }
    let _ = rank;
    group.name().to_owned()
}

#[cfg(feature = "cuda")]
fn options(share_gpus: bool, check_links: bool) -> ferry::GroupOptions {
    ferry::GroupOptions {
        share_gpus,
        check_links,
        ..ferry::GroupOptions::default()
    }
}

#[cfg(not(feature = "nvshmem"))]
fn not_built(feature: &str) -> PyErr {
    errors::raise(
        "NotBuiltError",
        format!("this build of ferry_ep has no feature {feature}; the guide says how to build one"),
    )
}
