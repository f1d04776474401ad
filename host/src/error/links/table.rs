//! A report as tables: a row for each rank that stores, a column for each rank to which it stores.

use std::fmt;

use ferry_layout::{LinkTest, Rank};

use super::advice::{name, write_bad};
use super::{Link, LinkReport, LinkState};

/// Most ranks of which a table has every link. Of more, a line has the fastest, the median and the slowest.
const MOST_IN_TABLE: u32 = 16;

impl fmt::Display for LinkReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, group, .. } = self;
        write!(f, "Links of {ranks} ranks, {group} group")?;
        let is_simulated = *group == "simulated";
        writeln!(
            f,
            "{}",
            if is_simulated {
                ": times are simulated"
            } else {
                ""
            }
        )?;
        for test in LinkTest::ALL {
            self.write_test(test, f)?;
        }
        write_bad(self, f)
    }
}

impl LinkReport {
    fn write_test(&self, test: LinkTest, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(first) = self.of(test).next() else {
            return Ok(());
        };
        let unit = unit(test);
        let median = self.median(test);
        let median = median.and_then(|median| self.of(test).find(|link| link.time == Some(median)));
        let median = median.map_or("-".into(), value);
        writeln!(
            f,
            "\n{}, and its answer: {unit}, median {median}",
            name(first)
        )?;
        match self.ranks <= MOST_IN_TABLE {
            true => self.write_table(test, f),
            false => self.write_range(test, f),
        }
    }

    fn write_table(&self, test: LinkTest, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "from\\to")?;
        (0..self.ranks).try_for_each(|to| write!(f, "{to:>8}"))?;
        writeln!(f)?;
        for from in (0..self.ranks).map(Rank) {
            write!(f, "{from:>7}")?;
            for to in (0..self.ranks).map(Rank) {
                let link = self
                    .of(test)
                    .find(|link| (link.from, link.to) == (from, to));
                write!(f, "{:>8}", link.map_or("-".into(), cell))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }

    fn write_range(&self, test: LinkTest, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let timed = || self.of(test).filter(|link| link.time.is_some());
        let fastest = timed().min_by_key(|link| link.time);
        let slowest = timed().max_by_key(|link| link.time);
        for (which, link) in [("fastest", fastest), ("slowest", slowest)] {
            if let Some(link) = link {
                writeln!(f, "{which}: {} ({} to {})", value(link), link.from, link.to)?;
            }
        }
        Ok(())
    }
}

/// Unit of a test's values.
const fn unit(test: LinkTest) -> &'static str {
    match test {
        LinkTest::Flag | LinkTest::Inline => "µs",
        LinkTest::Rows => "GB/s",
    }
}

/// The value of a link in its unit.
fn value(link: &Link) -> String {
    match (link.test, link.time, link.rate()) {
        (LinkTest::Rows, _, Some(rate)) if rate >= 1e9 => format!("{:.1}", rate / 1e9),
        (LinkTest::Rows, _, Some(rate)) => format!("{:.3}", rate / 1e9),
        (_, Some(time), _) => format!("{:.1}", time.as_secs_f64() * 1e6),
        _ => "-".into(),
    }
}

/// The value of a link in a table, with a mark if it is slow.
fn cell(link: &Link) -> String {
    match link.state {
        LinkState::Well => value(link),
        LinkState::Slow => format!("{}!", value(link)),
        LinkState::Lost => "lost!".into(),
        LinkState::Corrupt => "wrong!".into(),
        LinkState::NotRun => ".".into(),
    }
}
