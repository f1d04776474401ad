//! Builds that say what they do, and that they wait for another cargo.

use std::process::Command;

use anyhow::{Context, Result, ensure};
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
