//! The fused SiLU kernels on every local device.

use anyhow::Result;

use super::{Outcome, Suite};
use crate::silu::cases;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    let large = !suite.is_simulated() && !suite.args.quick;
    for format in crate::silu::formats() {
        let name = format!(
            "fused SiLU to {} {:?}",
            format.name(),
            format.scale_layout()
        );
        suite.check(&name, |suite| {
            for rank in suite.ranks_by_gpu() {
                let device = suite.group().device(rank)?;
                let stream = device.stream()?;
                for case in cases(large).iter().filter(|case| case.format == format) {
                    case.run(&*device, stream)
                        .map_err(|error| error.context(case.name()))?;
                }
            }
            Ok(Outcome::Passed)
        })?;
    }
    Ok(())
}
