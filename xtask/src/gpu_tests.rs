//! `cargo xtask test --gpus N`: the test program in one process, and one process a GPU.

use std::process::ExitCode;

use anyhow::Result;
use xshell::{Shell, cmd};

use crate::{Places, dist};

/// Runs what `cargo xtask dist` packs, as a machine without cargo would.
///
/// The script ends with one line that counts what passed and failed.
pub(crate) fn run(places: &Places, gpus: u32) -> Result<ExitCode> {
    let folder = dist::stage(places)?;
    let shell = Shell::new()?;
    let script = folder.join(dist::SCRIPT_NAME);
    let gpus = gpus.to_string();
    let output = cmd!(shell, "{script} {gpus}").quiet().run();
    Ok(if output.is_ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
