//! Groups of ranks.

use std::path::PathBuf;

use ferry::Rank;
use ferry::simulator::{Lost, Options};
use pyo3::prelude::*;

use crate::bootstrap::Bootstrap;
use crate::errors;
use crate::process::Own;

/// The ranks that exchange tokens.
#[pyclass(frozen, module = "ferry_ep")]
pub(crate) struct Group(Own<ferry::Group>);

#[pymethods]
impl Group {
    #[staticmethod]
    #[pyo3(signature = (ranks, seed=0, *, warps=4, stall_one_in=64, lost=None, patience=None))]
    fn simulated(
        py: Python<'_>,
        ranks: u32,
        seed: u64,
        warps: u32,
        stall_one_in: u32,
        lost: Option<(u32, u64)>,
        patience: Option<f64>,
    ) -> PyResult<Self> {
        let options = Options {
            warps,
            stall_one_in,
            lost: lost.map(|(rank, after_steps)| Lost { rank, after_steps }),
            patience: patience
                .map(|patience| errors::seconds("patience", patience))
                .transpose()?,
            ..Options::new(ranks, seed)
        };
        Self::made(py.detach(|| ferry::Group::simulated_with(options)))
    }

    #[staticmethod]
    #[pyo3(signature = (path, rank, ranks, seed=0, *, patience=None, timeout=30.0))]
    fn simulated_at(
        py: Python<'_>,
        path: PathBuf,
        rank: u32,
        ranks: u32,
        seed: u64,
        patience: Option<f64>,
        timeout: f64,
    ) -> PyResult<Self> {
        let patience = patience.map(|patience| errors::seconds("patience", patience));
        let options = Options {
            patience: patience.transpose()?,
            ..Options::new(ranks, seed)
        };
        let timeout = errors::seconds("timeout", timeout)?;
        Self::made(py.detach(|| ferry::Group::simulated_at(&path, Rank(rank), &options, timeout)))
    }

    #[cfg(feature = "cuda")]
    #[staticmethod]
    #[pyo3(signature = (devices, *, share_gpus=false))]
    fn local(py: Python<'_>, devices: Vec<usize>, share_gpus: bool) -> PyResult<Self> {
        let options = options(share_gpus);
        Self::made(py.detach(|| ferry::Group::local(&devices, &options)))
    }

    #[cfg(not(feature = "cuda"))]
    #[staticmethod]
    #[pyo3(signature = (devices, *, share_gpus=false))]
    fn local(devices: Vec<usize>, share_gpus: bool) -> PyResult<Self> {
        let _ = (devices, share_gpus);
        Err(not_built("cuda"))
    }

    #[staticmethod]
    #[pyo3(signature = (bootstrap, device, *, share_gpus=false))]
    fn node(
        py: Python<'_>,
        bootstrap: &Bootstrap,
        device: usize,
        share_gpus: bool,
    ) -> PyResult<Self> {
        #[cfg(feature = "cuda")]
        {
            let (bootstrap, options) = (bootstrap.take()?, options(share_gpus));
            Self::made(py.detach(|| ferry::Group::node(bootstrap, device, &options)))
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (py, bootstrap, device, share_gpus);
            Err(not_built("cuda"))
        }
    }

    #[staticmethod]
    #[pyo3(signature = (bootstrap, device, *, share_gpus=false, library=None))]
    fn nvshmem(
        py: Python<'_>,
        bootstrap: &Bootstrap,
        device: usize,
        share_gpus: bool,
        library: Option<PathBuf>,
    ) -> PyResult<Self> {
        #[cfg(feature = "nvshmem")]
        {
            let options = ferry::GroupOptions {
                nvshmem_library: library,
                ..options(share_gpus)
            };
            let bootstrap = bootstrap.take()?;
            Self::made(py.detach(|| ferry::Group::nvshmem(bootstrap, device, &options)))
        }
        #[cfg(not(feature = "nvshmem"))]
        {
            let _ = (py, bootstrap, device, share_gpus, library);
            Err(not_built("nvshmem"))
        }
    }

    #[getter]
    fn kind(&self) -> PyResult<&'static str> {
        Ok(self.open()?.name())
    }

    #[getter]
    fn ranks(&self) -> PyResult<u32> {
        Ok(self.open()?.ranks())
    }

    #[getter]
    fn local_ranks(&self) -> PyResult<Vec<u32>> {
        let ranks = self.open()?.local_ranks();
        Ok(ranks.into_iter().map(|Rank(rank)| rank).collect())
    }

    /// The device of a local rank: "simulated", "cuda:1".
    fn device(&self, rank: u32) -> PyResult<String> {
        let group = self.open()?;
        group.device(Rank(rank)).map_err(errors::from)?;
        Ok(device_name(group, Rank(rank)))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let group = self.open()?;
        py.detach(|| group.close()).map_err(errors::from)
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
        match self.close(py) {
            // The exception under way says more.
            Err(_) if kind.is_some() => Ok(()),
            closed => closed,
        }
    }

    fn __repr__(&self) -> PyResult<String> {
        let group = self.open()?;
        Ok(format!(
            "<ferry_ep.Group {}, {} ranks, here {:?}>",
            group.name(),
            group.ranks(),
            self.local_ranks()?
        ))
    }
}

impl Group {
    /// The group, unless this process is a fork.
    pub(crate) fn open(&self) -> PyResult<&ferry::Group> {
        self.0.get("group")
    }

    fn made(group: Result<ferry::Group, ferry::Error>) -> PyResult<Self> {
        group
            .map(|group| Self(Own::new(group)))
            .map_err(errors::from)
    }
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
fn options(share_gpus: bool) -> ferry::GroupOptions {
    ferry::GroupOptions {
        share_gpus,
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
