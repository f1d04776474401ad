//! Combines with options: each alone and all together, in every element, in both modes, fused and
//! split, with Ferry's own steps and with the epilogue of a crate of its own.

use anyhow::{Error, Result};
use ferry::layout::OutputElement;
use ferry::{Config, Group};

use super::{Outcome, Suite};
use crate::group::GroupKind;
use ferry_rig::{Case, Options, Return, Run, caught, gpu_case, run_own};

/// Cases of each kind.
const CASES: u64 = 24;

const ALL: Options = Options {
    row_scales: true,
    biases: [true; 2],
    residual: true,
    row_weights: true,
    element: OutputElement::F32,
};

pub(super) fn run(suite: &mut Suite<'_>) -> Result<()> {
    let each_alone = Options::ALONE.into_iter().chain([("all", ALL)]);
    let named = each_alone.map(|(name, options)| (name, Some(options)));
    for (name, options) in named.chain([("any", None)]) {
        suite.check(&format!("combine with options: {name}"), |suite| {
            let group = suite.group().clone();
            each(suite, |case, config| {
                let case = Case {
                    finish: options.or(Some(Options::any(case.seed))),
                    ..case.clone()
                };
                Run::on(&group, config, &case, &case.problems(), |_, _| {}).expect_success();
            })
        })?;
    }
    suite.check("combine with an epilogue of a crate of its own", |suite| {
        let Some(group) = own_group(suite)? else {
            return Ok(Outcome::Skipped("not on local GPUs".into()));
        };
        each(suite, |case, config| run_own(&group, case, config))
    })
}

/// Cases in both modes, fused and split.
fn each(suite: &Suite<'_>, run: impl Fn(&Case, Config)) -> Result<Outcome> {
    let first = suite.args.seed * 1000;
    for seed in first..first + CASES {
        let case = gpu_case(seed, suite.ranks(), suite.ranks());
        let case = Case {
            how: [Return::Reduced, Return::Exact][seed as usize % 2],
            split: [0, u64::MAX][seed as usize / 2 % 2],
            tokens: case.tokens[..2].to_vec(),
            options: true,
            shared_expert: seed.is_multiple_of(3),
            counted: None,
            ..case
        };
        let config = Config {
            deadline: suite.deadline(),
            ..case.config()
        };
        caught(|| run(&case, config)).map_err(Error::msg)?;
    }
    Ok(Outcome::Passed)
}

/// A group whose kernels with options have the epilogue.
fn own_group(suite: &Suite<'_>) -> Result<Option<Group>> {
    Ok(match suite.args.group {
        #[cfg(feature = "cuda")]
        GroupKind::Local => {
            let options = suite.args.group_options(suite.ranks());
            let of = |text: &str| {
                // SAFETY: the kernels are Ferry's with an epilogue that reads what the test gives it.
                let kernels = unsafe { ferry::Kernels::default().with_epilogue(text) }?;
                let of_library = options.of_library(kernels);
                anyhow::Ok(Group::local(&options.devices(), &of_library)?)
            };
            match of(include_str!(env!("FERRY_EPILOGUE_PTX_SM_90A"))) {
                Ok(group) => Some(group),
                Err(_) => Some(of(include_str!(env!("FERRY_EPILOGUE_PTX_SM_80")))?),
            }
        }
        GroupKind::Simulated => {
            use ferry::simulator::{Combines, Options};
            Some(Group::simulated_with(Options {
                combines: Combines::with::<ferry_own_epilogue::LimitedWithOffsets>(),
                ..Options::new(suite.ranks() as u32, suite.args.seed)
            })?)
        }
        _ => None,
    })
}
