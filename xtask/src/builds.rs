//! Builds that say what they do, and that they wait for another cargo; what cargo knows of packages.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use xtask_front::{Log, Screen};

use crate::places::Places;

/// Runs a cargo that builds, or a program that calls one, in the workspace's folder if the command names no
/// other. All that it says is in `target/TASK.log`, and printed if it fails.
pub(crate) fn build(places: &Places, task: &str, what: &str, mut command: Command) -> Result<()> {
    let (screen, log) = (Screen::default(), Log::create(&places.target_dir, task)?);
    if command.get_current_dir().is_none() {
        command.current_dir(&places.root);
    }
    let status = xtask_front::build(command, what, &screen, &log)
        .with_context(|| format!("cannot build {what}"))?;
    ensure!(status.success(), "cannot build {what}");
    Ok(())
}

/// Cargo with these arguments.
pub(crate) fn cargo<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Command {
    let mut cargo = xtask_front::cargo();
    cargo.args(arguments);
    cargo
}

/// Packages as cargo knows them: the workspace's, and without the option `--no-deps` all that it needs.
pub(crate) fn packages(root: &Path, options: &[&str]) -> Result<Vec<Value>> {
    let mut cargo = cargo(["metadata", "--format-version=1"]);
    let output = cargo.args(options).current_dir(root).output()?;
    ensure!(output.status.success(), "`cargo metadata` failed");
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array();
    Ok(packages
        .context("`cargo metadata` lists no packages")?
        .clone())
}
