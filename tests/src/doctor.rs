//! `ferry-tests doctor`: the links between all ranks of a group, as tables or as JSON.

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use ferry::Link;
use serde_json::{Value, json};

use crate::group::{GroupArgs, GroupKind, GroupOptions, gpus, open};
use crate::kernel_files::KernelFiles;

/// Ranks in the simulator.
const SIMULATED_RANKS: usize = 4;

/// Check the links between all ranks, and name those that lose, change or delay what they carry
///
/// Every rank stores into the memory of every other one as dispatch does: flags, rows whose words are flags,
/// and rows with a flag each. Prints a table of times and rates for each, and for bad links what to look at
/// (IOMMU, ACS, topology, containers, IMEX, MPS). Fails if a link is bad, or if there is none to check.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct DoctorArgs {
    /// Place of the ranks; simulated shows what a report looks like
    #[arg(long, value_enum, default_value = "local")]
    pub group: GroupKind,
    /// Ranks [default: all GPUs, or 4 in the simulator]
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Times that all links are checked; printed is the last report, and each that has a bad link
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    times: u64,
    /// Print JSON: a line for each link and time
    #[arg(long)]
    json: bool,
    /// Seed of the simulator
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Way that ranks have GPUs, and processes meet.
    #[command(flatten)]
    pub group_args: GroupArgs,
    /// PTX of Ferry's kernels in place of the embedded one: of one rank, it stands in for a bad peer
    #[arg(long, value_name = "FILE")]
    kernels: Option<PathBuf>,
}

impl DoctorArgs {
    /// Number of ranks, on a machine with `gpus` GPUs. An error if there is no link between them.
    fn ranks(&self, gpus: usize) -> Result<usize> {
        let ranks = self.ranks.unwrap_or(match self.group {
            GroupKind::Simulated => SIMULATED_RANKS,
            _ => gpus,
        });
        ensure!(
            self.group.has_processes() || ranks > 1,
            "no link to check: there are {ranks} ranks, and {gpus} GPUs were found; --share-gpus --ranks N \
             lets ranks share one, --group simulated needs none"
        );
        Ok(ranks)
    }
}

/// Checks the links of a group, and prints what was found. An error if a link is bad.
pub fn run(args: &DoctorArgs) -> Result<()> {
    let open = open(&GroupOptions {
        kind: args.group,
        ranks: args.ranks(gpus())?,
        seed: args.seed,
        args: args.group_args.clone(),
        files: KernelFiles {
            kernels: args.kernels.clone(),
            ..KernelFiles::default()
        },
    })?;
    ensure!(open.group.ranks() > 1, "no link to check: there is 1 rank");
    let (mut tests, mut bad) = (0, 0);
    for time in 1..=args.times {
        let report = open.group.check_links()?;
        let bad_ones = report.bad().count();
        (tests, bad) = (tests + report.links.len(), bad + bad_ones);
        if !open.is_first() {
            continue;
        }
        match args.json {
            true => report
                .links
                .iter()
                .for_each(|link| println!("{}", line(link))),
            false if bad_ones > 0 || time == args.times => print!("{report}"),
            false => {}
        }
    }
    if open.is_first() && args.times > 1 && !args.json {
        println!(
            "all {} times: {bad} of {tests} tests of links went wrong",
            args.times
        );
    }
    open.group.close()?;
    verdict(bad, tests)
}

/// A link as JSON.
fn line(link: &Link) -> Value {
    json!({
        "from": link.from.0,
        "to": link.to.0,
        "test": format!("{:?}", link.test).to_lowercase(),
        "bytes": link.bytes,
        "state": format!("{:?}", link.state).to_lowercase(),
        "ns": link.time.map(|time| time.as_nanos() as u64),
    })
}

fn verdict(bad: usize, tests: usize) -> Result<()> {
    match bad {
        0 => Ok(()),
        _ => bail!("{bad} of {tests} tests of links went wrong"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ferry::{LinkState, LinkTest, Rank};

    use super::*;

    const LOST: Link = Link {
        from: Rank(2),
        to: Rank(0),
        test: LinkTest::Inline,
        bytes: 4096,
        state: LinkState::Lost,
        time: None,
    };

    #[test]
    fn ranks_without_a_link_are_refused() {
        use clap::Parser;

        #[derive(Parser)]
        struct Program {
            #[command(flatten)]
            doctor: DoctorArgs,
        }
        let ranks = |given: &str, gpus| {
            let words = given.split_whitespace();
            let program = Program::try_parse_from(["doctor"].into_iter().chain(words)).unwrap();
            program
                .doctor
                .ranks(gpus)
                .map_err(|error| error.to_string())
        };
        for (given, gpus) in [("", 0), ("", 1), ("--group simulated --ranks 1", 4)] {
            let refused = ranks(given, gpus).unwrap_err();
            assert!(
                refused.contains(&format!("{gpus} GPUs were found")),
                "{refused}"
            );
        }
        assert_eq!(ranks("", 4), Ok(4));
        assert_eq!(ranks("--group simulated", 0), Ok(4));
        assert_eq!(ranks("--share-gpus --ranks 3", 1), Ok(3));
    }

    #[test]
    fn a_link_is_a_line_of_json_and_a_bad_one_an_error() {
        let well = Link {
            state: LinkState::Well,
            time: Some(Duration::from_nanos(1_500)),
            ..LOST
        };
        let [lost, timed] = [LOST, well].map(|link| line(&link).to_string());
        assert_eq!(
            lost,
            r#"{"bytes":4096,"from":2,"ns":null,"state":"lost","test":"inline","to":0}"#
        );
        assert!(timed.contains(r#""ns":1500,"state":"well""#), "{timed}");
        assert!(verdict(0, 2).is_ok());
        let error = verdict(1, 2).unwrap_err();
        assert_eq!(error.to_string(), "1 of 2 tests of links went wrong");
    }
}
