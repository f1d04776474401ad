//! A call of all ranks of a process.

use std::sync::Arc;

use ferry_layout::Rank;

use crate::call::Call;
use crate::communicator::launch::Prepared;
use crate::communicator::{Communicator, Poison};
use crate::error::Error;
use crate::error::local_ranks::LocalRanksError;
use crate::tensor::handles::Stream;

impl Communicator {
    /// Makes a call on all ranks of this process: on all of them or on none. Enqueues only. Collective with
    /// the other processes, but for [`dispatch_counts`](Self::dispatch_counts) and with
    /// [`skip_a2a`](crate::Config::skip_a2a).
    ///
    /// `ranks` are all communicators of this process that one [`new`](Self::new) returned, in any order;
    /// `streams` and `calls` have one value for each, in that order. The calls are of one kind, with each
    /// rank's own tensors. All checks of all ranks come first. If one fails, nothing is launched on any rank.
    /// Then the kernels are enqueued, one rank after another, from the calling thread; no launch waits for a
    /// kernel. If the first launch fails, nothing was enqueued, and every round stays as it was. If a later
    /// launch fails, every rank is poisoned, and the kernels that were launched before it end by their
    /// deadline.
    ///
    /// So no rank waits for one that was refused. A call takes no device memory; on the host it allocates a
    /// list with an entry for each rank. A round may mix these calls with those of single ranks.
    ///
    /// ```
    /// use ferry::*;
    ///
    /// # fn main() -> Result<(), Error> {
    /// let group = Group::simulated(2, 7)?;
    /// let plan = Plan::new(&group, Config::new(4, 2, 8, 3))?;
    /// let mut ranks = Communicator::new(&group, &plan)?;
    /// let (mut dispatches, mut combines) = (Vec::new(), Vec::new());
    /// for rank in &ranks {
    ///     let device = rank.device();
    ///     let x = device.upload_tensor([1, 8], &[0x3f80_u16; 8])?;
    ///     let input = DispatchInput::new(x, device.upload_tensor([1, 2], &[1_i32, 2])?);
    ///     // These tensors stay allocated until the process ends: keep the buffers to free them.
    ///     let rows = *DispatchBuffers::new(device, &plan)?.output();
    ///     dispatches.push(Call::Dispatch(input, rows));
    ///     let answers = CombineInput::new(rows.tokens()?);
    ///     combines.push(Call::Combine(answers, CombineBuffers::new(device, &plan)?.output(1)?));
    /// }
    /// let streams = [Stream::DEFAULT; 2];
    /// Communicator::together(&mut ranks, &streams, &dispatches)?;
    /// Communicator::together(&mut ranks, &streams, &combines)?;
    /// for (rank, stream) in ranks.iter().zip(streams) {
    ///     if let Some(fault) = rank.synchronize(stream)?.fault() {
    ///         eprintln!("{fault}");
    ///     }
    /// }
    /// Ok(Communicator::close_all(ranks)?)
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::LocalRanks`]: `NoRanks`, `OtherCommunicator`, `Missing`, `Count`, `OtherCall`; `Refused`,
    /// which names a rank and has the error of its [`enqueue`](Self::enqueue); `NotLaunched`, with which
    /// alone kernels were enqueued.
    pub fn together(ranks: &mut [Self], streams: &[Stream], calls: &[Call]) -> Result<(), Error> {
        require_whole(ranks)?;
        require_alike(ranks, streams, calls)?;
        let mut prepared = Vec::with_capacity(ranks.len());
        for ((rank, &stream), call) in ranks.iter().zip(streams).zip(calls) {
            let call = rank.prepare(stream, call);
            prepared.push(call.map_err(|error| LocalRanksError::Refused {
                rank: rank.rank(),
                source: Box::new(error),
            })?);
        }
        Ok(launch_all(ranks, prepared)?)
    }
}

/// Enqueues a kernel of each rank, one after another. If the first cannot be enqueued, none is, and all ranks
/// stay as they are; if a later one cannot, all are poisoned.
pub(super) fn launch_all(
    ranks: &mut [Communicator],
    prepared: Vec<Prepared>,
) -> Result<(), LocalRanksError> {
    for (at, call) in prepared.into_iter().enumerate() {
        let Err(error) = ranks[at].launch(call) else {
            continue;
        };
        let (rank, source) = (ranks[at].rank(), Box::new(error));
        if at == 0 {
            return Err(LocalRanksError::Refused { rank, source });
        }
        for each in ranks {
            each.poison(Poison::Launch(rank));
        }
        return Err(LocalRanksError::NotLaunched { rank, source });
    }
    Ok(())
}

/// Checks that these are all ranks of this process of one communicator.
fn require_whole(ranks: &[Communicator]) -> Result<(), LocalRanksError> {
    let Some(first) = ranks.first() else {
        return Err(LocalRanksError::NoRanks);
    };
    let is_other = |rank: &&Communicator| !Arc::ptr_eq(&rank.windows, &first.windows);
    if let Some(other) = ranks.iter().find(is_other) {
        return Err(LocalRanksError::OtherCommunicator {
            first: first.rank(),
            other: other.rank(),
        });
    }
    let mut local = first.windows.local_ranks().into_iter();
    let is_missing = |local: &Rank| ranks.iter().all(|rank| rank.rank() != *local);
    match local.find(is_missing) {
        Some(rank) => Err(LocalRanksError::Missing {
            rank,
            given: ranks.iter().map(|rank| rank.rank().0).collect(),
        }),
        None => Ok(()),
    }
}

/// Checks that there is a stream and a call for each rank, and that all calls are of one kind: a rank that
/// gave up what another one combines would only end with the deadline.
fn require_alike(
    ranks: &[Communicator],
    streams: &[Stream],
    calls: &[Call],
) -> Result<(), LocalRanksError> {
    for (argument, given) in [("streams", streams.len()), ("calls", calls.len())] {
        if given != ranks.len() {
            let local = ranks.iter().map(|rank| rank.rank().0).collect();
            return Err(LocalRanksError::Count {
                argument,
                given,
                local,
            });
        }
    }
    let (wanted, mut each) = (calls[0].name(), ranks.iter().zip(calls));
    match each.find(|(_, call)| call.name() != wanted) {
        Some((rank, call)) => Err(LocalRanksError::OtherCall {
            first: wanted,
            other: call.name(),
            rank: rank.rank(),
        }),
        None => Ok(()),
    }
}
