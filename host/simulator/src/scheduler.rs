//! The scheduler, which decides which warp runs next, which writes become visible, and when time passes.

mod time;
mod visible;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Instant;

use bytemuck::Zeroable;
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult};
use ferry_layout::{Args, Common, MAX_BLOCKS, Rank};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::addresses::Machine;
use crate::bad_link::Links;
use crate::block::Block;
use crate::command::{Command, Launch, Reply};
use crate::error::SimulatorError;
use crate::lent::Lent;
use crate::memory::Memory;
use crate::network::Network;
use crate::options::Options;
use crate::run::run;
use crate::shared::{KnownWindow, Shared};
use crate::stacks;
use crate::store_buffer::StoreBuffer;
use crate::warp::Warp;

/// Simulated time that a turn takes.
const TURN_NS: u64 = 100;
/// Most turns of each warp of the machine while one of them stalls. Each turn is one warp's, so that a stall
/// of a fixed number of turns would be over at once with many warps.
const LONGEST_STALL: u64 = 50;

/// Tries at random for a warp that can be resumed.
const TRIES: usize = 4;

/// Turns after which the inbox is looked at.
const MOST_TURNS: u32 = 32;

type Fibre = Coroutine<(), (), (), DefaultStack>;

/// A warp of a running launch.
struct Running {
    rank: u32,
    fibre: Fibre,
    buffer: Rc<RefCell<StoreBuffer>>,
    /// The version at which it last polled in vain.
    idle_at: Rc<Cell<Option<u64>>>,
    stalled_until: u64,
    /// Time at which its launch times out.
    deadline: u64,
    /// Time at which its current wait times out, at most `deadline`.
    times_out_at: Rc<Cell<u64>>,
    /// Longest wait of its launch.
    deadline_ns: u64,
}

/// A machine.
pub struct World {
    options: Options,
    shared: Rc<Shared>,
    lent: Arc<Lent>,
    running: Vec<Running>,
    /// Indices of the warps that could be resumed in the last step, kept for their memory.
    awake: Vec<usize>,
    queues: Vec<VecDeque<Launch>>,
    lost: Vec<bool>,
    waiting: Vec<(u32, Reply)>,
    /// Whether a launch came or ended since launches were last started.
    may_start: bool,
    /// Earliest deadline of the running launches, or one before it.
    next_deadline: u64,
    steps: u64,
    /// Sum of all versions when every idle warp was last woken.
    woken_at: u64,
    /// Start of the wait for a launch or a deadline; moves on whenever the clock counts the time since then.
    idle_since: Option<Instant>,
}

impl World {
    pub fn new(options: Options, lent: Arc<Lent>, machine: Machine) -> Self {
        let ranks = options.ranks;
        let shared = Shared {
            memory: RefCell::new(Memory::new(0, machine)),
            network: RefCell::new(Network::new(options.stalled)),
            links: RefCell::new(Links::new(options.bad_link)),
            rng: RefCell::new(ChaCha8Rng::seed_from_u64(options.seed)),
            seed: options.seed,
            machine,
            clock: Cell::new(0),
            patience: Cell::new(None),
            versions: vec![Cell::new(1); ranks as usize],
            worked_at: vec![Cell::new(0); ranks as usize],
            violation: RefCell::default(),
            windows: RefCell::default(),
            allow_late_signals: options.allow_late_signals,
            births: Cell::new(0),
        };
        Self {
            shared: Rc::new(shared),
            lent,
            running: Vec::new(),
            awake: Vec::new(),
            queues: (0..ranks).map(|_| VecDeque::new()).collect(),
            lost: vec![false; ranks as usize],
            waiting: Vec::new(),
            may_start: false,
            next_deadline: 0,
            steps: 0,
            woken_at: 0,
            idle_since: None,
            options,
        }
    }

    /// Serves commands until every handle is gone. Runs only while somebody waits for it.
    pub fn serve(mut self, inbox: &Receiver<Command>) {
        loop {
            let command = if self.waiting.is_empty() {
                self.idle_since = None;
                match inbox.recv() {
                    Ok(command) => Some(command),
                    Err(_) => return,
                }
            } else {
                inbox.try_recv().ok()
            };
            match command {
                Some(command) => {
                    self.count_idle_time();
                    self.obey(command);
                }
                None => {
                    if self.turns() {
                        continue;
                    }
                    // Nothing can happen but a launch from outside, or a deadline.
                    let patience = self.patience();
                    // Other commands than launches do not make it start anew.
                    let since = *self.idle_since.get_or_insert_with(Instant::now);
                    let left =
                        patience.map(|_| self.longest_idle().saturating_sub(since.elapsed()));
                    match left.map(|left| inbox.recv_timeout(left)) {
                        Some(Ok(command)) => {
                            self.count_idle_time();
                            self.obey(command);
                        }
                        Some(Err(RecvTimeoutError::Disconnected)) => return,
                        None | Some(Err(RecvTimeoutError::Timeout)) => self.pass_deadline(patience),
                    }
                }
            }
            self.answer_waiting();
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Launch {
                rank,
                launch,
                reply,
            } => {
                let _ = reply.send(self.launch(rank, launch));
            }
            Command::Lose { rank, reply } => {
                let ranks = self.options.ranks;
                let _ = reply.send(if rank < ranks {
                    self.lose(rank);
                    Ok(())
                } else {
                    Err(SimulatorError::NoSuchRank { rank, ranks })
                });
            }
            Command::Synchronize { rank, reply } => {
                let ranks = self.options.ranks;
                if rank < ranks {
                    self.waiting.push((rank, reply));
                } else {
                    let _ = reply.send(Err(SimulatorError::NoSuchRank { rank, ranks }));
                }
            }
        }
    }

    fn launch(&mut self, rank: u32, launch: Launch) -> Result<(), SimulatorError> {
        let kernel = launch.kernel;
        let ranks = self.options.ranks;
        let queue = self
            .queues
            .get_mut(rank as usize)
            .ok_or(SimulatorError::NoSuchRank { rank, ranks })?;
        if !launch.args.are_of(kernel) {
            return Err(SimulatorError::WrongArguments {
                kernel: kernel.name(),
            });
        }
        if self.options.blocks(None).0 > MAX_BLOCKS {
            let warps = self.options.warps;
            return Err(SimulatorError::TooManyWarps { warps });
        }
        queue.push_back(launch);
        self.may_start = true;
        Ok(())
    }

    /// Answers handles whose rank is done, lost, or ended by a violation.
    fn answer_waiting(&mut self) {
        let violation = self.shared.violation.borrow().clone();
        if violation.is_some() {
            self.running.clear();
        }
        let (running, queues, lost) = (&self.running, &self.queues, &self.lost);
        let seed = self.options.seed;
        self.waiting.retain(|(rank, reply)| {
            let rank = *rank;
            let done = queues[rank as usize].is_empty() && running.iter().all(|w| w.rank != rank);
            let answer = match &violation {
                Some(violation) => Err(violation.clone()),
                None if lost[rank as usize] => Err(SimulatorError::RankLost { seed, rank }),
                None if done => Ok(()),
                None => return true,
            };
            let _ = reply.send(answer);
            false
        });
    }

    /// Does some things, until a handle wants the memory; false if nothing can be done before time passes.
    fn turns(&mut self) -> bool {
        let (lent, shared) = (Arc::clone(&self.lent), Rc::clone(&self.shared));
        lent.lend(&shared.memory, || {
            for _ in 0..MOST_TURNS {
                if !self.step() {
                    return false;
                }
                self.idle_since = None;
                self.answer_waiting();
                if self.waiting.is_empty() || lent.is_wanted() {
                    break;
                }
            }
            true
        })
    }

    /// Does one thing; false if nothing can be done before time passes.
    fn step(&mut self) -> bool {
        self.steps += 1;
        self.lose_rank();
        self.start_launches();
        self.shared.clock.set(self.shared.clock.get() + TURN_NS);
        self.find_overdue();
        self.arrive(self.shared.clock.get());
        self.shared.race(&self.options.racing);
        let choice = self.shared.rng.borrow_mut().random_range(0..8u32);
        match choice {
            0 if self.drain() => {}
            1 if self.deliver(false) => {}
            _ if self.resume_any() => {}
            _ if self.drain() => {}
            _ if self.deliver(false) || self.deliver(true) => {}
            _ => {
                let stalled = self.running.iter_mut().filter(|w| w.stalled_until > 0);
                let steps = self.steps;
                let any_stalled = stalled.fold(false, |any, w| {
                    let was = w.stalled_until > steps;
                    w.stalled_until = 0;
                    any | was
                });
                return any_stalled || self.wake_idle() || self.await_link();
            }
        }
        true
    }

    /// Wakes every warp, once after each change: a warp may have read the word that it polls before the
    /// change, and have become idle after it. Returns false if nothing has changed.
    fn wake_idle(&mut self) -> bool {
        let now = self.shared.versions.iter().map(Cell::get).sum();
        let has_changed = now != std::mem::replace(&mut self.woken_at, now);
        if has_changed {
            self.running.iter().for_each(|warp| warp.idle_at.set(None));
        }
        has_changed
    }

    /// Resumes a random warp that is neither idle nor stalled; false if there is none.
    fn resume_any(&mut self) -> bool {
        let (shared, steps, running) = (&self.shared, self.steps, &self.running);
        let is_awake = |index: &usize| {
            let warp: &Running = &running[*index];
            warp.stalled_until <= steps && warp.idle_at.get() != Some(shared.version(warp.rank))
        };
        if running.is_empty() {
            return false;
        }
        let any_of = |count: usize| shared.rng.borrow_mut().random_range(0..count);
        // Mostly one of the first tries is at an awake one, sooner than all have been looked at.
        let tried = (0..TRIES).map(|_| any_of(running.len())).find(is_awake);
        let chosen = tried.or_else(|| {
            self.awake.clear();
            self.awake.extend((0..running.len()).filter(is_awake));
            (!self.awake.is_empty()).then(|| self.awake[any_of(self.awake.len())])
        });
        chosen.map(|index| self.resume(index)).is_some()
    }

    fn resume(&mut self, which: usize) {
        let stall = self.options.stall_one_in;
        if stall > 0 && self.shared.rng.borrow_mut().random_range(0..stall) == 0 {
            let warps = u64::from(self.options.ranks) * u64::from(self.options.warps);
            let longest = LONGEST_STALL * warps;
            let turns = self.shared.rng.borrow_mut().random_range(1..longest);
            self.running[which].stalled_until = self.steps + turns;
            return;
        }
        let warp = &mut self.running[which];
        warp.idle_at.set(None);
        if let CoroutineResult::Return(()) = warp.fibre.resume(()) {
            let warp = self.running.swap_remove(which);
            // A launch ends once all its writes are visible.
            warp.buffer.borrow_mut().drain_all(&self.shared);
            stacks::give_back(warp.fibre.into_stack());
            self.shared.bump(warp.rank);
            if self.running.iter().all(|other| other.rank != warp.rank) {
                if self.shared.links.borrow().are_of(warp.rank) {
                    self.arrive(u64::MAX);
                }
                self.may_start = true;
                self.shared.launch_ended(warp.rank);
            }
        }
    }

    /// Starts the next launch of every rank that has nothing running.
    fn start_launches(&mut self) {
        if !std::mem::take(&mut self.may_start) {
            return;
        }
        for rank in 0..self.options.ranks {
            let idle = self.running.iter().all(|warp| warp.rank != rank);
            if !idle || self.lost[rank as usize] {
                continue;
            }
            if let Some(launch) = self.queues[rank as usize].pop_front() {
                self.start(rank, launch);
            }
        }
    }

    #[expect(clippy::too_many_lines, reason = "a case for each kernel")]
    fn start(&mut self, rank: u32, launch: Launch) {
        let (kernel, args) = (launch.kernel, Rc::<Args>::from(launch.args));
        // The fused SiLU never waits.
        let common = args.common().copied().unwrap_or_else(|| Common {
            rank: rank as u16,
            deadline_ns: u64::MAX,
            ..Common::zeroed()
        });
        let deadline_ns = common.deadline_ns;
        let deadline = self.shared.clock.get().saturating_add(deadline_ns);
        self.next_deadline = self.next_deadline.min(deadline);
        let own = common.peers + 8 * u64::from(common.rank);
        if let Ok(start) = self.shared.memory.borrow().read_u64(own) {
            // Between nodes a round ends only with all credits, so that none is late.
            let late = if common.shape.spans_nodes() {
                0
            } else {
                common.shape.ranks
            };
            let credit = |rank| start + common.window.credit(Rank(rank)).bytes();
            let known = KnownWindow {
                rank,
                start,
                bytes: common.window.bytes,
                signal_bytes: common.window.signal_bytes,
                workspace: common.workspace,
                credits: (credit(0), credit(late)),
                finished: 0,
            };
            self.shared.know(known);
        }
        let options = &self.options;
        let ((blocks, in_block), combines) = (options.blocks(launch.max_blocks), options.combines);
        let warps = blocks * in_block;
        let shared_by_block: Vec<Rc<Block>> = (0..blocks).map(|_| Rc::default()).collect();
        for number in 0..warps {
            let buffer = Rc::new(RefCell::new(StoreBuffer::new(rank)));
            let idle_at = Rc::new(Cell::new(None));
            let times_out_at = Rc::new(Cell::new(deadline));
            let waits_until = times_out_at.clone();
            let (shared, args) = (self.shared.clone(), args.clone());
            let state = (shared, buffer.clone(), idle_at.clone(), args);
            let block = Rc::clone(&shared_by_block[(number % blocks) as usize]);
            block.buffers.borrow_mut().push(buffer.clone());
            let birth = self.shared.births.replace(self.shared.births.get() + 1);
            let fibre = Coroutine::with_stack(stacks::take(), move |yielder, ()| {
                let (shared, buffer, idle_at, args) = state;
                let warp = Warp {
                    shared,
                    buffer,
                    idle_at,
                    polled: Cell::new((0, 0)),
                    yielder,
                    rank,
                    common,
                    args,
                    number,
                    warps,
                    blocks,
                    block,
                    deadline,
                    lanes_calls: Cell::new(0),
                    lanes_differ: Cell::new(false),
                    fences: Cell::new(0),
                    room: Cell::new((0, 0)),
                    birth,
                    loading: Cell::new(None),
                    own_window: OnceCell::new(),
                    times_out_at: waits_until,
                };
                run(&warp, kernel, combines);
            });
            self.running.push(Running {
                rank,
                fibre,
                buffer,
                idle_at,
                stalled_until: 0,
                deadline,
                times_out_at,
                deadline_ns,
            });
        }
    }

    /// Loses the rank of the options, once its time has come.
    fn lose_rank(&mut self) {
        if let Some(lost) = self
            .options
            .lost
            .filter(|lost| self.steps >= lost.after_steps)
        {
            self.lose(lost.rank);
        }
    }

    /// Ends the kernels of a rank, unless it was lost before.
    fn lose(&mut self, rank: u32) {
        if std::mem::replace(&mut self.lost[rank as usize], true) {
            return;
        }
        self.running.retain(|warp| warp.rank != rank);
        self.queues[rank as usize].clear();
        self.shared.network.borrow_mut().lose(rank);
        self.shared.bump_all();
    }
}
