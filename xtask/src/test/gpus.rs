//! `cargo xtask test --gpus N ..`: the test program in one process, and in several.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use xshell::{Shell, cmd};

use crate::dist;
use crate::places::Places;

/// Options of the tests on GPUs.
#[derive(Args)]
pub(crate) struct Options {
    /// Let this many ranks share the GPUs; NVSHMEM's suites and some with killed processes run under an MPS
    /// daemon that is started for them
    #[arg(long, value_name = "R", requires = "gpus")]
    ranks: Option<u32>,
    /// Only this suite; may be given several times
    #[arg(long, value_name = "SUITE", requires = "gpus")]
    only: Vec<String>,
    /// Only print the suites' names
    #[arg(long, requires = "gpus")]
    list: bool,
    /// Run small suites on one GPU under compute-sanitizer's memcheck, racecheck, synccheck and initcheck;
    /// with --ranks the quick suite under memcheck, and a round under racecheck
    #[arg(long, requires = "gpus")]
    sanitize: bool,
}

impl Options {
    /// The script's arguments.
    fn arguments(&self, gpus: u32) -> Vec<String> {
        let mut arguments = vec![gpus.to_string()];
        if let Some(ranks) = self.ranks {
            arguments.extend([String::from("--ranks"), ranks.to_string()]);
        }
        for suite in &self.only {
            arguments.extend([String::from("--only"), suite.clone()]);
        }
        for (flag, is_given) in [("--list", self.list), ("--sanitize", self.sanitize)] {
            arguments.extend(is_given.then(|| String::from(flag)));
        }
        arguments
    }
}

/// Runs the script and program that `cargo xtask dist` packs. The script ends with one line that counts the
/// suites.
pub(crate) fn run(places: &Places, gpus: u32, options: &Options) -> Result<ExitCode> {
    let folder = dist::stage(places)?;
    let shell = Shell::new()?;
    let script = folder.join(dist::SCRIPT_NAME);
    let arguments = options.arguments(gpus);
    let output = cmd!(shell, "{script} {arguments...}").quiet().run();
    Ok(if output.is_ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Arguments {
        #[arg(long)]
        gpus: u32,
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn every_option_reaches_the_script() {
        let given = |text: &str| {
            let words = std::iter::once("test").chain(text.split(' '));
            let parsed = Arguments::parse_from(words);
            parsed.options.arguments(parsed.gpus).join(" ")
        };
        assert_eq!(given("--gpus 4"), "4");
        assert_eq!(
            given("--gpus 1 --sanitize --ranks 2 --only memcheck --only racecheck --list"),
            "1 --ranks 2 --only memcheck --only racecheck --list --sanitize"
        );
    }
}
