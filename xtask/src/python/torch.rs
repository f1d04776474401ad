//! The tests with torch, in an environment outside the checkout, as torch takes gigabytes.

use std::path::Path;

use anyhow::{Context, Result, bail};
use xshell::cmd;

use super::{PACKAGE, environment, shell, wheel};
use crate::places::Places;

/// Packages that `import torch`, `torch.compile` and the tests need.
const IMPORTED: [&str; 9] = [
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "numpy",
    "pytest",
    "setuptools",
    "sympy",
    "typing-extensions",
];

/// Prints those of torch's requirements whose libraries its own ones link: without them it is not imported,
/// also on a CPU. Triton and CUDA's bindings for Python are left out.
const LINKED: &str = "
import importlib.metadata as metadata
for requirement in metadata.requires('torch'):
    if requirement.startswith(('cuda-toolkit', 'nvidia-')):
        print(requirement.split(';')[0].strip())
";

/// Runs the tests, and makes the environment before if `make` is set.
pub(super) fn run(places: &Places, at: &Path, make: bool, arguments: &[String]) -> Result<()> {
    let shell = shell(places)?;
    let programs = at.join("bin");
    if make {
        environment(&shell, at, &[])?;
        let pip = [
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--quiet",
        ];
        println!("fetching torch and CUDA's libraries, which takes minutes");
        cmd!(shell, "{programs}/python {pip...}")
            .args(IMPORTED)
            .quiet()
            .run()?;
        cmd!(shell, "{programs}/python {pip...} --no-deps torch")
            .quiet()
            .run()?;
        let linked = cmd!(shell, "{programs}/python -c {LINKED}")
            .quiet()
            .read()?;
        cmd!(shell, "{programs}/python {pip...}")
            .args(linked.lines())
            .quiet()
            .run()?;
    } else if !programs.join("python").is_file() {
        bail!(
            "there is no environment in {}; `cargo xtask test-python --torch --make` makes one",
            at.display()
        );
    }
    let wheel = wheel(places)?;
    let again = [
        "--quiet",
        "--disable-pip-version-check",
        "--force-reinstall",
        "--no-deps",
    ];
    cmd!(shell, "{programs}/python -m pip install {again...} {wheel}")
        .quiet()
        .run()?;
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
