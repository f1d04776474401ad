//! What the check of a group's links found.

use ferry::{Link, LinkState, LinkTest};
use pyo3::prelude::*;

/// A link: the rank that stores, the other one, test, bytes, state, and seconds if there was an answer.
type Row = (u32, u32, &'static str, u64, &'static str, Option<f64>);

/// What :meth:`Group.check_links` found. ``str()`` of it has a table for each test, then the bad links and
/// what to look at.
#[pyclass(frozen, module = "ferry_ep")]
pub(crate) struct LinkReport(pub(crate) ferry::LinkReport);

#[pymethods]
impl LinkReport {
    /// Whether no link is bad.
    #[getter]
    fn is_well(&self) -> bool {
        self.0.is_well()
    }

    /// Every link in every test: ``(from, to, test, bytes, state, seconds)``. ``test`` is ``"flag"``,
    /// ``"inline"`` or ``"rows"``; ``state`` is ``"well"``, ``"lost"``, ``"corrupt"``, ``"slow"`` or ``"not
    /// run"``; ``seconds`` is the time until the answer, ``None`` if there was none.
    #[getter]
    fn links(&self) -> Vec<Row> {
        self.0.links.iter().map(row).collect()
    }

    /// Those of :attr:`links` that are lost, corrupt or slow.
    #[getter]
    fn bad(&self) -> Vec<Row> {
        self.0.bad().map(row).collect()
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
