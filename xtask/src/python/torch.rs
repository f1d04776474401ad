//! The tests with torch, in an environment outside the checkout, as torch takes gigabytes.

use std::path::Path;

use anyhow::{Context, Result, bail};
use xshell::cmd;

use super::{PACKAGE, environment, install, shell, wheel};
use crate::places::Places;

/// Packages that `import torch` needs on a CPU, which is less than torch requires: its libraries of CUDA are
/// loaded by the first use of a GPU, except those in [`LINKED`].
const IMPORTED: [&str; 8] = [
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "numpy",
    "sympy",
    "typing-extensions",
    "pytest",
];
/// Libraries that torch's own ones link, so that it is not imported without them.
const LINKED: [&str; 0] = [];

/// Runs the tests, and makes the environment before if `make` is set.
pub(super) fn run(places: &Places, at: &Path, make: bool, arguments: &[String]) -> Result<()> {
    let shell = shell(places)?;
    let programs = at.join("bin");
    if make {
        environment(&shell, at)?;
        let pip = ["-m", "pip", "install", "--disable-pip-version-check"];
        cmd!(shell, "{programs}/python {pip...} --quiet")
            .args(IMPORTED)
            .run()?;
        cmd!(shell, "{programs}/python {pip...} --no-deps torch")
            .args(LINKED)
            .run()?;
    } else if !programs.join("python").is_file() {
        bail!(
            "there is no environment in {}; `cargo xtask test-python --torch --make` makes one",
            at.display()
        );
    }
    install(&shell, &programs, &wheel(places)?, &[])?;
    let tests = places.root.join(PACKAGE).join("tests");
    shell.change_dir(at);
    cmd!(
        shell,
        "{programs}/python -m pytest -q -p no:cacheprovider {tests}"
    )
    .args(arguments)
    .quiet()
    .env("PYTHONDONTWRITEBYTECODE", "1")
    .run()
    .context("the tests with torch failed")
}
