//! Calls for all ranks of a process.

use std::sync::Arc;

use ferry_layout::Rank;

use crate::call::{CombineInput, CombineOutput, DispatchInput, DispatchOutput};
use crate::communicator::Communicator;
use crate::communicator::launch::Prepared;
use crate::error::Error;
use crate::error::local_ranks::LocalRanksError;
use crate::tensor::handles::Stream;

/// Numbers of arguments, each with its name.
type Counts<'c> = &'c [(&'static str, usize)];

/// # All ranks of a process in one call
///
/// `ranks` are all communicators of this process that one [`new`](Self::new) returned, in any order. Each
/// other slice has one value for every rank, in the order of `ranks`. All checks of all ranks come first. If
/// one fails, nothing is launched on any rank ([`LocalRanksError`]: `Count`, `OtherCommunicator`,
/// `Missing`, `Refused`). Then the kernels are enqueued, one rank after another, from the calling thread; no
/// launch waits for a kernel. If the first launch fails, nothing was enqueued, and every round stays as it
/// was (`Refused`). If a later launch fails, every rank of the call is poisoned (`NotLaunched`), and the
/// kernels that were launched before it end by their deadline.
///
/// A call takes no device memory; on the host it allocates lists with an entry for each rank. So a process
/// enqueues a step of a round on all of its ranks or on none, and no rank waits for one that was refused. A
/// round may mix these calls with those of single ranks.
///
/// ```
/// use ferry::*;
///
/// # fn main() -> Result<(), Error> {
/// let group = Group::simulated(2, 7)?;
/// let plan = Plan::new(&group, Config::new(4, 2, 8, 3))?;
/// let mut ranks = Communicator::new(&group, &plan)?;
/// let (mut inputs, mut rows, mut sums) = (Vec::new(), Vec::new(), Vec::new());
/// for rank in &ranks {
///     let device = rank.device();
///     let x = device.upload_tensor([1, 8], &[0x3f80_u16; 8])?;
///     inputs.push(DispatchInput::new(x, device.upload_tensor([1, 2], &[1_i32, 2])?));
///     // These tensors stay allocated until the process ends: keep the buffers to free them.
///     rows.push(*DispatchBuffers::new(device, &plan)?.output());
///     sums.push(CombineBuffers::new(device, &plan)?.output(1)?);
/// }
/// let streams = [Stream::DEFAULT; 2];
/// Communicator::dispatch_all(&mut ranks, &streams, &inputs, &rows)?;
/// let answers = rows.iter().map(|rows| Ok(CombineInput::new(rows.tokens()?)));
/// let answers = answers.collect::<Result<Vec<_>, Error>>()?;
/// Communicator::combine_all(&mut ranks, &streams, &answers, &sums)?;
/// for (rank, stream) in ranks.iter().zip(streams) {
///     if let Some(fault) = rank.synchronize(stream)?.fault() {
///         eprintln!("{fault}");
///     }
/// }
/// Ok(Communicator::close_all(ranks)?)
/// # }
/// ```
impl Communicator {
    /// [`dispatch`](Self::dispatch) of all ranks. Enqueues only. Collective with the other processes.
    ///
    /// # Errors
    /// [`Error::LocalRanks`], which names a rank and has its error of [`dispatch`](Self::dispatch).
    /// Kernels were enqueued only with `LocalRanksError::NotLaunched`.
    pub fn dispatch_all(
        ranks: &mut [Self],
        streams: &[Stream],
        inputs: &[DispatchInput],
        outputs: &[DispatchOutput],
    ) -> Result<(), Error> {
        let counts = [
            ("streams", streams.len()),
            ("inputs", inputs.len()),
            ("outputs", outputs.len()),
        ];
        call_all(ranks, &counts, |at, rank| {
            rank.prepare_dispatch(streams[at], &inputs[at], &outputs[at])
        })
    }

    /// [`dispatch_async`](Self::dispatch_async) of all ranks. Enqueues only. Collective with the other
    /// processes.
    ///
    /// # Errors
    /// As [`dispatch_all`](Self::dispatch_all).
    pub fn dispatch_async_all(
        ranks: &mut [Self],
        streams: &[Stream],
        inputs: &[DispatchInput],
    ) -> Result<(), Error> {
        let counts = [("streams", streams.len()), ("inputs", inputs.len())];
        call_all(ranks, &counts, |at, rank| {
            rank.prepare_dispatch_async(streams[at], &inputs[at])
        })
    }

    /// [`dispatch_wait`](Self::dispatch_wait) of all ranks. Enqueues only. Collective with the other
    /// processes.
    ///
    /// # Errors
    /// As [`dispatch_all`](Self::dispatch_all).
    pub fn dispatch_wait_all(
        ranks: &mut [Self],
        streams: &[Stream],
        outputs: &[DispatchOutput],
    ) -> Result<(), Error> {
        let counts = [("streams", streams.len()), ("outputs", outputs.len())];
        call_all(ranks, &counts, |at, rank| {
            rank.prepare_dispatch_wait(streams[at], &outputs[at])
        })
    }

    /// [`dispatch_counts`](Self::dispatch_counts) of all ranks. Enqueues only. Not collective.
    ///
    /// # Errors
    /// As [`dispatch_all`](Self::dispatch_all).
    pub fn dispatch_counts_all(ranks: &mut [Self], streams: &[Stream]) -> Result<(), Error> {
        let counts = [("streams", streams.len())];
        call_all(ranks, &counts, |at, rank| {
            rank.prepare_dispatch_counts(streams[at])
        })
    }

    /// [`combine`](Self::combine) of all ranks. Enqueues only. Collective with the other processes.
    ///
    /// # Errors
    /// As [`dispatch_all`](Self::dispatch_all).
    pub fn combine_all(
        ranks: &mut [Self],
        streams: &[Stream],
        inputs: &[CombineInput],
        outputs: &[CombineOutput],
    ) -> Result<(), Error> {
        let counts = counts_of(streams, inputs, outputs);
        call_all(ranks, &counts, |at, rank| {
            rank.prepare_combine(streams[at], &inputs[at], &outputs[at])
        })
    }

    /// [`combine_async`](Self::combine_async) of all ranks. Enqueues only. Collective with the other
    /// processes.
    ///
    /// # Errors
    /// As [`dispatch_all`](Self::dispatch_all).
    pub fn combine_async_all(
        ranks: &mut [Self],
        streams: &[Stream],
        inputs: &[CombineInput],
        outputs: &[CombineOutput],
    ) -> Result<(), Error> {
        let counts = counts_of(streams, inputs, outputs);
        call_all(ranks, &counts, |at, rank| {
            rank.prepare_combine_async(streams[at], &inputs[at], &outputs[at])
        })
    }

    /// [`combine_wait`](Self::combine_wait) of all ranks. Enqueues only. Collective with the other processes.
    ///
    /// # Errors
    /// As [`dispatch_all`](Self::dispatch_all).
    pub fn combine_wait_all(ranks: &mut [Self], streams: &[Stream]) -> Result<(), Error> {
        let counts = [("streams", streams.len())];
        call_all(ranks, &counts, |at, rank| {
            rank.prepare_combine_wait(streams[at])
        })
    }

    /// [`give_up`](Self::give_up) of all ranks. Enqueues only. Collective with the other processes.
    ///
    /// # Errors
    /// As [`dispatch_all`](Self::dispatch_all).
    pub fn give_up_all(ranks: &mut [Self], streams: &[Stream]) -> Result<(), Error> {
        let counts = [("streams", streams.len())];
        call_all(ranks, &counts, |at, rank| rank.prepare_give_up(streams[at]))
    }
}

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

/// Prepares the call of each rank, given its place in the arguments, and launches all or none.
fn call_all(
    ranks: &mut [Communicator],
    counts: Counts<'_>,
    prepare: impl Fn(usize, &Communicator) -> Result<Prepared, Error>,
) -> Result<(), Error> {
    require_whole(ranks)?;
    if let Some(&(argument, given)) = counts.iter().find(|(_, given)| *given != ranks.len()) {
        let local = ranks.iter().map(|rank| rank.rank().0).collect();
        return Err(LocalRanksError::Count {
            argument,
            given,
            local,
        }
        .into());
    }
    let prepare = |(at, rank): (usize, &Communicator)| {
        prepare(at, rank).map_err(|error| LocalRanksError::Refused {
            rank: rank.rank(),
            source: Box::new(error),
        })
    };
    let calls = (ranks.iter().enumerate().map(prepare)).collect::<Result<Vec<_>, _>>()?;
    Ok(Prepared::launch_all(ranks, calls)?)
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
