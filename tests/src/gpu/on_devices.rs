//! Cases on this process's CUDA devices, for the crates whose streams and memory Ferry takes.

use std::sync::Arc;

use anyhow::{Result, bail};
use ferry::Error;
use ferry::cuda::CudaDevice;

use super::{Outcome, Suite};

/// Devices of this process's ranks.
pub type Devices = Vec<Arc<CudaDevice>>;

/// A case on these devices.
pub type Case = fn(&Suite<'_>, &Devices) -> Result<()>;

/// Runs the cases of a crate; they are skipped if the ranks have no CUDA devices.
pub fn check(suite: &mut Suite<'_>, of: &str, cases: &[(&str, Case)]) -> Result<()> {
    for (name, case) in cases {
        suite.check(&format!("{of}: {name}"), |suite| match devices(suite) {
            Some(devices) => case(suite, &devices).map(|()| Outcome::Passed),
            None => Ok(Outcome::Skipped("not on GPUs".into())),
        })?;
    }
    Ok(())
}

/// Devices of this process's ranks; `None` if they are not CUDA's.
fn devices(suite: &Suite<'_>) -> Option<Devices> {
    let ranks = suite.group().local_ranks().into_iter();
    ranks.map(|rank| suite.group().cuda(rank)).collect()
}

/// Checks that a result is the refusal of what belongs elsewhere.
pub fn require_refused<T>(what: &str, result: Result<T, Error>) -> Result<()> {
    match result {
        Err(Error::OtherDevice { .. }) => Ok(()),
        Err(error) => bail!("{what}: {error}"),
        Ok(_) => bail!("{what} is taken"),
    }
}
