//! Two communicators at work on the same GPUs at the same time.

use anyhow::{Context, Result};
use ferry::Rank;

use super::rounds::{PLACES, SLOTS, Turns, TurnsOf, count, turn};
use super::{Outcome, Suite};
#[cfg(feature = "cuda")]
use crate::sharing;
use ferry_rig::Dice;

/// Rounds of each communicator that are enqueued before the host waits.
const TOGETHER: usize = 2 * SLOTS;

/// Multiprocessors of a device that does not say.
const ANY_MULTIPROCESSORS: u32 = 132;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    let rounds = count(suite);
    let name = format!("two communicators on two streams, {rounds} rounds in random order");
    suite.check(&name, |suite| two_communicators(suite, rounds))
}

/// Both fit on every device, so that neither has to wait for the end of what it shares the device with.
fn two_communicators(suite: &mut Suite<'_>, rounds: usize) -> Result<Outcome> {
    let half = least_multiprocessors(suite)? / 2;
    let all = TurnsOf::new(suite, suite.ranks());
    let of = |seed: u64| TurnsOf {
        max_sms: Some(half.max(1)),
        seed: all.seed + seed,
        ..all
    };
    let [first, second] = [of(100), of(200)];
    let mut two = [Turns::of(suite, first)?, Turns::of(suite, second)?];
    let seed = suite.args.seed;
    let result = enqueue_both(&mut two, rounds, Order::of(suite, seed));
    let [first, second] = two;
    suite.conclude(first.session, result)?;
    suite.conclude(second.session, Ok(()))?;
    Ok(Outcome::Measured(format!(
        "{half} multiprocessors for each, {rounds} rounds of each"
    )))
}

/// Multiprocessors that a kernel occupies, of the rank that has the fewest. Collective.
fn least_multiprocessors(suite: &mut Suite<'_>) -> Result<u32> {
    let ranks = suite.group().local_ranks();
    #[cfg(feature = "cuda")]
    let of = |rank: &Rank| {
        let (group, rank) = (suite.group(), *rank);
        let all = group.cuda(rank)?.multiprocessors();
        Some(sharing::multiprocessors(group, rank, all, None))
    };
    #[cfg(not(feature = "cuda"))]
    let of = |_: &Rank| None;
    let own = ranks.iter().filter_map(of).min();
    let own = own.unwrap_or(ANY_MULTIPROCESSORS);
    let all = (suite.open.gather)(&own.to_le_bytes())?;
    let number = |bytes: &Vec<u8>| <[u8; 4]>::try_from(&bytes[..]).map(u32::from_le_bytes);
    let all: Vec<u32> = all
        .iter()
        .map(number)
        .collect::<Result<_, _>>()
        .context("a process said how many multiprocessors it has in other than 4 bytes")?;
    Ok(all.into_iter().min().unwrap_or(own))
}

/// Order in which a rank enqueues the rounds of the two.
struct Order {
    /// Draws of each local rank.
    dice: Vec<Dice>,
}

impl Order {
    /// Each rank has one of its own. The simulator has one stream a rank, in which two
    /// communicators must come in the same order everywhere.
    fn of(suite: &Suite<'_>, seed: u64) -> Self {
        let own = u64::from(!suite.is_simulated());
        let ranks = suite.group().local_ranks();
        let of = |rank: &Rank| Dice::new(seed * 7919 + own * (u64::from(rank.0) + 1));
        Self {
            dice: ranks.iter().map(of).collect(),
        }
    }

    /// Draws which of the two is next, so often each.
    fn draw(&mut self, index: usize, each: usize) -> Vec<usize> {
        let mut which: Vec<usize> = (0..2 * each).map(|round| round % 2).collect();
        self.dice[index].shuffle(&mut which);
        which
    }
}

fn enqueue_both(two: &mut [Turns; 2], rounds: usize, mut order: Order) -> Result<()> {
    let ranks = two[0].session.local_ranks().len();
    let mut done = 0;
    while done < rounds {
        let each = TOGETHER.min(rounds - done);
        // Another rank begins each time.
        for index in (0..ranks).map(|index| (index + done / TOGETHER) % ranks) {
            let mut next = [done; 2];
            for which in order.draw(index, each) {
                two[which]
                    .session
                    .launch(index, turn(next[which]))
                    .with_context(|| format!("communicator {which}, round {}", next[which]))?;
                next[which] += 1;
            }
        }
        done += each;
        for (which, turns) in two.iter().enumerate() {
            let communicator = || format!("communicator {which}, before round {done}");
            turns.session.synchronize().with_context(communicator)?;
            // The last result of every place.
            (done.saturating_sub(PLACES)..done)
                .try_for_each(|round| turns.verify(round))
                .with_context(communicator)?;
        }
    }
    Ok(())
}
