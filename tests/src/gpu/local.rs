//! Rounds where every rank has all tokens, so that nothing travels.

use anyhow::Result;

use super::{Outcome, Suite};
use crate::local::gpu_cases;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    let quick = suite.is_simulated() || suite.args.quick;
    for mut case in gpu_cases(suite.ranks(), quick) {
        case.specialise &= !suite.args.general;
        let name = format!(
            "skip_a2a: {} {:?}, {:?}, {:?}{}, {:?} tokens",
            case.format.name(),
            case.format.scale_layout(),
            case.how,
            case.routing,
            if case.shared_expert {
                ", shared expert"
            } else {
                ""
            },
            case.tokens,
        );
        suite.check(&name, |suite| {
            let result = case.run(suite.group(), suite.deadline());
            suite.open.agree(result)?;
            Ok(Outcome::Passed)
        })?;
    }
    Ok(())
}
