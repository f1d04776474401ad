//! The tests with torch, in an environment outside the checkout, as torch takes gigabytes.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use xshell::{Shell, cmd};

use super::{PACKAGE, environment, shell, wheel, wheel_of};
use crate::places::Places;

/// Packages that `import torch`, `torch.compile`, `import flashinfer.moe_ep` and the tests need, and
/// transformers, which does not require torch, and loads divided models by accelerate, which does.
const IMPORTED: [&str; 15] = [
    "apache-tvm-ffi",
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "numpy",
    "nvidia-ml-py",
    "psutil",
    "pytest",
    "requests",
    "setuptools",
    "sympy",
    "tqdm",
    "transformers",
    "typing-extensions",
];

/// Prints those of torch's requirements whose libraries its own ones link: without them it is not imported,
/// also on a CPU. Triton, CUDA's bindings for Python, cuSOLVER and NVTX are left out.
const LINKED: &str = "
import importlib.metadata as metadata
for requirement in metadata.requires('torch'):
    if requirement.startswith(('cuda-toolkit', 'nvidia-')):
        for extra in ('cusolver', 'nvtx'):
            requirement = requirement.replace(extra + ',', '').replace(',' + extra, '')
        print(requirement.split(';')[0].strip())
";

/// Runs the tests, and makes the environment before if `make` is set. Without an environment it runs none,
/// and says so.
pub(super) fn run(places: &Places, at: &Path, make: bool, arguments: &[String]) -> Result<()> {
    let shell = shell(places)?;
    let programs = at.join("bin");
    if make {
        make_environment(&shell, at)?;
    } else if !programs.join("python").is_file() {
        println!(
            "skipped: the tests with torch, as there is no environment in {}; `cargo xtask test-python \
             --torch --make` makes one",
            at.display()
        );
        return Ok(());
    }
    let (wheel, deep_ep) = (wheel(places)?, wheel_of(places, "ferry_ep_deep_ep")?);
    let again = [
        "--quiet",
        "--disable-pip-version-check",
        "--force-reinstall",
        "--no-deps",
    ];
    cmd!(
        shell,
        "{programs}/python -m pip install {again...} {wheel} {deep_ep}"
    )
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

/// Makes an environment that has torch, transformers and FlashInfer on a CPU, or completes it.
fn make_environment(shell: &Shell, at: &Path) -> Result<()> {
    let python = environment(shell, at, &[])?.join("python");
    println!("fetching torch, CUDA's libraries, transformers and FlashInfer, which takes minutes");
    install(shell, &python, &IMPORTED)?;
    install(
        shell,
        &python,
        &["--no-deps", "torch", "flashinfer-python", "accelerate"],
    )?;
    let linked = cmd!(shell, "{python} -c {LINKED}").quiet().read()?;
    install(shell, &python, &linked.lines().collect::<Vec<_>>())?;
    let check = "
from importlib.metadata import version
import accelerate, flashinfer.moe_ep, torch, transformers
print(', '.join(f'{name} {version(name)}' for name in ('torch', 'transformers', 'flashinfer-python')))
";
    let versions = cmd!(shell, "{python} -c {check}").quiet().read()?;
    println!("imported: {versions}");
    Ok(())
}

/// Installs packages. Shows what pip says only if it fails: it complains of requirements that are left out.
fn install(shell: &Shell, python: &Path, packages: &[&str]) -> Result<()> {
    let quiet = ["--quiet", "--disable-pip-version-check", "--upgrade"];
    let output = cmd!(shell, "{python} -m pip install {quiet...}")
        .args(packages)
        .quiet()
        .ignore_status()
        .output()?;
    ensure!(
        output.status.success(),
        "pip cannot install {}:\n{}",
        packages.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
