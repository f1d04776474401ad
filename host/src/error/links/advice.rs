//! Bad links in words, and what to look at.

use std::fmt;

use ferry_layout::LinkTest;

use super::{Link, LinkReport, LinkState};

/// Most links that an error names.
const MOST_NAMED: usize = 4;
/// Most links that a report lists.
const MOST_LISTED: usize = 64;

/// Name of what a test sends.
pub(super) fn name(link: &Link) -> String {
    let size = match link.bytes {
        bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        bytes if bytes >= 1 << 10 => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} bytes"),
    };
    match link.test {
        LinkTest::Flag => format!("a flag of {size}"),
        LinkTest::Inline => format!("an inline row of {size}"),
        LinkTest::Rows => format!("rows of {size}"),
    }
}

/// A bad link in words.
struct Named<'a>(&'a Link, &'a LinkReport);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(link, report) = self;
        let (what, from, to) = (name(link), link.from, link.to);
        write!(f, "the link from rank {from} to rank {to} ")?;
        match (link.state, link.time, report.median(link.test)) {
            (LinkState::Slow, Some(time), Some(median)) => {
                let times = time.as_secs_f64() / median.as_secs_f64().max(1e-9);
                let micros = time.as_secs_f64() * 1e6;
                write!(
                    f,
                    "took {micros:.0} µs for {what} and the answer, {times:.0} times the median"
                )
            }
            (LinkState::Corrupt, ..) => write!(f, "changed {what}"),
            _ => write!(f, "lost {what}"),
        }
    }
}

/// The first bad links of a report, and how many more there are.
pub(super) fn sentence(report: &LinkReport) -> String {
    let named = report
        .bad()
        .take(MOST_NAMED)
        .map(|link| Named(link, report).to_string());
    let named = named.collect::<Vec<_>>().join("; ");
    let more = match report.bad().count().saturating_sub(MOST_NAMED) {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    format!("{named}{more}; the page `doctor` of the guide says what to look at")
}

/// Writes all bad links, and what to look at.
pub(super) fn write_bad(report: &LinkReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    if report.is_well() {
        return match report.judges_times {
            true => writeln!(f, "\nAll links work."),
            false => writeln!(
                f,
                "\nAll links work. Ranks share a GPU, so times were not judged."
            ),
        };
    }
    writeln!(f, "\nBad links:")?;
    for link in report.bad().take(MOST_LISTED) {
        writeln!(f, "  {}", Named(link, report))?;
    }
    if let more @ 1.. = report.bad().count().saturating_sub(MOST_LISTED) {
        writeln!(f, "  and {more} more")?;
    }
    let is = |state: LinkState| report.bad().any(|link| link.state == state);
    if is(LinkState::Lost) || is(LinkState::Corrupt) {
        f.write_str(
            "\nStores of one GPU do not reach another one as they should, though the driver says that \
             they can. Look at\n\
             \x20 the IOMMU, which on bare metal is off or in pass-through: iommu=pt in /proc/cmdline\n\
             \x20 ACS of PCIe bridges, which sends stores the wrong way: ACSCtl in sudo lspci -vvv\n\
             \x20 what lies between the GPUs: nvidia-smi topo -m, nvidia-smi topo -p2p w\n\
             \x20 containers of one job, which need one IPC and one PID namespace: --ipc=host --pid=host\n\
             \x20 GPUs of several hosts in one NVLink domain, which need IMEX: nvidia-imex-ctl -N\n\
             \x20 MPS: either all processes of a GPU are clients of one daemon or none is\n",
        )?;
    }
    if is(LinkState::Slow) {
        f.write_str(
            "\nA slow link goes another way than the others. Look at\n\
             \x20 what lies between the GPUs: nvidia-smi topo -m (NV# is NVLink, SYS is between sockets)\n\
             \x20 NVLinks that are down: nvidia-smi nvlink --status\n\
             \x20 ACS of PCIe bridges and the IOMMU, which send stores through the host\n\
             \x20 other work on these GPUs\n",
        )?;
    }
    Ok(())
}
