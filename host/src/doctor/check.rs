//! Launches of the kernel that checks links, and the exchange of what they found.

use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytemuck::Zeroable;
use ferry_layout::{LinkRecord, LinkTest, LinksArgs, Rank};

use super::circle::{partner, rounds};
use super::judge::{Cell, Cells, judge};
use crate::communicator::Communicator;
use crate::communicator::memory::agree;
use crate::error::Error;
use crate::error::links::{LinkReport, LinksError};
use crate::group::Group;
use crate::plan::Plan;
use crate::plan::config::Config;
use crate::tensor::handles::Stream;

/// Elements of a row, 4 KiB.
const HIDDEN: usize = 2048;
/// Times below that, in the simulator for each rank, are never slow: a rank that was interrupted may take
/// them. In simulated time every rank's turns count, and a stall lasts longer with more ranks.
const SLOW_FLOOR: Duration = Duration::from_micros(20);
/// Time for each half of a launch, for each rank on a GPU: more than ranks begin after each other, as they
/// come from a rendezvous of their processes.
const WAIT: Duration = Duration::from_millis(500);

/// Extent of a check.
#[derive(Clone, Copy)]
struct Effort {
    /// Rows of 4 KiB.
    rows: usize,
    /// Exchanges of a pair with one row in a launch, of which all but the first are timed.
    repeats: u64,
    /// Launches with all rows. Each times one exchange, as the warps of several would mix.
    launches: usize,
    /// See [`SLOW_FLOOR`].
    floor: Duration,
}

impl Effort {
    /// Returns that for a group: in the simulator each word takes a while.
    fn of(group: &Group) -> Self {
        match group.name() {
            "simulated" => Self {
                rows: 4,
                repeats: 3,
                launches: 1,
                floor: SLOW_FLOOR * group.ranks(),
            },
            _ => Self {
                rows: 256,
                repeats: 8,
                launches: 3,
                floor: SLOW_FLOOR,
            },
        }
    }
}

/// The ranks of this process, in a communicator that nothing else uses.
pub(super) struct Check<'a> {
    group: &'a Group,
    effort: Effort,
    ranks: Vec<Communicator>,
    /// One of each rank. Other checks of the group wait for them: two would wait for each other's kernels.
    streams: MutexGuard<'a, Vec<Stream>>,
    /// Pairs that are not left out: a bit for each peer, of each rank.
    peers: Vec<u64>,
    /// Most ranks on a GPU.
    on_a_gpu: u32,
    /// Number that earlier checks did not have: the memory that this one was given may still have their rows.
    salt: u64,
    /// Largest flag so far.
    flags: u64,
}

impl<'a> Check<'a> {
    /// Makes the communicator. Collective. Synchronizes.
    pub(super) fn begin(group: &'a Group) -> Result<Self, Error> {
        let (effort, ranks) = (Effort::of(group), group.ranks());
        let on_a_gpu = (0..ranks).filter_map(|rank| group.gpu_ranks(Rank(rank)));
        let on_a_gpu = on_a_gpu.map(|gpu| gpu.ranks().count() as u32);
        let on_a_gpu = on_a_gpu.max().unwrap_or(1);
        let top_k = LinkRecord::WORDS as usize;
        let config = Config {
            // Twice what a launch waits, for the kernel to end.
            deadline: 4 * WAIT * on_a_gpu,
            ..Config::new(top_k * ranks as usize, top_k, HIDDEN, effort.rows)
        };
        let prepare = || {
            require_one_or_all(group)?;
            Ok((Plan::new(group, config)?, streams(group)?))
        };
        let fabric = &*group.fabric;
        let (plan, streams) = agree(fabric, "preparing a check of links", prepare())??;
        let salt = fabric.all_gather(salt())?[0];
        let ranks = Communicator::new(group, &plan)?;
        Ok(Self {
            group,
            effort,
            ranks,
            streams,
            peers: Cells::all_peers(group.ranks()),
            on_a_gpu,
            salt,
            flags: 0,
        })
    }

    /// Makes all tests of all links. Collective. Synchronizes.
    pub(super) fn report(&mut self) -> Result<LinkReport, Error> {
        // Loads the kernel on all ranks, so that later launches begin at one time. Exchanges nothing.
        self.launch(LinkTest::Flag, |_| None)?;
        let mut report = LinkReport {
            ranks: self.group.ranks(),
            group: self.group.name(),
            judges_times: self.on_a_gpu == 1,
            links: Vec::new(),
        };
        for test in LinkTest::ALL {
            let cells = self.run(test)?;
            let bytes = test.bytes(self.ranks[0].plan().shape());
            judge(&mut report, (test, bytes), self.effort.floor, &cells);
        }
        Ok(report)
    }

    /// Makes a test of all pairs that are not left out. Collective. Synchronizes.
    fn run(&mut self, test: LinkTest) -> Result<Cells, Error> {
        let launches = match test {
            LinkTest::Flag | LinkTest::Inline => 1,
            LinkTest::Rows => self.effort.launches,
        };
        let ranks = self.group.ranks();
        let mut cells = Cells::none(ranks);
        for round in 0..rounds(ranks) {
            for _ in 0..launches {
                let peers = self.peers.clone();
                let is_in = |rank: Rank, peer: Rank| peers[rank.0 as usize] >> peer.0 & 1 != 0;
                let pair = |rank| partner(ranks, round, rank).filter(|&peer| is_in(rank, peer));
                for (rank, peer, cell) in self.launch(test, pair)? {
                    cells.merge(rank, peer, cell);
                }
                cells.leave_out_bad(&mut self.peers);
            }
        }
        Ok(cells)
    }

    /// Launches a test once, for pairs of ranks. Returns each rank of a pair, the other one, and what the
    /// former found. Collective. Synchronizes.
    fn launch(
        &mut self,
        test: LinkTest,
        pair: impl Fn(Rank) -> Option<Rank>,
    ) -> Result<Vec<(Rank, Rank, Cell)>, Error> {
        let own = self.launch_here(test, &pair);
        let fabric = &*self.group.fabric;
        // Also a barrier: the next launch begins on all ranks after this one has ended on all.
        let own = agree(fabric, "checking links", own)??;
        let cells = match own.len() == self.group.ranks() as usize {
            true => own,
            false => {
                let words = fabric.all_gather(own[0].word())?;
                words.into_iter().map(Cell::of_word).collect()
            }
        };
        let found = (0..).map(Rank).zip(cells);
        let found = found.filter_map(|(rank, cell)| Some((rank, pair(rank)?, cell)));
        Ok(found.collect())
    }

    /// Launches a test on the ranks of this process, and returns what each of them found, if it has a pair.
    fn launch_here(
        &mut self,
        test: LinkTest,
        pair: impl Fn(Rank) -> Option<Rank>,
    ) -> Result<Vec<Cell>, Error> {
        let repeats = match test {
            LinkTest::Flag | LinkTest::Inline => self.effort.repeats,
            LinkTest::Rows => 2,
        };
        let args = LinksArgs {
            test: test as u64,
            flags_before: self.flags,
            repeats,
            salt: self.salt.wrapping_add(self.flags),
            wait_ns: (WAIT * self.on_a_gpu).as_nanos() as u64,
            ..LinksArgs::zeroed()
        };
        self.flags += 2 * repeats;
        Communicator::links_all(&mut self.ranks, &self.streams, |rank| LinksArgs {
            peer: pair(rank).unwrap_or(rank).0.into(),
            ..args
        })?;
        for (rank, &stream) in self.ranks.iter().zip(self.streams.iter()) {
            rank.device().synchronize(stream)?;
        }
        let found = |at: &Communicator| {
            let (rank, Some(peer)) = (at.rank(), pair(at.rank())) else {
                return Ok(Cell::NONE);
            };
            let cell = Cell::of(&at.link_records(test, peer)?);
            Ok(cell.map_err(|row| LinksError::Untested { rank, peer, row })?)
        };
        self.ranks.iter().map(found).collect()
    }

    /// Closes the communicator, whatever came of the check. Collective. Synchronizes.
    pub(super) fn end(self, made: Result<LinkReport, Error>) -> Result<LinkReport, Error> {
        let fabric = &*self.group.fabric;
        match made {
            Ok(report) => {
                let closed = Communicator::close_all(self.ranks);
                let ended = closed.map(|()| report).map_err(Error::from);
                agree(fabric, "ending a check of links", ended)?
            }
            // All ranks are here, and leave alike: with a barrier, unless the device of one has failed.
            Err(error) => {
                let gave_up = self.ranks.iter().any(Communicator::has_given_up);
                let all = fabric.all_gather(gave_up.into());
                let closed = match all.is_ok_and(|all| all.iter().all(|&gave_up| gave_up == 0)) {
                    true => Communicator::close_all(self.ranks).map_err(Error::from),
                    false => (self.ranks.into_iter()).try_for_each(Communicator::close_given_up),
                };
                if let Err(error) = closed {
                    tracing::warn!(%error, "cannot close the communicator of a check of links");
                }
                Err(error)
            }
        }
    }
}

/// Refuses a group of processes of which this one drives several ranks.
fn require_one_or_all(group: &Group) -> Result<(), LinksError> {
    let (ranks, local) = (group.ranks(), group.local_ranks());
    if local.len() == 1 || local.len() == ranks as usize {
        return Ok(());
    }
    let local = local.iter().map(|rank| rank.0).collect();
    Err(LinksError::SomeRanks { local, ranks })
}

/// Streams of this process's ranks, the same for each check of a group: none is ever destroyed.
fn streams(group: &Group) -> Result<MutexGuard<'_, Vec<Stream>>, Error> {
    let streams = group.check_streams.lock();
    let mut streams = streams.unwrap_or_else(PoisonError::into_inner);
    for &rank in &group.local_ranks()[streams.len()..] {
        streams.push(group.device(rank)?.stream()?);
    }
    Ok(streams)
}

/// A number that earlier checks did not have.
fn salt() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as u64)
}
