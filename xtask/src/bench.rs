//! `cargo xtask bench`: runs `ferry-tests bench`, in release, with GPU support.

use anyhow::Result;
use xshell::{Shell, cmd};

use crate::places::Places;

/// Builds and runs the benchmark with these arguments.
pub(crate) fn run(places: &Places, arguments: &[String]) -> Result<()> {
    let shell = Shell::new()?;
    shell.change_dir(&places.root);
    let package = ["--package", "ferry-tests", "--features", "cudarc"];
    cmd!(
        shell,
        "cargo run --quiet --release {package...} -- bench {arguments...}"
    )
    .quiet()
    .run()?;
    Ok(())
}
