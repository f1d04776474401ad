//! `cargo xtask test --rest`: what `--full` runs, without what `cargo xtask test` has run just so.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::builds;

/// Packages that read variables of the quick tests: one draws seeds, the other counts preemptions.
const READ_VARIABLES: [&str; 2] = ["ferry-rig", "loom"];

type Packages = BTreeMap<String, Vec<(String, bool)>>;

/// Names of the packages that the quick tests run as `--full` does: neither they nor what they depend on has
/// other `features` there, of the form `package/feature,..`, or reads the quick tests' variables.
///
/// # Errors
///
/// Cargo does not tell the workspace's packages.
pub(crate) fn run_by_quick(root: &Path, features: &str) -> Result<Vec<String>> {
    Ok(alike(&workspace(root)?, features))
}

/// The workspace's packages with their dependencies, each with whether only the package's tests need it.
fn workspace(root: &Path) -> Result<Packages> {
    let package = |package: &Value| {
        let dependency = |dependency: &Value| {
            let name = dependency["name"].as_str()?.to_owned();
            Some((name, dependency["kind"] == "dev"))
        };
        let dependencies = package["dependencies"].as_array()?.iter();
        let dependencies = dependencies.map(dependency).collect::<Option<_>>()?;
        Some((package["name"].as_str()?.to_owned(), dependencies))
    };
    let packages = builds::packages(root, &["--no-deps", "--offline"])?;
    let packages: Option<_> = packages.iter().map(package).collect();
    packages.context("`cargo metadata` has another form")
}

fn alike(packages: &Packages, features: &str) -> Vec<String> {
    let others = features
        .split(',')
        .filter_map(|feature| feature.split('/').next());
    let others: BTreeSet<&str> = others.chain(READ_VARIABLES).collect();
    let is_alike = |name: &&String| {
        let (mut seen, mut left) = (BTreeSet::new(), vec![name.as_str()]);
        while let Some(at) = left.pop() {
            if !seen.insert(at) {
                continue;
            }
            // Tests of a dependency are not part of this package's.
            let needed = packages.get(at).into_iter().flatten();
            let needed = needed.filter(|(_, is_for_tests)| !is_for_tests || at == name.as_str());
            left.extend(needed.map(|(name, _)| name.as_str()));
        }
        seen.is_disjoint(&others)
    };
    packages.keys().filter(is_alike).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::places::Places;
    use crate::test::ALL_TESTS;

    #[test]
    fn what_depends_on_seeds_loom_or_other_features_is_run_again() {
        let of = |dependencies: &[(&str, bool)]| {
            let owned = dependencies
                .iter()
                .map(|(name, dev)| ((*name).to_owned(), *dev));
            owned.collect::<Vec<_>>()
        };
        let packages = [
            ("by-dev", of(&[("middle", true)])),
            ("ferry-rig", of(&[])),
            ("gpu", of(&[("plain", false)])),
            ("middle", of(&[("gpu", false)])),
            ("modelled", of(&[("loom", true)])),
            ("of-modelled", of(&[("modelled", false)])),
            ("plain", of(&[("serde", false)])),
            ("seeded", of(&[("ferry-rig", true)])),
        ];
        let packages = packages
            .map(|(name, needed)| (name.to_owned(), needed))
            .into();
        assert_eq!(
            alike(&packages, "gpu/cuda,other/x"),
            ["of-modelled", "plain"]
        );
    }

    #[test]
    fn these_packages_are_tested_by_both() {
        let all = workspace(&Places::find().root).unwrap();
        let quick = alike(&all, ALL_TESTS[2]);
        let rest: Vec<&String> = all.keys().filter(|name| !quick.contains(name)).collect();
        let wanted = [
            "ferry-c",
            "ferry-ep",
            "ferry-ep-protocol",
            "ferry-ep-python",
            "ferry-rig",
            "ferry-tests",
        ];
        assert_eq!(rest, wanted);
    }
}
