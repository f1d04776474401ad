//! `cargo xtask test --gpus N [--sanitize]`: the test program in one process, and one process a GPU.

use std::process::ExitCode;

use anyhow::Result;
use xshell::{Shell, cmd};

use crate::{Places, dist};

/// Runs what `cargo xtask dist` packs, as a machine without cargo would.
///
/// The script ends with one line that counts what passed and failed. `sanitize`: under the tools of
/// compute-sanitizer.
pub(crate) fn run(places: &Places, gpus: u32, sanitize: bool) -> Result<ExitCode> {
    let folder = dist::stage(places)?;
    let shell = Shell::new()?;
    let script = folder.join(dist::SCRIPT_NAME);
    let gpus = gpus.to_string();
    let sanitize = sanitize.then_some("--sanitize");
    let output = cmd!(shell, "{script} {gpus} {sanitize...}").quiet().run();
    Ok(if output.is_ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
