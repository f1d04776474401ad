//! Rounds where every rank has all tokens, so that nothing travels.

use anyhow::{Error, Result};
use ferry::{Config, TokenFormat};
use ferry_reference::workload::Routing;

use super::{Outcome, Suite};
use ferry_rig::{Case, Return, Run, caught};

pub(super) fn run(suite: &mut Suite<'_>) -> Result<()> {
    let quick = suite.is_simulated() || suite.args.quick;
    for mut case in cases(suite.ranks(), quick) {
        case.specialise &= !suite.args.general;
        let tokens: Vec<usize> = case.tokens.iter().map(|ranks| ranks[0]).collect();
        let name = format!(
            "skip_a2a: {} {:?}, {:?}, {:?}{}, {tokens:?} tokens",
            case.format.name(),
            case.format.scale_layout(),
            case.how,
            case.routing,
            if case.shared_expert {
                ", shared expert"
            } else {
                ""
            },
        );
        suite.check(&name, |suite| {
            let config = Config {
                deadline: suite.deadline(),
                ..case.config()
            };
            let run = || {
                Run::on(suite.group(), config, &case, &case.problems(), |_, _| {}).expect_success();
            };
            let result = caught(run).map_err(Error::msg);
            suite.open.agree(result)?;
            Ok(Outcome::Passed)
        })?;
    }
    Ok(())
}

/// Cases of so many ranks: every format and way, from no token to thousands. `quick`: fewer tokens, smaller
/// rows.
fn cases(ranks: usize, quick: bool) -> Vec<Case> {
    let (most, hidden, experts) = if quick {
        (40, 256, 6 * ranks)
    } else {
        (4096, 7168, 64 * ranks)
    };
    let tokens_of = |tokens: &[usize]| -> Vec<Vec<usize>> {
        let tokens = tokens.iter().map(|&tokens| tokens.min(most));
        tokens.map(|tokens| vec![tokens; ranks]).collect()
    };
    let mut cases = Vec::new();
    for (number, &format) in TokenFormat::ALL.iter().enumerate() {
        for (way, how) in Return::ALL.into_iter().enumerate() {
            let seed = (3 * number + way) as u64;
            let case = Case {
                ranks,
                experts,
                top_k: 8.min(experts),
                hidden,
                tokens: tokens_of(&[128, 1, 0, 1024, 7]),
                most_tokens: most.min(1024),
                routing: match seed % 3 {
                    0 => Routing::Uniform,
                    1 => Routing::Duplicates,
                    _ => Routing::Holes { probability: 0.4 },
                },
                format,
                how,
                spare_rows: way,
                shared_expert: how != Return::Apart && seed.is_multiple_of(2),
                skip_a2a: true,
                ..Case::small(seed)
            };
            cases.push(case.clone());
            if how != Return::Reduced {
                continue;
            }
            // Rows that no tile divides, of tokens many of which have no expert, long and short ones in turn.
            cases.push(Case {
                hidden: case.hidden + 128,
                top_k: 2.min(case.experts),
                tokens: tokens_of(&[4096, 300]),
                routing: Routing::Holes { probability: 0.6 },
                ..case.clone()
            });
            // The largest take long to work out.
            if !quick {
                cases.push(Case {
                    tokens: tokens_of(&[4096]),
                    specialise: true,
                    ..case
                });
            }
        }
    }
    cases
}
