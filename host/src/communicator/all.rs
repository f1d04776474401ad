//! One call for all ranks of a process.

use std::mem::discriminant;
use std::ops::{Index, IndexMut};

use ferry_layout::Rank;

use crate::call::{CombineInput, CombineOutput, DispatchInput, DispatchOutput};
use crate::communicator::Communicator;
use crate::communicator::Round;
use crate::communicator::launch::Prepared;
use crate::communicator::round::{CombinePending, DispatchPending, Dispatched, Unfinished};
use crate::error::{Error, LocalRanksError};
use crate::group::Group;
use crate::plan::Plan;
use crate::tensor::handles::Stream;

/// The ranks of a communicator that this process drives, to be called together.
///
/// Each call takes slices with one value for every rank, in the order of the ranks here: that of
/// [`Communicator::new`], which is ascending. It makes all checks of all ranks first. Where a check fails,
/// nothing is launched on any rank (`LocalRanksError::Count`, `LocalRanksError::Refused`). Then it
/// enqueues the kernels, one rank after another, from the calling thread; no launch waits for a kernel.
/// Where the first launch fails, nothing was enqueued, and the round stays as it was
/// (`LocalRanksError::Refused`). Where a later one fails, every rank of the call is poisoned
/// (`LocalRanksError::NotLaunched`), and the kernels that were launched before it end by their deadline.
///
/// A call takes no device memory; on the host it allocates lists with an entry for each rank.
///
/// So a process can give all ranks of a round away or none, and no rank waits for one that was refused. What
/// each rank does is what the calls of [`Communicator`] do, also those for single ranks, which stay:
/// `ranks[0].dispatch(..)`. A round may mix them.
///
/// ```
/// use ferry::*;
///
/// # fn main() -> Result<(), Error> {
/// let group = Group::simulated(2, 7)?;
/// let plan = Plan::new(&group, Config::new(4, 2, 8, 3))?;
/// let mut ranks = LocalRanks::new(&group, &plan)?;
/// let (mut inputs, mut rows, mut sums) = (Vec::new(), Vec::new(), Vec::new());
/// for rank in ranks.iter() {
///     let device = rank.device();
///     let x = device.upload_tensor([1, 8], &[0x3f80_u16; 8])?;
///     inputs.push(DispatchInput::new(x, device.upload_tensor([1, 2], &[1_i32, 2])?));
///     rows.push(*DispatchBuffers::new(device, &plan)?.output());
///     sums.push(CombineBuffers::new(device, &plan)?.output(1)?);
/// }
/// let streams = [Stream::DEFAULT; 2];
/// let dispatched = ranks.dispatch_all(&streams, &inputs, &rows)?;
/// let answers: Vec<_> = rows.iter().map(|rows| CombineInput::new(rows.tokens)).collect();
/// dispatched.combine_all(&streams, &answers, &sums)?;
/// for (rank, stream) in ranks.iter().zip(streams) {
///     if let Some(fault) = rank.synchronize(stream)? {
///         eprintln!("{fault}");
///     }
/// }
/// ranks.into_iter().try_for_each(|rank| Ok(rank.close()?))
/// # }
/// ```
#[derive(Debug)]
pub struct LocalRanks {
    ranks: Vec<Communicator>,
}

impl LocalRanks {
    /// [`Communicator::new`], whose ranks are called together. Collective. Synchronises.
    ///
    /// # Errors
    /// As [`Communicator::new`].
    pub fn new(group: &Group, plan: &Plan) -> Result<Self, Error> {
        Ok(Self::from(Communicator::new(group, plan)?))
    }

    /// The ranks by themselves, to be moved to threads or closed.
    pub fn into_ranks(self) -> Vec<Communicator> {
        self.ranks
    }

    /// The ranks, in the order of every call's slices.
    pub fn iter(&self) -> std::slice::Iter<'_, Communicator> {
        self.ranks.iter()
    }

    /// The ranks, to make calls of single ones.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, Communicator> {
        self.ranks.iter_mut()
    }

    /// [`Communicator::dispatch`] of all ranks. Enqueues only. Collective with the other processes.
    ///
    /// # Errors
    /// [`Error::LocalRanks`], with what [`Communicator::dispatch`] gives for the rank that it names. Only
    /// after `LocalRanksError::NotLaunched` anything is enqueued.
    pub fn dispatch_all(
        &mut self,
        streams: &[Stream],
        inputs: &[DispatchInput],
        outputs: &[DispatchOutput],
    ) -> Result<DispatchedAll<'_>, Error> {
        let counts = [
            ("streams", streams.len()),
            ("inputs", inputs.len()),
            ("outputs", outputs.len()),
        ];
        let ranks = self.ranks.iter_mut().collect();
        let each = call_all(
            ranks,
            &counts,
            |at, rank| rank.prepare_dispatch(streams[at], &inputs[at], &outputs[at]),
            Dispatched::of,
        )?;
        Ok(DispatchedAll { each })
    }

    /// [`Communicator::dispatch_async`] of all ranks. Enqueues only. Collective with the other processes.
    ///
    /// # Errors
    /// As [`dispatch_all`](Self::dispatch_all).
    pub fn dispatch_all_async(
        &mut self,
        streams: &[Stream],
        inputs: &[DispatchInput],
    ) -> Result<DispatchAllPending<'_>, Error> {
        let counts = [("streams", streams.len()), ("inputs", inputs.len())];
        let ranks = self.ranks.iter_mut().collect();
        let each = call_all(
            ranks,
            &counts,
            |at, rank| rank.prepare_dispatch_async(streams[at], &inputs[at]),
            DispatchPending::of,
        )?;
        Ok(DispatchAllPending { each })
    }

    /// As [`Communicator::unfinished`], of all ranks: the round that stands open because what a call gave
    /// was dropped, or because the next call was refused. Not collective.
    ///
    /// # Errors
    /// `LocalRanksError::Apart` where calls of single ranks have brought them to different points.
    pub fn unfinished_all(&mut self) -> Result<UnfinishedAll<'_>, Error> {
        let Some(first) = self.ranks.first() else {
            return Ok(UnfinishedAll::Nothing);
        };
        let (round, first) = (first.round, first.rank());
        let is_elsewhere = |rank: &&Communicator| discriminant(&rank.round) != discriminant(&round);
        if let Some(second) = self.ranks.iter().find(is_elsewhere).map(Communicator::rank) {
            return Err(LocalRanksError::Apart { first, second }.into());
        }
        let ranks = self.ranks.iter_mut();
        Ok(match round {
            Round::Idle => UnfinishedAll::Nothing,
            Round::Sent(_) => UnfinishedAll::DispatchWait(DispatchAllPending {
                each: each_of(ranks, |rest| match rest {
                    Unfinished::DispatchWait(pending) => Some(pending),
                    _ => None,
                }),
            }),
            Round::Received(_) => UnfinishedAll::Combine(DispatchedAll {
                each: each_of(ranks, |rest| match rest {
                    Unfinished::Combine(dispatched) => Some(dispatched),
                    _ => None,
                }),
            }),
            Round::Returned(_) => UnfinishedAll::CombineWait(CombineAllPending {
                each: each_of(ranks, |rest| match rest {
                    Unfinished::CombineWait(pending) => Some(pending),
                    _ => None,
                }),
            }),
        })
    }
}

impl From<Vec<Communicator>> for LocalRanks {
    /// Of what [`Communicator::new`] gave, all of it or some, in any order.
    fn from(ranks: Vec<Communicator>) -> Self {
        Self { ranks }
    }
}

impl Index<usize> for LocalRanks {
    type Output = Communicator;

    /// By place, not by number: the first rank of this process is at 0.
    fn index(&self, at: usize) -> &Communicator {
        &self.ranks[at]
    }
}

impl IndexMut<usize> for LocalRanks {
    fn index_mut(&mut self, at: usize) -> &mut Communicator {
        &mut self.ranks[at]
    }
}

impl IntoIterator for LocalRanks {
    type Item = Communicator;
    type IntoIter = std::vec::IntoIter<Communicator>;

    fn into_iter(self) -> Self::IntoIter {
        self.ranks.into_iter()
    }
}

impl<'a> IntoIterator for &'a LocalRanks {
    type Item = &'a Communicator;
    type IntoIter = std::slice::Iter<'a, Communicator>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a> IntoIterator for &'a mut LocalRanks {
    type Item = &'a mut Communicator;
    type IntoIter = std::slice::IterMut<'a, Communicator>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter_mut()
    }
}

/// What is left to do in an open round of all ranks; see [`LocalRanks::unfinished_all`].
#[derive(Debug)]
pub enum UnfinishedAll<'a> {
    /// No round is open.
    Nothing,
    /// The wait of a `dispatch_all_async`.
    DispatchWait(DispatchAllPending<'a>),
    /// The combine of a dispatch.
    Combine(DispatchedAll<'a>),
    /// The wait of a `combine_all_async`.
    CombineWait(CombineAllPending<'a>),
}

/// A dispatch of all ranks that was sent and not received; [`wait`](Self::wait) receives it.
#[must_use = "a dispatch that is not waited for blocks its communicators"]
#[derive(Debug)]
pub struct DispatchAllPending<'a> {
    each: Vec<DispatchPending<'a>>,
}

impl<'a> DispatchAllPending<'a> {
    /// [`DispatchPending::wait`] of all ranks. Enqueues only. Collective with the other processes.
    ///
    /// # Errors
    /// [`Error::LocalRanks`], with what [`DispatchPending::wait`] gives for the rank that it names.
    /// [`LocalRanks::unfinished_all`] gives the wait back, but after `LocalRanksError::NotLaunched`.
    pub fn wait(
        self,
        streams: &[Stream],
        outputs: &[DispatchOutput],
    ) -> Result<DispatchedAll<'a>, Error> {
        let counts = [("streams", streams.len()), ("outputs", outputs.len())];
        let each = call_all(
            self.each,
            &counts,
            |at, sent| sent.prepare_wait(streams[at], &outputs[at]),
            Dispatched::of,
        )?;
        Ok(DispatchedAll { each })
    }
}

/// A dispatch of all ranks whose combine is due.
#[must_use = "a dispatch that is not combined blocks its communicators"]
#[derive(Debug)]
pub struct DispatchedAll<'a> {
    each: Vec<Dispatched<'a>>,
}

impl<'a> DispatchedAll<'a> {
    /// [`Dispatched::combine`] of all ranks. Enqueues only. Collective with the other processes.
    ///
    /// # Errors
    /// [`Error::LocalRanks`], with what [`Dispatched::combine`] gives for the rank that it names.
    /// [`LocalRanks::unfinished_all`] gives the dispatch back, but after `LocalRanksError::NotLaunched`.
    pub fn combine_all(
        self,
        streams: &[Stream],
        inputs: &[CombineInput],
        outputs: &[CombineOutput],
    ) -> Result<(), Error> {
        let each = call_all(
            self.each,
            &counts_of(streams, inputs, outputs),
            |at, dispatched| dispatched.prepare_combine(streams[at], &inputs[at], &outputs[at]),
            Communicator::end_round,
        );
        each.map(drop)
    }

    /// [`Dispatched::combine_async`] of all ranks. Enqueues only. Collective with the other processes.
    ///
    /// # Errors
    /// As [`combine_all`](Self::combine_all).
    pub fn combine_all_async(
        self,
        streams: &[Stream],
        inputs: &[CombineInput],
        outputs: &[CombineOutput],
    ) -> Result<CombineAllPending<'a>, Error> {
        let each = call_all(
            self.each,
            &counts_of(streams, inputs, outputs),
            |at, dispatched| {
                dispatched.prepare_combine_async(streams[at], &inputs[at], &outputs[at])
            },
            CombinePending::of,
        )?;
        Ok(CombineAllPending { each })
    }
}

/// A combine of all ranks that was sent and not received; [`wait`](Self::wait) receives it.
#[must_use = "a combine that is not waited for blocks its communicators"]
#[derive(Debug)]
pub struct CombineAllPending<'a> {
    each: Vec<CombinePending<'a>>,
}

impl CombineAllPending<'_> {
    /// [`CombinePending::wait`] of all ranks. Enqueues only. Collective with the other processes.
    ///
    /// # Errors
    /// [`Error::LocalRanks`], with what [`CombinePending::wait`] gives for the rank that it names.
    /// [`LocalRanks::unfinished_all`] gives the wait back, but after `LocalRanksError::NotLaunched`.
    pub fn wait(self, streams: &[Stream]) -> Result<(), Error> {
        let each = call_all(
            self.each,
            &[("streams", streams.len())],
            |at, returned| returned.prepare_wait(streams[at]),
            Communicator::end_round,
        );
        each.map(drop)
    }
}

/// What a rank's part of a call begins with.
trait Local {
    fn rank(&self) -> Rank;
}

impl Local for &mut Communicator {
    fn rank(&self) -> Rank {
        Communicator::rank(self)
    }
}

impl Local for DispatchPending<'_> {
    fn rank(&self) -> Rank {
        self.expert_parallel().rank()
    }
}

impl Local for Dispatched<'_> {
    fn rank(&self) -> Rank {
        self.expert_parallel().rank()
    }
}

impl Local for CombinePending<'_> {
    fn rank(&self) -> Rank {
        self.expert_parallel().rank()
    }
}

/// How many arguments of each kind there are.
type Counts<'c> = &'c [(&'static str, usize)];

const fn counts_of(
    streams: &[Stream],
    inputs: &[CombineInput],
    outputs: &[CombineOutput],
) -> [(&'static str, usize); 3] {
    [
        ("streams", streams.len()),
        ("inputs", inputs.len()),
        ("outputs", outputs.len()),
    ]
}

/// Prepares the call of each rank, which stands at a place of the arguments, and launches all or none.
fn call_all<'a, L: Local, Next, T>(
    ranks: Vec<L>,
    counts: Counts<'_>,
    prepare: impl Fn(usize, L) -> Result<Prepared<'a, Next>, Error>,
    then: impl FnMut(&'a mut Communicator, Next) -> T,
) -> Result<Vec<T>, Error> {
    if let Some(&(argument, given)) = counts.iter().find(|(_, given)| *given != ranks.len()) {
        let local = ranks.iter().map(|rank| rank.rank().0).collect();
        return Err(LocalRanksError::Count {
            argument,
            given,
            local,
        }
        .into());
    }
    let prepare = |(at, of): (usize, L)| {
        let rank = of.rank();
        prepare(at, of).map_err(|error| LocalRanksError::Refused {
            rank,
            source: Box::new(error),
        })
    };
    let calls = (ranks.into_iter().enumerate().map(prepare)).collect::<Result<Vec<_>, _>>()?;
    Ok(Prepared::launch_all(calls, then)?)
}

/// What is left to do of each rank, which is the same for all.
fn each_of<'a, T>(
    ranks: impl Iterator<Item = &'a mut Communicator>,
    of: impl Fn(Unfinished<'a>) -> Option<T>,
) -> Vec<T> {
    ranks.filter_map(|rank| of(rank.unfinished())).collect()
}
