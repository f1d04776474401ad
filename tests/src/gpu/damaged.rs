//! Windows that a peer has damaged.

use anyhow::{Context, Result};

use super::{Outcome, Suite};
use crate::damaged::DamagedCase;
use crate::group::GroupKind;

/// Bytes of each guard zone before and after an allocation.
const GUARD_BYTES: u64 = 64 << 10;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    let windows = if suite.args.quick { 60 } else { 1_000 };
    let name = format!("{windows} damaged windows, guard zones around every allocation");
    suite.check(&name, |suite| damage(suite, windows))
}

fn damage(suite: &Suite<'_>, wanted: u64) -> Result<Outcome> {
    if suite.args.group.has_processes() {
        let why = "with several processes, a communicator that gave up keeps its windows";
        return Ok(Outcome::Skipped(why.into()));
    }
    let first = suite.args.seed * 1_000_000;
    let (mut seed, mut windows) = (first, 0);
    while windows < wanted {
        // In the simulator, a case has ranks of its own, whose every access is checked.
        let outcome = match suite.args.group {
            GroupKind::Simulated => DamagedCase::of(seed, None).simulate(),
            _ => DamagedCase::of(seed, Some(suite.ranks())).run_on(suite.group(), GUARD_BYTES),
        };
        windows += outcome.with_context(|| format!("seed {seed}"))?;
        seed += 1;
    }
    Ok(Outcome::Measured(format!(
        "{windows} windows of seeds {first}..{seed}"
    )))
}
