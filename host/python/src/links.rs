//! Reports of the check of a group's links.

use ferry::{Link, LinkState, LinkTest};
use pyo3::prelude::*;

/// A link: the rank that stores, the other one, test, bytes, state, and seconds if there was an answer.
type Row = (u32, u32, &'static str, u64, &'static str, Option<f64>);

/// Result of :meth:`Group.check_links`. ``str()`` has tables, the bad links, and what to look at.
#[pyclass(frozen, module = "ferry_ep")]
pub(crate) struct LinkReport(pub(crate) ferry::LinkReport);

#[pymethods]
impl LinkReport {
    /// Whether all links are well, or not tested.
    #[getter]
    fn is_well(&self) -> bool {
        self.0.is_well()
    }

    /// Each link in each test: ``(from, to, test, bytes, state, seconds or None)``.
    #[getter]
    fn links(&self) -> Vec<Row> {
        self.0.links.iter().map(row).collect()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        let (bad, links) = (self.0.bad().count(), self.0.links.len());
        format!("<ferry_ep.LinkReport, {bad} of {links} tests of links went wrong>")
    }
}

fn row(link: &Link) -> Row {
    let test = match link.test {
        LinkTest::Flag => "flag",
        LinkTest::Inline => "inline",
        LinkTest::Rows => "rows",
    };
    let state = match link.state {
        LinkState::Well => "well",
        LinkState::Lost => "lost",
        LinkState::Corrupt => "corrupt",
        LinkState::Slow => "slow",
        LinkState::NotRun => "not run",
    };
    let seconds = link.time.map(|time| time.as_secs_f64());
    (link.from.0, link.to.0, test, link.bytes, state, seconds)
}
