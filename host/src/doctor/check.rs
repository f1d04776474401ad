//! Launches of the kernel that checks links, and the exchange of what they found.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytemuck::Zeroable;
use ferry_layout::{LinkRecord, LinkTest, LinksArgs, Rank};

use super::judge::{Cell, Cells};
use crate::communicator::Communicator;
use crate::communicator::memory::agree;
use crate::error::Error;
use crate::group::Group;
use crate::plan::Plan;
use crate::plan::config::Config;
use crate::tensor::handles::Stream;

/// Elements of a row, 4 KiB.
const HIDDEN: usize = 2048;
/// Times below that, in the simulator for each rank, are never slow: a rank that was interrupted may take
/// them. In simulated time every rank's turns count, and a stall lasts longer with more ranks.
const SLOW_FLOOR: Duration = Duration::from_micros(20);
/// Time before the first slot's end, in addition: a kernel may begin late on all ranks.
const GRACE: Duration = Duration::from_millis(500);
/// Time in which one rank of each pair sends: hundreds of times what it takes, and more than ranks begin
/// after each other. A rank that waits in vain is late for its next peer, which waits a slot longer.
const SLOT: Duration = Duration::from_millis(20);
/// [`SLOT`] for each rank on a GPU that ranks share, where they may take turns of milliseconds.
const SHARED_SLOT: Duration = Duration::from_millis(200);

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
    plan: Plan,
    effort: Effort,
    ranks: Vec<Communicator>,
    streams: Vec<Stream>,
    slot: Duration,
    /// Largest flag so far.
    flags: u64,
}

impl<'a> Check<'a> {
    /// Makes the communicator of a group with at most `on_a_gpu` ranks on a GPU. Collective. Synchronizes.
    pub(super) fn begin(group: &'a Group, on_a_gpu: u64) -> Result<Self, Error> {
        let effort = Effort::of(group);
        let top_k = LinkRecord::WORDS as usize;
        let experts = top_k * group.ranks() as usize;
        let plan = Plan::new(group, Config::new(experts, top_k, HIDDEN, effort.rows))?;
        let slot = match on_a_gpu {
            1 => SLOT,
            ranks => SHARED_SLOT * ranks as u32,
        };
        // Twice as many slots as rounds of pairs, of which there are at most as many as ranks; and as much
        // time again for the kernel to end.
        let deadline = 2 * (GRACE + slot * 2 * group.ranks());
        let mut ranks = Communicator::new(group, &plan)?;
        for rank in &mut ranks {
            rank.set_deadline(Some(deadline))?;
        }
        let streams = ranks.iter().map(|rank| rank.device().stream());
        let mut check = Self {
            group,
            plan,
            effort,
            streams: streams.collect::<Result<_, _>>()?,
            ranks,
            slot,
            flags: 0,
        };
        // Loads the kernel on all ranks, so that later launches begin at one time. Exchanges nothing.
        check.run(LinkTest::Flag, &vec![0; group.ranks() as usize])?;
        Ok(check)
    }

    /// Bytes that a test sends.
    pub(super) const fn bytes(&self, test: LinkTest) -> u64 {
        test.bytes(self.plan.shape())
    }

    /// Times that are never slow.
    pub(super) const fn floor(&self) -> Duration {
        self.effort.floor
    }

    /// The communicators, to be closed.
    pub(super) fn into_ranks(self) -> Vec<Communicator> {
        self.ranks
    }

    /// Makes a test of all pairs that are among `peers`: a bit for each peer, of each rank. Collective.
    /// Synchronizes.
    pub(super) fn run(&mut self, test: LinkTest, peers: &[u64]) -> Result<Cells, Error> {
        let launches = match test {
            LinkTest::Flag | LinkTest::Inline => 1,
            LinkTest::Rows => self.effort.launches,
        };
        let mut own = Cells::none(self.group.ranks());
        for _ in 0..launches {
            let launched = self.launch(test, peers);
            // Also a barrier: the next launch begins on all ranks after this one has ended on all.
            let found = agree(&*self.group.fabric, "checking links", launched)??;
            for (rank, cells) in found {
                own.merge(rank, &cells);
            }
        }
        self.gather(own)
    }

    /// Launches the test once, and returns what each rank of this process found with each peer.
    fn launch(&mut self, test: LinkTest, peers: &[u64]) -> Result<Vec<(Rank, Vec<Cell>)>, Error> {
        let repeats = match test {
            LinkTest::Flag | LinkTest::Inline => self.effort.repeats,
            LinkTest::Rows => 2,
        };
        let flags_before = self.flags;
        self.flags += 2 * repeats;
        let numbers: Vec<_> = self.ranks.iter().map(Communicator::rank).collect();
        let salt = self.group.fabric.all_gather(salt())?;
        let rank = |at: usize| numbers[at].0 as usize;
        Communicator::links_all(&mut self.ranks, &self.streams, |at| LinksArgs {
            test: test as u64,
            peers: peers[rank(at)],
            flags_before,
            repeats,
            salt: salt[0],
            grace_ns: GRACE.as_nanos() as u64,
            slot_ns: self.slot.as_nanos() as u64,
            ..LinksArgs::zeroed()
        })?;
        let mut found = Vec::new();
        for (rank, &stream) in self.ranks.iter().zip(&self.streams) {
            rank.device().synchronize(stream)?;
        }
        for (rank, &Rank(number)) in self.ranks.iter().zip(&numbers) {
            let records = rank.link_records(test)?;
            let cells = (0..).zip(&records).map(|(peer, records)| {
                // Those of a pair that is left out are of an earlier test.
                match peers[number as usize] >> peer & 1 {
                    0 => Cell::NONE,
                    _ => Cell::of(records),
                }
            });
            found.push((Rank(number), cells.collect()));
        }
        Ok(found)
    }

    /// Returns what all ranks found, from what those of this process did. Collective.
    fn gather(&self, own: Cells) -> Result<Cells, Error> {
        let (fabric, ranks) = (&self.group.fabric, self.group.ranks());
        if self.ranks.len() == ranks as usize {
            return Ok(own);
        }
        let me = self.ranks[0].rank();
        let mut all = Cells::none(ranks);
        for peer in (0..ranks).map(Rank) {
            let words = fabric.all_gather(own.get(me, peer).word())?;
            for (rank, word) in (0..).map(Rank).zip(words) {
                all.set(rank, peer, Cell::of_word(word));
            }
        }
        Ok(all)
    }
}

/// A number that earlier checks did not have, whose rows may still be in the memory that this one was given.
fn salt() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as u64)
}
