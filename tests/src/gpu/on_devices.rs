//! Cases that need the CUDA devices of this process: of the crates whose streams and memory are taken.

use std::sync::Arc;

use anyhow::Result;
use ferry::cuda::CudaDevice;

use super::{Outcome, Suite};

/// The devices of this process's ranks.
pub type Devices = Vec<Arc<CudaDevice>>;

/// A case.
pub type Case = fn(&Suite<'_>, &Devices) -> Result<()>;

/// Runs the cases of a crate; they are skipped where the ranks have no CUDA devices.
pub fn check(suite: &mut Suite<'_>, of: &str, cases: &[(&str, Case)]) -> Result<()> {
    for (name, case) in cases {
        suite.check(&format!("{of}: {name}"), |suite| match devices(suite) {
            Some(devices) => case(suite, &devices).map(|()| Outcome::Passed),
            None => Ok(Outcome::Skipped("not on GPUs".into())),
        })?;
    }
    Ok(())
}

/// `None` where they are not CUDA's.
fn devices(suite: &Suite<'_>) -> Option<Devices> {
    let ranks = suite.group().local_ranks().into_iter();
    ranks.map(|rank| suite.group().cuda(rank)).collect()
}
