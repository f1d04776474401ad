//! A rank of a communicator.

pub(crate) mod all;
pub(crate) mod memory;
pub(crate) mod open;
pub(crate) mod pointers;
pub(crate) mod round;

use std::any::Any;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ferry_layout::{Common, Counter, CulpritWord, Fault, FaultKind, Rank, Window};

use self::open::Open;
use self::streams::Streams;
use crate::communicator::memory::{Private, Windows};
use crate::device::Device;
use crate::device::sharing::one_stream::Turn;
use crate::device::sharing::residents::Residence;
use crate::error::input_fault::InputFault;
use crate::error::{Error, LocalRanksError};
use crate::group::Member;
use crate::plan::Plan;
use crate::tensor::handles::Stream;

pub(crate) mod close;
pub(crate) mod launch;
mod seat;
mod set_up;
mod streams;

/// One rank of a communicator: sends tokens to their experts ([`dispatch`](Self::dispatch)) and
/// brings the experts' outputs back ([`combine`](Self::combine)).
///
/// The two alternate. Calls only enqueue kernels: none allocates, synchronises, compiles or
/// reads device memory, so all can be captured in a CUDA graph and replayed. A round is
/// collective: every rank of the group enqueues the same sequence of calls, with its own data,
/// and split and fused calls may be mixed between ranks. The kernels of a round belong in one
/// stream, or in streams that the caller orders.
///
/// From compute capability 9.0 on, a kernel may begin before the one before it in its stream has
/// ended, and waits for that itself before it reads or writes a tensor (programmatic stream
/// serialization): a captured graph has such edges.
///
/// A graph may have a part of a round: dispatch in one graph, experts enqueued by the host, combine in
/// another. Each half is captured once, in that order, and launched from then on, as a capture counts as
/// the call and a launch of the graph does not ([`round`](Self::round)). A launch out of
/// turn, such as a second dispatch before the combine, is refused on the device and writes nothing.
/// This rank then gives up with [`OutOfTurn`](FaultKind::OutOfTurn), and its peers with a timeout
/// whose `culprit` is this rank. With [`skip_a2a`](crate::Config::skip_a2a) such a launch is not
/// noticed.
///
/// # What waits on a GPU at one time
///
/// A kernel that waits for peers begins with as many blocks as [`max_sms`](Self::max_sms) says, each
/// with a multiprocessor of its own, and all must find room before any rank gets on. So on one GPU
/// the blocks of all kernels that wait for peers and can be at work at one time (of all ranks there,
/// all communicators, NCCL) are at most its multiprocessors. Else two communicators in two streams,
/// or Ferry beside NCCL, can each hold the multiprocessors that the other one needs on another GPU,
/// and wait for each other until the deadline, which is then a [`PeerTimeout`](crate::FaultKind) of
/// all. Either order them in one stream, in the same order on every rank (or by events), or let them
/// fit together: the sum of their `max_sms`, and of what others take (NCCL: a multiprocessor a
/// channel, `NCCL_MAX_CTAS`), is at most the device's. Kernels that wait for nobody (a GEMM, fused
/// SiLU, `combine_async`) may take any number, and only delay; `dispatch_async` waits for the ranks
/// that are still in the round before.
///
/// Streams wait for each other, too, where they share a hardware queue of the driver's: a process has
/// 8, or as many as `CUDA_DEVICE_MAX_CONNECTIONS` said when the driver was initialised, at most 32. Streams
/// with work that are more than the queues share them, so at most as many have kernels at work that wait
/// for peers. Where the variable is 1, the rounds of two communicators are enqueued in the same order on
/// every rank.
///
/// Freeing memory ([`close`](Self::close), [`Device::free`]), loading a module, the first launch of a kernel
/// that is loaded lazily, and synchronizing the context wait for kernels of other ranks on the GPU. If those
/// wait for a launch that the same thread has yet to make, or one that waits itself, they do until the
/// deadline: do so between rounds, while no kernel of another rank waits for a launch to come. Right were, on
/// an H200 with driver 580 and 4 ranks (`ferry-tests gpu --filter "order on one GPU"`): allocating, also in
/// the order of a stream, pageable copies, first launches of Ferry's kernels, another thread that
/// synchronizes the context, 1,000 launches for one rank before another's, one graph with the rounds of all
/// ranks, and a kernel with an early trigger between dispatch and combine.
///
/// Under MPS the same counts for all processes of a GPU together. In a stream of a green context a
/// launch that takes more multiprocessors than the context has is refused
/// ([`Error::GreenContext`]); those of a graph are those of its capture.
///
/// # Ranks that share a GPU
///
/// With `GroupOptions::share_gpus` each rank takes its [part](crate::device::GpuRanks::limit) of the GPU, so
/// that a group's kernels fit together. What this process knows beyond is checked as a communicator is made:
/// on each GPU that ranks of a group share, the largest live communicator of every rank of this process, of
/// whichever group, counts, and the sum is at most the GPU's multiprocessors
/// ([`SharedGpuError::NoRoom`](crate::error::SharedGpuError) lists them). What other processes have there is
/// not known: two groups of the same processes, a rank each on the GPU, are not added up, and fit only if
/// their `max_sms` make them. Two communicators of one rank may be ordered in one stream; where they overlap,
/// give both a smaller `max_sms`.
///
/// Ranks of one process each have streams of their own there. A call is refused
/// ([`SharedGpuError::OneStream`](crate::error::SharedGpuError), and nothing is enqueued) whose kernel would
/// come behind a kernel of another rank of its communicator that waits for it, in the same stream, or in the
/// same stream of a capture; so is a graph of `CudaDevice::capture` as it is launched. That other kernel
/// ends at its deadline, unless the call is made with another stream before. Split calls may share a
/// stream: send on all ranks, then wait; threads that enqueue there agree on that order. The handles 0 and 1
/// are one stream, and 2 is one for each thread.
/// Not seen are orders by events, those of the default stream with streams that do not opt out of it, those
/// between communicators, and of a rank whose calls others captured (torch, say) all but captures.
///
/// What a kernel meets (an invalid expert id, a peer that does not come) is found by
/// [`check`](Self::check), after the stream was synchronised.
///
/// A value can be moved to another thread; each local rank can have its own.
///
/// # Dropped
///
/// [`close`](Self::close) ends a rank, and says what went wrong. A rank that is dropped instead waits for no
/// other one. Its memory is freed, which synchronises with its device, where all ranks of the group
/// are in this process and on one node, and nothing that was launched of this one can be at work:
/// each stream that it was launched into was given to [`synchronize`](Self::synchronize) since,
/// whatever that found, and no graph has had its calls, whoever made it. The windows are freed with
/// the last rank, whose drop so synchronises with each device of the process that had one: do not drop it
/// between launches of another communicator that this thread drives, as these wait for each other. Else this
/// rank's memory and all windows are leaked, with a warning: an event of
/// `tracing`, and for a program without a subscriber a line on stderr, once a process. Where others made a
/// [graph of its calls](Self::assume_no_foreign_graphs), its group is not closed any more, either. A wait of
/// another kind (of another library, of the device's own) is not seen here, nor is one for the
/// default stream that each thread has of its own.
///
/// What peers do when a rank is gone, [`Group`](crate::Group#after-a-rank-was-lost) says.
pub struct Communicator {
    pub(crate) plan: Plan,
    rank: Rank,
    /// See [`max_sms`](Self::max_sms).
    max_sms: Option<u32>,
    /// Where other ranks of this process share its GPU, how many there are with it.
    gpu_ranks: Option<u32>,
    /// Where other ranks of this process do.
    turn: Option<Turn>,
    /// As the kernels see it: where nothing travels, of the only rank.
    pub(crate) common: Common,
    /// The round, as the calls so far left it.
    pub(crate) open: Open,
    memory: Private,
    windows: Arc<Windows>,
    /// A [`Launchable`], which graphs hold, too.
    member: Arc<dyn Any + Send + Sync>,
    /// Those that were launched into.
    streams: Streams,
    /// Why it gave up.
    poison: OnceLock<Poison>,
    /// An input fault that was told, until it is known that nothing worse came behind it.
    told: Mutex<Option<Fault>>,
    closed: bool,
}

/// Why a communicator is of no use any more.
#[derive(Clone, Copy, Debug)]
enum Poison {
    /// A kernel gave up, or a peer's.
    Fault(Fault),
    /// A call of all ranks of the process could not be launched on this one.
    Launch(Rank),
    /// A peer gave up on this rank.
    PeerGaveUp { rank: Rank, peer: Rank },
}

impl Poison {
    /// What every later call gives.
    fn error(self) -> Error {
        match self {
            Self::Fault(fault) => Error::Poisoned(fault),
            Self::Launch(rank) => LocalRanksError::Poisoned { rank }.into(),
            Self::PeerGaveUp { rank, peer } => Error::PeerGaveUp { rank, peer },
        }
    }
}

/// What kernels of a communicator need for as long as they can be launched: it and the graphs that
/// were captured of it hold one together.
struct Launchable {
    /// The group is not closed.
    _member: Member,
    /// They find room on their GPU.
    _residence: Option<Residence>,
    /// Their fabric, and so the devices and kernels of this process, stay when communicator and
    /// group are dropped.
    _windows: Arc<Windows>,
}

impl Communicator {
    /// This rank.
    pub const fn rank(&self) -> Rank {
        self.rank
    }

    /// What it was made with.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Most multiprocessors that its kernels occupy: [`Config::max_sms`](crate::Config::max_sms), or its
    /// [part of the GPU](crate::device::GpuRanks::limit) that it shares, if that is less; `None` for all.
    pub const fn max_sms(&self) -> Option<u32> {
        self.max_sms
    }

    /// Its device, for tensors and streams.
    pub fn device(&self) -> &Arc<dyn Device> {
        self.memory.device()
    }

    /// Whether a kernel has reported something so far. Reads host-visible memory; does not
    /// synchronise, so kernels still running may report later. Not collective.
    ///
    /// A fault of the input comes once, as a value: the round goes on, and so must this rank, because its
    /// peers wait for the rest of its round. Of several since the last that was told it is the first, but
    /// one of [`OutputTooSmall`](FaultKind::OutputTooSmall) goes before the others: those are not told.
    ///
    /// ```
    /// # fn all(rank: &ferry::Communicator) -> Result<(), ferry::Error> {
    /// if let Some(fault) = rank.check()? {
    ///     eprintln!("{fault}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Fault`]: why this rank gave up, once. After it this and every later call gives
    /// [`Error::Poisoned`], and only [`close`](Self::close) is left.
    pub fn check(&self) -> Result<Option<InputFault>, Error> {
        // Held from reading to acknowledging, so that no two threads tell one record.
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        self.require_alive()?;
        let Some((fault, number)) = self.fault()? else {
            return Ok(None);
        };
        if let (true, Some(page)) = (fault.kind.is_input(), &self.memory.page) {
            page.acknowledge(number);
            *told = Some(fault);
            return Ok(Some(InputFault(fault)));
        }
        self.poison(Poison::Fault(fault));
        Err(Error::Fault(fault))
    }

    /// Waits for everything enqueued on `stream`, then [`check`](Self::check)s, and after an
    /// input fault also finds a communicator that gave up later. Then it looks whether a peer has
    /// told this rank that it gave up on it: a rank that came late may have received all that it
    /// waited for. That reads 8 bytes for each rank from the device. Not collective, but waits for
    /// the peers that the kernels wait for, as long as the deadline allows: a thread that drives
    /// several ranks enqueues on all of them first, and then waits for each.
    ///
    /// ```
    /// # use ferry::*;
    /// # fn work(rank: &mut Communicator, stream: Stream, rounds: u32) -> Result<(), Error> {
    /// # fn round(_: &mut Communicator) -> Result<(), Error> { Ok(()) }
    /// for _ in 0..rounds {
    ///     round(rank)?; // dispatch, experts, combine
    ///     if let Some(fault) = rank.synchronize(stream)? {
    ///         eprintln!("{fault}"); // this round's results are not those of its whole input
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// With `?` alone an input fault is dropped, and it comes only once: also where a program waits between
    /// dispatch and combine.
    ///
    /// # Errors
    /// As [`check`](Self::check), [`Error::PeerGaveUp`], and what the device reports.
    pub fn synchronize(&self, stream: Stream) -> Result<Option<InputFault>, Error> {
        self.device().synchronize(stream)?;
        self.streams.pass(stream);
        let found = self.check()?;
        let told = self
            .told
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match told {
            // A kernel records why before it stops, unless it did not get to the page: looked for once more.
            Some(fault) if self.has_stopped()? => {
                self.check()?;
                Err(self.poison(Poison::Fault(fault)))
            }
            _ if found.is_none() => self.require_peers().map(|()| None),
            // Told once, so now; the next call finds what the peers did.
            _ => Ok(found),
        }
    }

    /// That no peer has told this rank that it gave up on it. Whoever gave up on another rank is no
    /// news here: this rank's kernels find that by themselves, and tell it to those who wait for
    /// this rank. Synchronises.
    fn require_peers(&self) -> Result<(), Error> {
        let shape = self.plan.shape();
        if self.plan.config().skip_a2a || shape.ranks == 1 {
            return Ok(());
        }
        let first = Window::of(shape).culprit(Rank(0)).bytes();
        let mut words = vec![[0; 8]; shape.ranks as usize];
        let at = self.memory.window.plus(first);
        self.device().download(at, words.as_flattened_mut())?;
        let own = CulpritWord::of(self.rank).0.to_le_bytes();
        match (0..).zip(&words).find(|&(_, &word)| word == own) {
            Some((peer, _)) => Err(self.poison(Poison::PeerGaveUp {
                rank: self.rank,
                peer: Rank(peer),
            })),
            None => Ok(()),
        }
    }

    fn require_alive(&self) -> Result<(), Error> {
        self.poison
            .get()
            .map_or(Ok(()), |poison| Err(poison.error()))
    }

    /// Makes every later call fail; the first reason counts.
    fn poison(&self, why: Poison) -> Error {
        self.poison.get_or_init(|| why).error()
    }

    /// Whether a kernel of this rank gave up, fault or not. Synchronises.
    fn has_stopped(&self) -> Result<bool, Error> {
        let mut stopped = [0; 8];
        let at = self.memory.workspace.plus(Counter::Aborted.bytes());
        self.device().download(at, &mut stopped)?;
        Ok(stopped != [0; 8])
    }

    /// A fault with the group's numbers of ranks. Where nothing travels, kernels know this rank alone.
    const fn as_of_group(&self, fault: Fault) -> Fault {
        let rank = self.rank;
        let fault = Fault {
            gpu_ranks: self.gpu_ranks,
            ..fault
        };
        match (self.plan.config().skip_a2a, fault.kind.is_input()) {
            (false, _) => fault,
            // Its peer is a slot, but of outputs that are too small.
            (true, true) => Fault {
                rank,
                peer: match fault.kind {
                    FaultKind::OutputTooSmall => rank,
                    _ => fault.peer,
                },
                culprit: rank,
                ..fault
            },
            (true, false) => Fault {
                rank,
                peer: rank,
                culprit: rank,
                ..fault
            },
        }
    }

    /// The fault on the page that was not told yet, and the number of its record.
    fn fault(&self) -> Result<Option<(Fault, u64)>, Error> {
        let Some(shared) = &self.memory.page else {
            return Ok(None);
        };
        let page = shared.read();
        match page.fault() {
            None if page.has_news() => Err(Error::FaultPageDamaged {
                rank: self.rank(),
                page: Box::new(page),
            }),
            fault => Ok(fault.map(|fault| (self.as_of_group(fault), page.complete))),
        }
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank())
            .field("plan", &self.plan)
            .field("round", &self.round())
            .field("poison", &self.poison.get())
            .finish_non_exhaustive()
    }
}
