//! A rank of a communicator.

pub(crate) mod memory;
pub(crate) mod open;
pub(crate) mod pointers;
pub(crate) mod progress;
pub(crate) mod round;
pub(crate) mod together;

use std::any::Any;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use ferry_layout::{Common, Fault, Rank};

use self::open::Open;
use self::streams::Streams;
use crate::communicator::memory::{Private, Windows};
use crate::device::Device;
use crate::device::sharing::one_stream::Turn;
use crate::device::sharing::residents::Residence;
use crate::error::{Error, LocalRanksError, Problem};
use crate::group::Member;
use crate::plan::Plan;
use crate::plan::check::deadline_ns;

pub(crate) mod close;
pub(crate) mod counts;
mod faults;
pub(crate) mod launch;
mod links;
mod seat;
mod set_up;
mod streams;
pub(crate) mod view;

/// One rank of a communicator: sends tokens to their experts ([`dispatch`](Self::dispatch)) and
/// brings the experts' outputs back ([`combine`](Self::combine)).
///
/// The two alternate, unless a round is [given up](Self::give_up). Calls only enqueue kernels: none
/// allocates, synchronizes, compiles or reads device memory. All but
/// [`dispatch_counts`](Self::dispatch_counts) can be captured in a CUDA graph and replayed. A round is
/// collective: every rank of the group enqueues the same sequence of calls, with its own data, and may split
/// them or not. The kernels of a round belong in one stream, or in streams that the caller orders. A value
/// can be moved to another thread, so each local rank can have its own:
///
/// ```
/// use std::thread;
///
/// use ferry::*;
/// use half::bf16;
///
/// /// Three rounds of one rank, which has one token.
/// fn run(mut rank: Communicator) -> Result<(), Error> {
///     let (device, plan) = (rank.device().clone(), *rank.plan());
///     let stream = device.stream()?;
///     let mut rows = DispatchBuffers::new(&device, &plan)?;
///     let sums = CombineBuffers::new(&device, &plan)?;
///     for _ in 0..3 {
///         // The token goes to expert 1 (on rank 0) and expert 2 (on rank 1).
///         let input = rows.upload(&[bf16::ONE; 8], &[1, 2], None)?;
///         rank.dispatch(stream, &input, rows.output())?;
///         // Experts work here, on the same stream. These return their input.
///         let answers = CombineInput::new(rows.output().tokens()?);
///         rank.combine(stream, &answers, &sums.output(1)?)?;
///         if let Some(fault) = rank.synchronize(stream)?.fault() {
///             eprintln!("{fault}");
///         }
///         assert_eq!(sums.download::<bf16>(1)?, [bf16::from_f32(2.0); 8]);
///     }
///     rank.close()?;
///     // SAFETY: the communicator is closed and no graph was captured, so no kernel uses the buffers.
///     unsafe { rows.free().and(sums.free()) }
/// }
///
/// # fn main() -> Result<(), Error> {
/// let group = Group::simulated(2, 7)?;
/// let plan = Plan::new(&group, Config::new(4, 2, 8, 1))?;
/// let ranks = Communicator::new(&group, &plan)?.into_iter();
/// let threads: Vec<_> = ranks.map(|rank| thread::spawn(|| run(rank))).collect();
/// for thread in threads {
///     thread.join().expect("a rank's thread panicked")?;
/// }
/// group.close()
/// # }
/// ```
///
/// From compute capability 9.0 on, a kernel may begin before the preceding one in its stream has
/// ended, and waits for that itself before it reads or writes a tensor (programmatic stream
/// serialization): a captured graph has such edges.
///
/// A graph may have a part of a round: dispatch in one graph, experts enqueued by the host, combine in
/// another. Each half is captured once, in that order, and launched from then on, as a capture counts as
/// the call and a launch of the graph does not ([`round`](Self::round)). A launch out of
/// turn, such as a second dispatch before the combine, is refused on the device and writes nothing.
/// This rank then gives up with [`OutOfTurn`](crate::FaultKind::OutOfTurn), and its peers with a timeout
/// whose `culprit` is this rank. With [`skip_a2a`](crate::Config::skip_a2a) such a launch is not
/// noticed. `CudaDevice::capture` makes graphs; the module `cuda` has an example.
///
/// If experts fail on one rank, its peers wait for it in their combine: all ranks
/// [give the round up](Self::give_up), or it still calls combine, or drops its communicator. [The
/// guide](crate::guide::recovery#if-the-experts-fail-on-one-rank) says what each way costs.
///
/// # What waits on a GPU at one time
///
/// A kernel that waits for peers begins with as many blocks as [`max_sms`](Self::max_sms) says, each
/// with a multiprocessor of its own, and all must find room before any rank can proceed. So on one GPU
/// the blocks of all kernels that wait for peers and can be at work at one time (of all ranks there,
/// all communicators, NCCL) are at most its multiprocessors. Otherwise two communicators in two streams,
/// or Ferry beside NCCL, can each hold the multiprocessors that the other one needs on another GPU,
/// and wait for each other until the deadline, which is then a [`PeerTimeout`](crate::FaultKind) on
/// all. Either run them in one stream, in the same order on every rank (or order them by events), or let them
/// fit together: the sum of their `max_sms`, and of other libraries' blocks (NCCL: a multiprocessor per
/// channel, `NCCL_MAX_CTAS`), is at most the device's. Kernels that wait for nobody (a GEMM, fused
/// SiLU, `combine_async`, on one node `give_up`) may take any number, and only delay; `dispatch_async` waits
/// for the ranks that are still in the round before.
///
/// Streams wait for each other, too, if they share a hardware queue of the driver: a process has
/// 8, or as many as `CUDA_DEVICE_MAX_CONNECTIONS` said when the driver was initialized, at most 32. More
/// streams with work than queues share them, so use at most as many streams for kernels that wait
/// for peers. If the variable is 1, enqueue the rounds of two communicators in the same order on
/// every rank.
///
/// Freeing memory ([`close`](Self::close), [`Device::free`]), loading a module, the first launch of a kernel
/// that is loaded lazily, and synchronizing the context wait for kernels of other ranks on the GPU. If those
/// wait for a launch that the same thread has yet to make, or one that waits itself, they do until the
/// deadline: do so between rounds, while no kernel of another rank waits for a launch to come. On
/// an H200 with driver 580 and 4 ranks (`ferry-tests gpu --filter "order on one GPU"`) these went well:
/// allocating, also in the order of a stream, pageable copies where no kernel waits in the stream, first
/// launches of Ferry's kernels, another thread that synchronizes the context, 1,000 launches for one rank
/// before another's, a graph of the rounds of all ranks, and an early trigger between dispatch and combine.
///
/// Under MPS the same counts for all processes of a GPU together. In a stream of a green context a
/// launch that takes more multiprocessors than the context has is refused
/// ([`Error::GreenContext`]); those of a graph are those of its capture.
///
/// # Ranks that share a GPU
///
/// With `GroupOptions::share_gpus` each rank takes its [part](crate::device::GpuRanks::limit) of the GPU, so
/// that a group's kernels fit together. Other communicators of this process are checked when a communicator
/// is made: on each GPU that ranks of a group share, the largest live communicator of every rank of this
/// process, in any group, counts, and the sum is at most the GPU's multiprocessors
/// ([`SharedGpuError::NoRoom`](crate::error::SharedGpuError) lists them). Communicators of other processes
/// are not known: two groups of the same processes, a rank each on the GPU, are not added up, and fit only if
/// their `max_sms` make them. Two communicators of one rank may be ordered in one stream; if they overlap,
/// give both a smaller `max_sms`.
///
/// Ranks of one process each have streams of their own there. A call is refused
/// ([`SharedGpuError::OneStream`](crate::error::SharedGpuError), and nothing is enqueued) if its kernel would
/// follow a kernel of another rank of its communicator that waits for it, in the same stream, or in the
/// same stream of a capture; so is a graph of `CudaDevice::capture` when it is launched. That other kernel
/// ends at its deadline, unless the call is made with another stream before. Split calls may share a
/// stream: send on all ranks, then wait; threads that enqueue there agree on that order. The handles 0 and 1
/// are one stream, and 2 is one per thread.
/// Not detected are orders by events, those of the default stream with streams that do not opt out of it,
/// those between communicators, and, for a rank whose calls others captured (torch, say), all but captures.
///
/// # Dropped
///
/// [`close`](Self::close) ends a rank, and returns errors. A rank that is dropped instead waits for no
/// other one. Its memory is freed, which synchronizes with its device, if all ranks of the group
/// are in this process and on one node, and none of its launches can still be at work:
/// each stream of its calls was given to [`synchronize`](Self::synchronize) since,
/// whatever that returned, and no graph has had its calls, whoever made it. The windows are freed with
/// the last rank, whose drop so synchronizes with each device of the process that had one: do not drop it
/// between launches of another communicator that this thread drives, as these wait for each other. Otherwise
/// this rank's memory and all windows are leaked, with a warning: an event of
/// `tracing`, and for a program without a subscriber a line on stderr, once a process. Its kernels stay in
/// their streams and end by their deadline; they touch nothing but leaked memory and the tensors that they
/// were given, and later work in these streams waits for them. If others made a
/// [graph of its calls](Self::assume_no_foreign_graphs), its group cannot be closed any more, either. A wait
/// of another kind (of another library, of the device's own) is not seen here, nor is one for the
/// default stream that each thread has of its own.
///
/// [The guide](crate::guide::recovery#after-a-rank-was-lost) has what peers do when a rank is gone.
pub struct Communicator {
    pub(crate) plan: Plan,
    rank: Rank,
    /// See [`max_sms`](Self::max_sms).
    max_sms: Option<u32>,
    /// The most that `max_sms` can be.
    most_sms: Option<u32>,
    /// Number of this process's ranks on its GPU, if there are several.
    gpu_ranks: Option<u32>,
    /// Present if other ranks of this process share its GPU.
    turn: Option<Turn>,
    /// The next kernels' arguments, with their deadline: with `skip_a2a` those of an only rank.
    pub(crate) common: Common,
    /// The round after the calls so far.
    pub(crate) open: Open,
    /// Tickets of the counts that were asked for, so far.
    tickets: AtomicU64,
    memory: Private,
    windows: Arc<Windows>,
    /// A [`Launchable`], which graphs hold, too.
    member: Arc<dyn Any + Send + Sync>,
    /// Streams of its launches.
    streams: Streams,
    /// Reason why it gave up.
    poison: OnceLock<Poison>,
    /// An input fault that was returned, until it is known that nothing worse followed it.
    told: Mutex<Option<Fault>>,
    closed: bool,
}

/// Reason why a communicator cannot be used any more.
#[derive(Clone, Copy, Debug)]
enum Poison {
    /// A kernel of this rank gave up, for the reason in the fault.
    Fault(Fault),
    /// A call for all ranks of the process could not be launched on this one.
    Launch(Rank),
    /// A peer gave up on this rank.
    PeerGaveUp { rank: Rank, peer: Rank },
}

impl Poison {
    /// Error of every later call.
    fn error(self) -> Error {
        match self {
            Self::Fault(fault) => Error::Poisoned(fault),
            Self::Launch(rank) => LocalRanksError::Poisoned { rank }.into(),
            Self::PeerGaveUp { rank, peer } => Error::PeerGaveUp { rank, peer },
        }
    }
}

/// Everything that a communicator's kernels need as long as they can be launched. Shared by the communicator
/// and the graphs that were captured of it.
struct Launchable {
    /// Keeps the group from being closed.
    _member: Member,
    /// Keeps room on the GPU.
    _residence: Option<Residence>,
    /// Keeps the fabric, and so the devices and kernels of this process, when communicator and
    /// group are dropped.
    _windows: Arc<Windows>,
}

impl Communicator {
    /// This rank.
    pub const fn rank(&self) -> Rank {
        self.rank
    }

    /// The plan that it was made with.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Most multiprocessors that the kernels of its next calls occupy; `None` for all. Unless
    /// [`limit_sms`](Self::limit_sms) was called, [`Config::max_sms`](crate::Config::max_sms), or its
    /// [part of a shared GPU](crate::device::GpuRanks::limit), if that is less.
    pub const fn max_sms(&self) -> Option<u32> {
        self.max_sms
    }

    /// Sets the most multiprocessors that the kernels of later calls occupy, until the next call of it;
    /// `None` for as many as at first. So a dispatch beside a GEMM can take few, and one that nothing runs
    /// beside can take all, and each half of a split call has its own. Each rank's own choice; launches that
    /// a graph has keep theirs. Not collective; does not synchronize.
    ///
    /// ```
    /// use ferry::*;
    ///
    /// # fn main() -> Result<(), Error> {
    /// let group = Group::simulated(2, 7)?;
    /// let config = Config {
    ///     receive: Receive::of(ReceiveLayout::Compact),
    ///     max_sms: Some(16),
    ///     ..Config::new(4, 2, 8, 3)
    /// };
    /// let plan = Plan::new(&group, config)?;
    /// let mut rank = Communicator::new(&group, &plan)?.remove(0);
    /// rank.limit_sms(Some(8))?;
    /// assert_eq!(rank.max_sms(), Some(8));
    /// rank.limit_sms(None)?;
    /// assert_eq!(rank.max_sms(), Some(16));
    /// let refused = rank.limit_sms(Some(17)).unwrap_err().to_string();
    /// assert!(refused.ends_with("max_sms is 17, but the communicator was made with at most 16"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::MaxSms`]: 0, more than at first, or any number with a plan whose rows go by expert or in
    /// padded blocks: all launches of its communicators have one number of blocks.
    pub fn limit_sms(&mut self, max_sms: Option<u32>) -> Result<(), Error> {
        let refused = |rule: &str| {
            let value = max_sms.map_or("None".to_owned(), |sms| sms.to_string());
            let (field, rule) = ("max_sms", rule.to_owned());
            Err(Error::MaxSms(Problem { field, value, rule }))
        };
        let receive = self.plan.config().receive;
        match (max_sms, self.most_sms) {
            (Some(_), _) if !receive.keeps_rows() => refused(&format!(
                "by expert (receive is {receive}) all calls take the number of Config::max_sms"
            )),
            (Some(0), _) => refused("a kernel takes at least 1"),
            (Some(sms), Some(most)) if sms > most => {
                refused(&format!("the communicator was made with at most {most}"))
            }
            _ => {
                self.max_sms = max_sms.or(self.most_sms);
                Ok(())
            }
        }
    }

    /// Longest time that a kernel of its next calls waits: [`Config::deadline`](crate::Config::deadline),
    /// unless [`set_deadline`](Self::set_deadline) was called.
    pub const fn deadline(&self) -> Duration {
        Duration::from_nanos(self.common.deadline_ns)
    }

    /// Sets the longest time that a kernel of later calls waits, from its start, until the next call of this;
    /// `None` for the plan's. So a warm-up may wait for minutes and service for seconds, and each half of a
    /// split call, [`dispatch_counts`](Self::dispatch_counts) and [`give_up`](Self::give_up) have their own.
    /// Each rank's own choice; launches that a graph has keep theirs. Not collective; does not synchronize.
    ///
    /// A dispatch waits for ranks that are still in the round before until its own deadline or that of this
    /// rank's last combine, whichever comes first: [`Config::deadline`](crate::Config::deadline).
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use ferry::*;
    ///
    /// # fn main() -> Result<(), Error> {
    /// let group = Group::simulated(2, 7)?;
    /// let plan = Plan::new(&group, Config::new(4, 2, 8, 3))?;
    /// let mut rank = Communicator::new(&group, &plan)?.remove(0);
    /// rank.set_deadline(Some(Duration::from_secs(600)))?;
    /// // ... calls that wait for peers which still compile ...
    /// rank.set_deadline(None)?;
    /// assert_eq!(rank.deadline(), plan.config().deadline);
    /// let refused = rank.set_deadline(Some(Duration::ZERO)).unwrap_err().to_string();
    /// assert!(refused.ends_with("deadline is 0 s, but it must be above zero and at most a day"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Deadline`]: zero, or more than a day. The deadline stays as it was.
    pub fn set_deadline(&mut self, deadline: Option<Duration>) -> Result<(), Error> {
        let deadline = deadline.unwrap_or(self.plan.config().deadline);
        self.common.deadline_ns = deadline_ns(deadline).map_err(Error::Deadline)?;
        Ok(())
    }

    /// The rank's device, for tensors and streams.
    pub fn device(&self) -> &Arc<dyn Device> {
        self.memory.device()
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
