//! Bootstraps: the exchange of bytes between processes before they have a group.

use std::net::ToSocketAddrs;
use std::sync::{Mutex, PoisonError};

use ferry::bootstrap::{FnBootstrap, TcpBootstrap};
use ferry::error::BootstrapError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors;
use crate::interrupt;
use crate::process::Own;
use crate::scalars;

type Inner = Box<dyn ferry::bootstrap::Bootstrap>;

/// The way from this process to the group's other ones, until a group takes it.
#[pyclass(frozen, module = "ferry_ep")]
pub(crate) struct Bootstrap {
    inner: Own<Mutex<Option<Inner>>>,
    /// Rank of this process.
    #[pyo3(get)]
    rank: u32,
    /// Number of processes.
    #[pyo3(get)]
    ranks: u32,
}

#[pymethods]
impl Bootstrap {
    /// Meets the other processes at ``"host:port"``, where rank 0 listens. Collective.
    ///
    /// ``timeout`` in seconds bounds this call and each round of later ones. ``key`` is a secret that all or
    /// none have: 32 random bytes. Raises :class:`ferry_ep.BootstrapError`, with ``lost_rank`` if known.
    #[staticmethod]
    #[pyo3(signature = (address, rank, ranks, *, timeout=30.0, key=None))]
    fn tcp(
        py: Python<'_>,
        #[pyo3(from_py_with = scalars::address)] address: String,
        #[pyo3(from_py_with = scalars::rank)] rank: u32,
        #[pyo3(from_py_with = scalars::ranks)] ranks: u32,
        #[pyo3(from_py_with = scalars::timeout)] timeout: f64,
        #[pyo3(from_py_with = scalars::key)] key: Option<Vec<u8>>,
    ) -> PyResult<Self> {
        let timeout = errors::seconds("timeout", timeout)?;
        let found = address.to_socket_addrs().map(|mut found| found.next());
        let at = found.ok().flatten().ok_or_else(|| {
            let text = format!("address is {address:?}, but it is \"host:port\" of rank 0");
            errors::raise("ArgumentError", text)
        })?;
        let met = interrupt::on_thread(py, move || match key {
            Some(key) => TcpBootstrap::connect_with_key(rank, ranks, at, timeout, &key),
            None => TcpBootstrap::connect(rank, ranks, at, timeout),
        })?;
        Ok(Self::new(
            rank,
            ranks,
            Box::new(met.map_err(errors::from_any)?),
        ))
    }

    /// Wraps an all-gather of your own: ``function`` takes this rank's bytes, and returns those of every
    /// rank, by rank.
    ///
    /// It returns only after all ranks have called theirs as often, bounds its wait, and is called in the
    /// thread that calls Ferry. Ranks share memory by what it returns, so it must not mix calls or ranks. An
    /// exception becomes :class:`ferry_ep.BootstrapError`; one with an attribute ``lost_rank`` names the lost
    /// rank.
    #[staticmethod]
    fn all_gather(
        py: Python<'_>,
        function: Py<PyAny>,
        #[pyo3(from_py_with = scalars::rank)] rank: u32,
        #[pyo3(from_py_with = scalars::ranks)] ranks: u32,
    ) -> PyResult<Self> {
        if !function.bind(py).is_callable() {
            let text = "function cannot be called, but it gathers bytes of all ranks";
            return Err(errors::raise("ArgumentError", text));
        }
        let gather = move |bytes: &[u8]| call(&function, bytes);
        // SAFETY: the caller's function gathers as `Bootstrap` promises, and no other process has this rank:
        // documented on `ferry_ep.Bootstrap.all_gather`.
        let inner = unsafe { FnBootstrap::new(rank, ranks, gather) };
        let inner = inner.map_err(errors::from_any)?;
        Ok(Self::new(rank, ranks, Box::new(inner)))
    }

    /// Returns every rank's bytes, by rank. Collective.
    fn gather<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = scalars::bytes)] bytes: Vec<u8>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let gathered = self.with(|inner| py.detach(|| inner.all_gather(&bytes)))?;
        let all = gathered.map_err(errors::from_any)?;
        Ok(all.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    fn __repr__(&self) -> String {
        format!("<ferry_ep.Bootstrap rank {} of {}>", self.rank, self.ranks)
    }
}

impl Bootstrap {
    fn new(rank: u32, ranks: u32, inner: Inner) -> Self {
        Self {
            inner: Own::new(Mutex::new(Some(inner))),
            rank,
            ranks,
        }
    }

    fn with<R>(&self, act: impl FnOnce(&mut Inner) -> R) -> PyResult<R> {
        let mut inner =
            (self.inner.get("bootstrap")?.lock()).unwrap_or_else(PoisonError::into_inner);
        inner.as_mut().map(act).ok_or_else(taken)
    }

    /// Takes the bootstrap out, for a group.
    #[cfg(feature = "cuda")]
    pub(crate) fn take(&self) -> PyResult<Inner> {
        let mut inner =
            (self.inner.get("bootstrap")?.lock()).unwrap_or_else(PoisonError::into_inner);
        inner.take().ok_or_else(taken)
    }
}

fn taken() -> PyErr {
    errors::raise("ClosedError", "the bootstrap was given to a group already")
}

/// Calls the user's function. An exception with an attribute `lost_rank` names the lost rank.
fn call(function: &Py<PyAny>, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
    Python::attach(|py| {
        let gathered = function.call1(py, (PyBytes::new(py, bytes),));
        gathered
            .and_then(|all| all.extract::<Vec<Vec<u8>>>(py))
            .map_err(|error| {
                let lost = error.value(py).getattr("lost_rank");
                let reason = error.to_string();
                match lost.and_then(|rank| rank.extract::<u32>()) {
                    Ok(rank) => BootstrapError::Lost { rank, reason },
                    Err(_) => BootstrapError::Other {
                        call: "the all-gather function",
                        reason,
                    },
                }
            })
    })
}
