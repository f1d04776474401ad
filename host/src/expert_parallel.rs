//! A rank of a communicator.

use std::any::Any;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ferry_layout::{Common, Counter, Fault, Kernel, PROTOCOL_VERSION, Rank};

use crate::device::{Args, Launch};
use crate::group::Member;
use crate::memory::{Leave, Private, Windows, agree, give_up, require_windows};
use crate::round::{CombinePending, DispatchPending, Dispatched, Received, Round, Unfinished};
use crate::{Device, DevicePtr, DispatchInput, DispatchOutput, Error, Fabric, Group, Plan, Stream};

/// Most streams that a communicator remembers; with more, it asks again.
const MAX_STREAMS: usize = 16;

/// One rank of a communicator: sends tokens to their experts ([`dispatch`](Self::dispatch)) and
/// brings the experts' outputs back ([`Dispatched::combine`]).
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
/// # What waits on a GPU at one time
///
/// A kernel that waits for peers begins with as many blocks as the plan's
/// [`max_sms`](crate::Config::max_sms) says, each with a multiprocessor of its own, and all must
/// find room before any rank gets on. So must everything else that waits for other GPUs: two
/// communicators in two streams, or Ferry beside NCCL, can each hold the multiprocessors that the
/// other one needs on another GPU, and wait for each other until the deadline, which is then a
/// [`PeerTimeout`](crate::FaultKind) of all. Either order them in one stream, in the same order on
/// every rank (or by events), or let them fit together: the sum of their `max_sms`, and of what
/// others take (NCCL: a multiprocessor a channel, `NCCL_MAX_CTAS`), is at most the device's.
/// `combine_async` waits for nobody, and only delays; `dispatch_async` waits for the ranks that are
/// still in the round before.
///
/// Under MPS the same counts for all processes of a GPU together. Ranks of one group each need a
/// GPU of their own. In a stream of a green context a launch that takes more multiprocessors than
/// the context has is refused ([`Error::GreenContext`]); those of a graph are those of its capture.
///
/// What a kernel meets (an invalid expert id, a peer that does not come) is found by
/// [`check`](Self::check), after the stream was synchronised.
///
/// A value can be moved to another thread; each local rank can have its own.
pub struct ExpertParallel {
    pub(crate) plan: Plan,
    pub(crate) common: Common,
    pub(crate) round: Round,
    memory: Private,
    windows: Arc<Windows>,
    /// A [`Launchable`], which graphs hold, too.
    member: Arc<dyn Any + Send + Sync>,
    /// Streams that were launched into, and multiprocessors of those with fewer than the device.
    streams: Vec<(Stream, Option<u32>)>,
    /// Why it gave up.
    poison: OnceLock<Fault>,
    /// An input fault that was told, until it is known that nothing worse came behind it.
    told: Mutex<Option<Fault>>,
    closed: bool,
}

/// What kernels of a communicator need for as long as they can be launched: it and the graphs that
/// were captured of it hold one together.
struct Launchable {
    /// The group is not closed.
    _member: Member,
    /// Their fabric, and so the devices and kernels of this process, stay when communicator and
    /// group are dropped.
    _windows: Arc<Windows>,
}

impl ExpertParallel {
    /// Allocates windows and workspaces, lets the ranks find each other, and compares their
    /// configurations. One value for each rank of this process, ascending. Collective.
    /// Synchronises.
    ///
    /// Where a rank is lost, the others have an error as soon as the group's bootstrap gives one;
    /// what they had allocated is freed, but for windows that only all ranks can free: those are
    /// leaked, with a warning. In an NVSHMEM group a rank that is lost while the windows are
    /// allocated can keep the others waiting for ever, see [`Group::close`].
    ///
    /// # Errors
    /// [`Error::PlanForOtherGroup`], [`Error::PlanSpansNodes`], [`Error::ShapeMismatch`],
    /// [`Error::PeerFailed`], [`Error::FabricAnswer`], [`Error::Bootstrap`] that names the lost
    /// rank, and what the group's devices report.
    pub fn new(group: &Group, plan: &Plan) -> Result<Vec<Self>, Error> {
        let (fabric, shape) = (&group.fabric, plan.shape());
        if shape.ranks != group.ranks() {
            return Err(Error::PlanForOtherGroup {
                plan: shape.ranks,
                group: group.ranks(),
            });
        }
        if shape.spans_nodes() && !group.reaches_other_nodes() {
            return Err(Error::PlanSpansNodes {
                p2p_world_size: shape.p2p_world_size,
                ranks: shape.ranks,
                group: group.name(),
            });
        }
        let ranks = fabric.local_ranks();
        // Before anything is allocated, so that the group is not closed meanwhile.
        let members: Vec<Member> = ranks.iter().map(|_| group.enter()).collect();
        compare_shapes(&**fabric, plan)?;
        let memory: Result<Vec<_>, Error> = ranks
            .iter()
            .map(|&rank| Private::alloc(group.device(rank)?, plan))
            .collect();
        let mut memory = agree(&**fabric, "allocating device memory", memory)??;
        let at = fabric.alloc_windows(plan.window_bytes())?;
        for (memory, &window) in memory.iter_mut().zip(&at) {
            memory.window = window;
        }
        let set_up = set_up(&**fabric, plan, &memory, &at);
        // Also the barrier: nobody signals before all signals are clear.
        let agreed = agree(&**fabric, "setting up device memory", set_up)
            .inspect_err(|_| give_up(&**fabric, &at))?;
        if let Err(error) = agreed {
            // SAFETY: they are those of a moment ago, and no rank has launched a kernel.
            if let Err(error) = unsafe { fabric.free_windows(&at) } {
                tracing::warn!(%error, "cannot free windows");
            }
            return Err(error);
        }
        let windows = Arc::new(Windows::new(fabric.clone(), at));
        let all = ranks.into_iter().zip(members).zip(memory);
        Ok(all
            .map(|((rank, member), memory)| {
                Self::of_rank(rank, member, plan, memory, windows.clone())
            })
            .collect())
    }

    fn of_rank(
        rank: Rank,
        member: Member,
        plan: &Plan,
        memory: Private,
        windows: Arc<Windows>,
    ) -> Self {
        let common = Common {
            rank: rank.0 as u16,
            debug_checks: u16::from(plan.config().debug_checks),
            deadline_ns: plan.deadline_ns(),
            peers: memory.peers.address(),
            own_window: memory.window.address(),
            workspace: memory.workspace.address(),
            fault_page: memory.page.as_ref().map_or(0, |page| page.address()),
            ..Common::of(plan.shape())
        };
        let (round, poison, told) = (Round::Idle, OnceLock::new(), Mutex::default());
        let member = Arc::new(Launchable {
            _member: member,
            _windows: windows.clone(),
        });
        Self {
            plan: *plan,
            common,
            round,
            memory,
            windows,
            member,
            streams: Vec::new(),
            poison,
            told,
            closed: false,
        }
    }

    /// This rank.
    pub const fn rank(&self) -> Rank {
        self.common.rank()
    }

    /// What it was made with.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Its device, for tensors and streams.
    pub fn device(&self) -> &Arc<dyn Device> {
        self.memory.device()
    }

    /// Sends this rank's tokens to their experts' ranks and receives those for its own experts,
    /// in one kernel. Enqueues only; `input` and `output` are in use until `stream` has passed
    /// the kernel. Collective.
    ///
    /// # Errors
    /// [`Error::TooManyTokens`], [`Error::TooManyScales`], [`Error::Tensor`];
    /// [`Error::DispatchWithoutCombine`], [`Error::DispatchNotWaited`], [`Error::CombineNotWaited`]
    /// where the round before has not ended; [`Error::GreenContext`]; [`Error::Poisoned`]; or what
    /// the launch reports. Nothing is enqueued then.
    pub fn dispatch(
        &mut self,
        stream: Stream,
        input: &DispatchInput,
        output: &DispatchOutput,
    ) -> Result<Dispatched<'_>, Error> {
        self.require_idle()?;
        let args = output.add_to(input.args(&self.common, &self.plan)?, &self.plan)?;
        self.launch(stream, Kernel::Dispatch, Args::Dispatch(args))?;
        Ok(Dispatched::of(self, Received::of(input.x.dims[0], output)))
    }

    /// The first half of [`dispatch`](Self::dispatch): sends. It waits until every rank has read
    /// what the round before brought, which is usually so when it begins, and for nothing else that
    /// a peer does. Enqueues only; `input` is in use until `stream` has passed the kernel.
    /// Collective.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn dispatch_async(
        &mut self,
        stream: Stream,
        input: &DispatchInput,
    ) -> Result<DispatchPending<'_>, Error> {
        self.require_idle()?;
        let args = input.args(&self.common, &self.plan)?;
        self.launch(stream, Kernel::DispatchAsync, Args::Dispatch(args))?;
        Ok(DispatchPending::of(self, input.x.dims[0]))
    }

    /// The round that stands open because its [`Dispatched`] or pending half was dropped, or
    /// because its next call was refused. Not collective.
    pub fn unfinished(&mut self) -> Unfinished<'_> {
        match self.round {
            Round::Idle => Unfinished::Nothing,
            Round::Sent { tokens } => Unfinished::DispatchWait(DispatchPending::of(self, tokens)),
            Round::Received(received) => Unfinished::Combine(Dispatched::of(self, received)),
            Round::Returned {
                received,
                input,
                output,
            } => Unfinished::CombineWait(CombinePending::of(self, received, (input, output))),
        }
    }

    /// Whether a kernel has reported something so far. Reads host-visible memory; does not
    /// synchronise, so kernels still running may report later. Not collective.
    ///
    /// # Errors
    /// [`Error::Fault`]: the first fault, once. After one whose kind
    /// [`is_input`](ferry_layout::FaultKind::is_input) the communicator stays usable; after any
    /// other this and every later call gives [`Error::Poisoned`], and only
    /// [`close`](Self::close) is left.
    pub fn check(&self) -> Result<(), Error> {
        // Held from reading to acknowledging, so that no two threads tell one record.
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        self.require_alive()?;
        let Some((fault, number)) = self.fault()? else {
            return Ok(());
        };
        if let (true, Some(page)) = (fault.kind.is_input(), &self.memory.page) {
            page.acknowledge(number);
            *told = Some(fault);
        } else {
            self.poison(fault);
        }
        Err(Error::Fault(fault))
    }

    /// Waits for everything enqueued on `stream`, then [`check`](Self::check)s, and after an
    /// input fault also finds a communicator that gave up later. Not collective,
    /// but waits for the peers that the kernels wait for, as long as the deadline allows.
    ///
    /// # Errors
    /// As [`check`](Self::check), and what the device reports.
    pub fn synchronize(&self, stream: Stream) -> Result<(), Error> {
        self.device().synchronize(stream)?;
        let checked = self.check();
        if checked.as_ref().is_err_and(|error| !error.is_input_fault()) {
            return checked;
        }
        let told = self
            .told
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match told {
            // A kernel records why before it stops, unless it did not get to the page: looked for once more.
            Some(fault) if self.has_stopped()? => match self.check() {
                Err(error) if !error.is_input_fault() => Err(error),
                _ => Err(Error::Poisoned(self.poison(fault))),
            },
            _ => checked,
        }
    }

    /// Frees this rank's memory, and with the last rank of this process the windows, after a
    /// barrier with the other processes. Synchronise the streams in use first. Collective.
    /// Synchronises.
    ///
    /// A rank's last combine may end before its peers have told it that they read its tokens: their kernels
    /// still store into its window then. So a process of several comes here before it ends, also when it is
    /// done.
    ///
    /// A communicator that gave up is closed without a barrier; if it spans processes, its
    /// windows are leaked. If another process's gave up or was lost and this one's did not, the barrier fails
    /// as soon as the group's bootstrap says so, at the latest after its timeout, and the windows are leaked,
    /// with a warning. In an NVSHMEM group a rank that is lost after the barrier, while windows are freed,
    /// can keep the others waiting for ever, see [`Group::close`].
    ///
    /// # Errors
    /// [`Error::GraphsAlive`] while there are graphs that `CudaDevice::capture` made of its calls: nothing is
    /// freed, and the error gives the communicator back. [`Error::Bootstrap`] that names a lost
    /// rank, and what the device or the group reports.
    pub fn close(mut self) -> Result<(), Error> {
        let graphs = Arc::strong_count(&self.member) - 1;
        if graphs > 0 {
            return Err(Error::GraphsAlive {
                graphs,
                communicator: Box::new(self),
            });
        }
        let gave_up = self.require_alive().is_err()
            || self
                .fault()
                .is_ok_and(|fault| fault.is_some_and(|(fault, _)| !fault.kind.is_input()))
            || self.has_stopped().unwrap_or(true);
        self.closed = true;
        let freed = self.memory.free();
        let left = self.windows.leave(if gave_up {
            Leave::GaveUp
        } else {
            Leave::Closed
        });
        freed.and(left)
    }

    /// Enqueues a kernel, if the communicator has not given up.
    pub(crate) fn launch(
        &mut self,
        stream: Stream,
        kernel: Kernel,
        args: Args,
    ) -> Result<(), Error> {
        self.require_alive()?;
        if let Some((fault, _)) = self.fault()?
            && !fault.kind.is_input()
        {
            return Err(Error::Poisoned(self.poison(fault)));
        }
        self.require_room(stream)?;
        self.device().hold(stream, &self.member)?;
        let shmem = self.plan.shape().spans_nodes();
        let max_sms = self.plan.config().max_sms;
        let launch = Launch {
            kernel,
            kernels: self.memory.kernels.clone(),
            args,
            shmem,
            max_sms,
            stream,
        };
        // SAFETY: the tensors were found to have memory for every element when `args` was made of
        // them; what else it names is this communicator's, allocated in the plan's sizes and kept
        // until it is closed, and the kernels are what its device gave.
        unsafe { self.device().launch(&launch) }
    }

    /// Whether `stream` has as many multiprocessors as a launch takes. A stream is asked once.
    fn require_room(&mut self, stream: Stream) -> Result<(), Error> {
        let known = self.streams.iter().find(|(of, _)| *of == stream);
        let multiprocessors = match known {
            Some(&(_, multiprocessors)) => multiprocessors,
            None => {
                let multiprocessors = self.device().stream_multiprocessors(stream);
                if self.streams.len() == MAX_STREAMS {
                    self.streams.clear();
                }
                self.streams.push((stream, multiprocessors));
                multiprocessors
            }
        };
        let max_sms = self.plan.config().max_sms;
        match multiprocessors {
            Some(multiprocessors) if max_sms.is_none_or(|most| most > multiprocessors) => {
                // Another stream may have this one's handle by now: the next call asks again.
                self.streams.retain(|(of, _)| *of != stream);
                Err(Error::GreenContext {
                    max_sms,
                    multiprocessors,
                })
            }
            _ => Ok(()),
        }
    }

    fn require_idle(&self) -> Result<(), Error> {
        self.require_alive()?;
        match self.round {
            Round::Idle => Ok(()),
            Round::Sent { .. } => Err(Error::DispatchNotWaited),
            Round::Received(_) => Err(Error::DispatchWithoutCombine),
            Round::Returned { .. } => Err(Error::CombineNotWaited),
        }
    }

    fn require_alive(&self) -> Result<(), Error> {
        self.poison
            .get()
            .map_or(Ok(()), |fault| Err(Error::Poisoned(*fault)))
    }

    fn poison(&self, fault: Fault) -> Fault {
        *self.poison.get_or_init(|| fault)
    }

    /// Whether a kernel of this rank gave up, fault or not. Synchronises.
    fn has_stopped(&self) -> Result<bool, Error> {
        let mut stopped = [0; 8];
        let at = self.memory.workspace.plus(Counter::Aborted.bytes());
        self.device().download(at, &mut stopped)?;
        Ok(stopped != [0; 8])
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
            fault => Ok(fault.map(|fault| (fault, page.complete))),
        }
    }
}

impl std::fmt::Debug for ExpertParallel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExpertParallel")
            .field("rank", &self.rank())
            .field("plan", &self.plan)
            .field("round", &self.round)
            .field("poison", &self.poison.get())
            .finish_non_exhaustive()
    }
}

impl Drop for ExpertParallel {
    /// Frees nothing, waits for nobody: teardown is [`close`](Self::close).
    fn drop(&mut self) {
        if self.closed {
            return;
        }
        self.memory.leak();
        tracing::warn!(
            rank = self.rank().0,
            "dropped without close: its memory is leaked"
        );
        // A dropped holder makes this no more than a count.
        let _ = self.windows.leave(Leave::Dropped);
    }
}

/// Sets up the memory of the ranks of this process, if the fabric gave what they need.
fn set_up(
    fabric: &dyn Fabric,
    plan: &Plan,
    memory: &[Private],
    windows: &[DevicePtr],
) -> Result<(), Error> {
    let (shape, bytes) = (plan.shape(), plan.window_bytes());
    require_windows(fabric, "alloc_windows", windows, memory.len(), bytes)?;
    let all = fabric.local_ranks().into_iter().zip(memory).zip(windows);
    for ((rank, memory), &own) in all {
        let peers = fabric.peer_windows(rank, windows, shape)?;
        let count = shape.ranks as usize;
        require_windows(fabric, "peer_windows", &peers, count, bytes)?;
        memory.set_up(plan, own, &peers)?;
    }
    Ok(())
}

/// Finds ranks that were configured differently. Collective.
fn compare_shapes(fabric: &dyn Fabric, plan: &Plan) -> Result<(), Error> {
    let ours = Common::of(plan.shape()).fingerprint(PROTOCOL_VERSION);
    let all = fabric.all_gather(ours)?;
    let rank = fabric.local_ranks().first().copied().unwrap_or(Rank(0));
    match all.iter().position(|&theirs| theirs != ours) {
        Some(peer) => {
            let (peer, theirs) = (Rank(peer as u32), all[peer]);
            Err(Error::ShapeMismatch {
                rank,
                peer,
                ours,
                theirs,
            })
        }
        None => Ok(()),
    }
}
