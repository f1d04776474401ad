//! The links between the group's ranks.

use std::time::Instant;

use anyhow::{Result, ensure};
use ferry::LinkTest;

use super::{Outcome, Suite};

pub(super) fn run(suite: &mut Suite<'_>) -> Result<()> {
    suite.check("links between ranks carry what is stored", links)
}

fn links(suite: &mut Suite<'_>) -> Result<Outcome> {
    let args = &suite.args.group_args;
    if args.node.is_some() || args.network.is_some() {
        return Ok(Outcome::Skipped("ranks of other nodes".into()));
    }
    if suite.group().ranks() == 1 {
        return Ok(Outcome::Skipped("one rank has no link".into()));
    }
    let start = Instant::now();
    let report = suite.group().check_links()?;
    let took = start.elapsed();
    ensure!(report.is_well(), "{report}");
    let median = |test| match report.median(test) {
        Some(time) => format!("{:.1} µs", time.as_secs_f64() * 1e6),
        None => "none".into(),
    };
    let [flag, inline, rows] = LinkTest::ALL.map(median);
    Ok(Outcome::Measured(format!(
        "medians: flag {flag}, inline row {inline}, rows {rows}; {} ms in all",
        took.as_millis()
    )))
}
