//! Checks of links by processes, of which one does something odd.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use ferry_layout::{LinkTest, Rank, Shape};
use ferry_simulator::{BadLink, BadLinkKind, Options};

use crate::device::Device;
use crate::error::Error;
use crate::error::links::{LinkReport, LinkState, LinksError};
use crate::group::Group;
use crate::group::fabric::Fabric;
use crate::tensor::handles::DevicePtr;

/// Oddity of a process.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Oddity {
    None,
    /// It drives another rank, too.
    TwoRanks,
    /// Its device is not found at first.
    NoDevice,
    /// It comes late from every call that waits for others.
    Late(Duration),
    /// It hears in a call that rank 1 has failed: the first one counts 1.
    Hears {
        call: usize,
    },
    /// It cannot free windows.
    NotFreed,
}

/// The fabric of a process with one of three simulated ranks.
struct OddFabric {
    inside: Group,
    oddity: Oddity,
    calls: AtomicUsize,
    devices: AtomicUsize,
    /// Windows that are not freed.
    windows: AtomicUsize,
}

// SAFETY: its devices and windows are the simulator's, and calls wait as the simulator's do.
unsafe impl Fabric for Arc<OddFabric> {
    fn name(&self) -> &'static str {
        self.inside.name()
    }
    fn ranks(&self) -> u32 {
        self.inside.ranks()
    }
    fn local_ranks(&self) -> Vec<Rank> {
        let own = self.inside.local_ranks();
        match self.oddity {
            Oddity::TwoRanks => vec![own[0], Rank(own[0].0 + 1)],
            _ => own,
        }
    }
    fn device(&self, rank: Rank) -> Result<Arc<dyn Device>, Error> {
        if self.oddity == Oddity::NoDevice && self.devices.fetch_add(1, Relaxed) == 0 {
            return Err(Error::RankCount { ranks: 99 });
        }
        self.inside.device(rank)
    }
    fn reaches_other_nodes(&self) -> bool {
        false
    }
    fn all_gather(&self, value: u64) -> Result<Vec<u64>, Error> {
        let mut values = self.inside.fabric.all_gather(value)?;
        let call = self.calls.fetch_add(1, Relaxed) + 1;
        match self.oddity {
            Oddity::Late(time) => std::thread::sleep(time),
            Oddity::Hears { call: at } if at == call => values[1] = 0,
            _ => {}
        }
        Ok(values)
    }
    fn barrier(&self) -> Result<(), Error> {
        self.inside.fabric.barrier()
    }
    fn alloc_windows(&self, bytes: u64) -> Result<Vec<DevicePtr>, Error> {
        self.windows.fetch_add(1, Relaxed);
        self.inside.fabric.alloc_windows(bytes)
    }
    fn peer_windows(
        &self,
        rank: Rank,
        windows: &[DevicePtr],
        shape: &Shape,
    ) -> Result<Vec<DevicePtr>, Error> {
        self.inside.fabric.peer_windows(rank, windows, shape)
    }
    unsafe fn free_windows(&self, windows: &[DevicePtr]) -> Result<(), Error> {
        if self.oddity == Oddity::NotFreed {
            return Err(Error::RankCount { ranks: 99 });
        }
        self.windows.fetch_sub(windows.len(), Relaxed);
        // SAFETY: documented on `Fabric::free_windows`, which this wraps.
        unsafe { self.inside.fabric.free_windows(windows) }
    }
}

/// Results of three processes, of which some are odd, and whether each has freed its windows.
fn check(
    bad_link: Option<BadLink>,
    oddities: [Oddity; 3],
) -> [(Result<LinkReport, Error>, bool); 3] {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let options = Options {
        bad_link,
        ..Options::new(3, 4)
    };
    let join = |rank: u32| {
        let timeout = Duration::from_secs(20);
        let inside = Group::simulated_at(&path, Rank(rank), &options, timeout).unwrap();
        let fabric = Arc::new(OddFabric {
            inside: inside.clone(),
            oddity: oddities[rank as usize],
            calls: 0.into(),
            devices: 0.into(),
            windows: 0.into(),
        });
        let group = Group::with_fabric(Box::new(fabric.clone())).unwrap();
        let found = group.check_links();
        group.close().unwrap();
        inside.close().unwrap();
        (found, fabric.windows.load(Relaxed) == 0)
    };
    std::thread::scope(|scope| {
        let join = &join;
        let threads = [0, 1, 2].map(|rank| scope.spawn(move || join(rank)));
        threads.map(|thread| thread.join().unwrap())
    })
}

/// The errors of three processes of which one is odd, as text.
fn errors(odd: usize, oddity: Oddity) -> [String; 3] {
    let mut oddities = [Oddity::None; 3];
    oddities[odd] = oddity;
    check(None, oddities).map(|(found, _)| found.unwrap_err().to_string())
}

#[test]
fn a_process_with_some_of_several_ranks_is_refused_and_the_others_with_it() {
    let own = LinksError::SomeRanks {
        local: vec![0, 1],
        ranks: 3,
    };
    let theirs = Error::PeerFailed {
        rank: Rank(0),
        step: "preparing a check of links",
    };
    let theirs = theirs.to_string();
    let wanted = [own.to_string(), theirs.clone(), theirs];
    assert_eq!(errors(0, Oddity::TwoRanks), wanted);
}

#[test]
fn ranks_do_not_wait_for_one_that_has_no_stream_or_cannot_free_its_windows() {
    let own = Error::RankCount { ranks: 99 }.to_string();
    for (oddity, step) in [
        (Oddity::NoDevice, "preparing a check of links"),
        (Oddity::NotFreed, "ending a check of links"),
    ] {
        let theirs = Error::PeerFailed {
            rank: Rank(2),
            step,
        };
        let theirs = theirs.to_string();
        let wanted = [theirs.clone(), theirs, own.clone()];
        assert_eq!(errors(2, oddity), wanted, "{oddity:?}");
    }
}

#[test]
fn windows_are_freed_if_a_rank_fails_between_two_launches() {
    // After the preparation, the salt, and three calls that make a communicator: two calls a launch.
    for call in [6, 8] {
        for (found, is_freed) in check(None, [Oddity::Hears { call }; 3]) {
            let failed = matches!(
                &found,
                Err(Error::PeerFailed {
                    rank: Rank(1),
                    step: "checking links"
                })
            );
            assert!(failed && is_freed, "{call}: {found:?}, freed: {is_freed}");
        }
    }
}

#[test]
fn no_link_is_blamed_for_a_rank_that_comes_late_after_a_bad_link() {
    let bad = BadLink {
        from: 0,
        to: 1,
        kind: BadLinkKind::Lost,
    };
    let late = Oddity::Late(Duration::from_millis(60));
    for (found, _) in check(Some(bad), [Oddity::None, Oddity::None, late]) {
        let report = found.unwrap();
        let bad: Vec<_> = report.bad().map(|link| (link.from, link.to)).collect();
        assert_eq!(bad, [(Rank(0), Rank(1))], "{report}");
        let is_out = |link: &&crate::Link| link.state == LinkState::NotRun;
        let out = report.links.iter().filter(is_out);
        assert!(
            out.clone().all(|link| link.test > LinkTest::Flag),
            "{report}"
        );
        assert_eq!(
            out.count(),
            4,
            "both directions of a pair in two tests: {report}"
        );
    }
}
