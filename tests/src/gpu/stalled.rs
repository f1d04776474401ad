//! A network of the tests that stalls: a silent peer, behind a bounded queue.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use ferry::error::NvshmemError;
use ferry::{Config, Error, FaultKind};
use ferry_network::settings::{Loss, Settings as Network};

use super::{Outcome, Suite};
use crate::network;
use ferry_rig::{HALVES, Session, Settings};

/// Rows of a rank to other nodes: more than NVSHMEM's channel has places (4 MiB, 32 bytes a put).
const ROWS: usize = 160_000;

/// Whether a peer falls silent, and the others' queues to it are bounded.
fn stalls() -> bool {
    let network = network::of_this_process();
    let network = network.and_then(|text| text.parse::<Network>().ok());
    let silent = |network: &Network| network.lose.is_some_and(|lost| lost.how == Loss::Hang);
    network.is_some_and(|network| silent(&network) && network.window > 0)
}

/// The end of a group: where the network stalls, NVSHMEM cannot be left, and the process ends with it.
pub fn closed(end: Result<(), Error>) -> Result<()> {
    match end {
        Err(Error::Nvshmem(NvshmemError::Stalled { .. }) | Error::PeerFailed { .. })
            if stalls() =>
        {
            Ok(())
        }
        end => Ok(end?),
    }
}

/// A test only of networks that stall.
pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    if !stalls() {
        return Ok(());
    }
    suite.check("a network that stalls, 1 a node", |suite| told(suite))
}

/// Every rank is told in time, with a fault that says what it waited for; nobody hangs.
fn told(suite: &mut Suite<'_>) -> Result<Outcome> {
    let tokens = ROWS / (suite.ranks() - 1).max(1);
    let problem = suite.uniform(tokens, [64, 8, 128], suite.args.seed * 77 + 6);
    let config = Config {
        p2p_world_size: Some(1),
        deadline: suite.deadline(),
        ..Config::new(64, 8, 128, tokens)
    };
    // Halves: in a whole dispatch, warps that wait for rows may give up before those that wait for room.
    let settings = Settings {
        split: true,
        ..Settings::of(config, std::slice::from_ref(&problem))
    };
    let mut session = suite.session(&suite.group().clone(), &settings, 1)?;
    let ready = session.upload(0, &problem).map_err(Into::into);
    let kinds = ready.and_then(|()| rounds(suite, &mut session));
    // Not closed: that is collective, and the ranks gave up. The windows stay.
    drop(session);
    let kind = suite.open.agree(kinds)?;
    let all = (suite.open.gather)(kind.as_bytes())?;
    let all: Vec<_> = all
        .iter()
        .map(|text| String::from_utf8_lossy(text))
        .collect();
    ensure!(
        all.iter().any(|kind| kind.contains("NetworkStalled")),
        "{all:?}"
    );
    Ok(Outcome::Measured(all.join(", ")))
}

/// Halves of rounds until one fails: the kind of its fault, which half it was, and when it came.
fn rounds(suite: &Suite<'_>, session: &mut Session) -> Result<String> {
    for half in (0..HALVES).cycle().take(20 * HALVES) {
        let start = Instant::now();
        session.launch_halves(half..half + 1)?;
        let (_, outcome) = session.outcomes().remove(0);
        let waited = start.elapsed();
        let kind = match outcome {
            Ok(_) => continue,
            Err(Error::Fault(fault)) => fault.kind,
            Err(Error::PeerGaveUp { .. }) => FaultKind::PeerTimeout,
            Err(error) => bail!(error),
        };
        ensure!(
            matches!(kind, FaultKind::PeerTimeout | FaultKind::NetworkStalled),
            "{kind:?}"
        );
        ensure!(waited < 2 * suite.deadline(), "told after {waited:?}");
        return Ok(format!(
            "{kind:?} in half {half} after {} ms",
            waited.as_millis()
        ));
    }
    bail!("20 rounds, and the network did not stall")
}
