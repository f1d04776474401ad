//! A session: the ranks of a group that this process drives, their tensors, and rounds on them.

use std::hint::spin_loop;
use std::ops::Range;
use std::time::{Duration, Instant};

use ferry::{
    Call, Capacity, CombineMode, Communicator, Config, DevicePtr, Error, Group, InputFault,
    InputReport, Plan, Receive, ReceivedCounts, Round, Stream, TokenFormat,
};
use ferry_reference::{Problem, bf16, threads};

use super::local_rank::LocalRank;
use super::settings::{Settings, Turn};
use super::tensors::{HALVES, Tensors};
use crate::formats::Encoded;
use crate::verify::{Placement, RankOutputs, SHARED_FACTOR};

/// Wall time of a round's halves, from the first launch until every local rank is done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Phases {
    /// Dispatch.
    pub dispatch: Duration,
    /// Combine.
    pub combine: Duration,
}

/// The local ranks of a group at work.
pub struct Session {
    settings: Settings,
    communicators: Vec<Communicator>,
    /// Ranks in the order of the communicators.
    ranks: Vec<LocalRank>,
    phases: Phases,
    /// Whether rounds are made in calls of all local ranks.
    all_at_once: bool,
    /// Factor of the shared expert.
    shared_factor: f32,
    /// Whether combines are given the weights that dispatches are not.
    late_weights: bool,
    /// Whether each round comes after a dispatch of its inputs that is given up.
    gives_up: bool,
    /// Whether the host waits for the counts of split dispatches.
    counts: bool,
}

impl Session {
    /// Makes communicators and tensors. Collective.
    pub fn new(group: &Group, settings: &Settings) -> Result<Self, Error> {
        Self::with_slots(group, settings, 1)
    }

    /// The same, with room for the inputs of `slots` problems. Collective.
    pub fn with_slots(group: &Group, settings: &Settings, slots: usize) -> Result<Self, Error> {
        let plan = Plan::new(group, settings.config)?;
        let communicators = Communicator::new(group, &plan)?;
        let ranks = communicators
            .iter()
            .map(|communicator| LocalRank::new(communicator, settings, slots))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            settings: *settings,
            communicators,
            ranks,
            phases: Phases::default(),
            all_at_once: false,
            shared_factor: SHARED_FACTOR,
            late_weights: false,
            gives_up: false,
            counts: false,
        })
    }

    /// The ranks of this process.
    pub fn local_ranks(&self) -> Vec<usize> {
        self.ranks.iter().map(LocalRank::number).collect()
    }

    /// Wall time of the last [`round`](Self::round).
    pub const fn phases(&self) -> Phases {
        self.phases
    }

    /// Makes a round on all local ranks: uploads, dispatch, the stand-in for the experts (each token times
    /// its expert's factor in `scale`, rounded to BF16), combine; downloads everything. Synchronises.
    /// Collective.
    pub fn round(&mut self, problem: &Problem, scale: &[f32]) -> Result<Vec<RankOutputs>, Error> {
        self.upload(0, problem)?;
        if self.gives_up {
            self.launch_halves(0..2)?;
            self.give_up()?;
            self.synchronize()?;
        }
        self.poison()?;
        let start = Instant::now();
        self.launch_halves(0..1)?;
        let counts = self.counts()?;
        self.launch_halves(1..2)?;
        self.synchronize()?;
        self.phases.dispatch = start.elapsed();
        self.run_experts(problem, scale)?;
        let start = Instant::now();
        self.launch_halves(2..HALVES)?;
        self.synchronize()?;
        self.phases.combine = start.elapsed();
        let outputs = self.outputs()?;
        let counted = outputs.iter().zip(&counts);
        counted.for_each(|(outputs, counts)| outputs.received.require_counts(counts));
        Ok(outputs)
    }

    /// Most elements of all local ranks' tokens.
    const fn elements(&self) -> usize {
        let config = &self.settings.config;
        self.ranks.len() * config.max_tokens_per_rank * config.hidden
    }

    /// Runs the stand-in for the experts on all local ranks, whose dispatches have ended: see
    /// [`round`](Self::round). Synchronises.
    pub fn run_experts(&mut self, problem: &Problem, scale: &[f32]) -> Result<(), Error> {
        let elements = self.elements();
        let config = &self.settings.config;
        if config.receive.keeps_rows() {
            let mut ranks = self.ranks.iter_mut().zip(&self.communicators);
            ranks.try_for_each(|(rank, own)| rank.note_view(own))?;
            return threads::each(&mut self.ranks, elements, |rank| {
                rank.answer_rows(problem, scale)
            });
        }
        let shared = config.shared_expert.then_some(self.shared_factor);
        let placements = Placement::of_config(problem, config, self.shared_factor);
        let (format, late_weights) = (config.format, self.late_weights);
        threads::each(&mut self.ranks, elements, |rank| {
            let placement = &placements[rank.number()];
            // Rows of other formats go through a matrix multiplication first.
            if format == TokenFormat::Bf16 {
                rank.answer_received(scale, shared)?;
            } else {
                rank.answer(problem, scale, placement)?;
            }
            if late_weights || takes_weights(config) {
                rank.give_row_weights(problem, placement)?;
            }
            Ok(())
        })
    }

    /// Gives the router's weights to all later combines, on the experts' ranks. Synchronises.
    pub fn give_weights(
        &mut self,
        problem: &Problem,
        placements: &[Placement],
    ) -> Result<(), Error> {
        let mut ranks = self.ranks.iter_mut();
        ranks.try_for_each(|rank| rank.give_row_weights(problem, &placements[rank.number()]))
    }

    /// Sets the shared expert's factor, [`SHARED_FACTOR`] before.
    pub const fn set_shared_factor(&mut self, factor: f32) {
        self.shared_factor = factor;
    }

    /// Gives the router's weights to [rounds](Self::round)' combines from now on, on the experts' ranks. The
    /// plan has options and is of reduced mode, and dispatches are not given them.
    pub const fn give_weights_late(&mut self) {
        self.late_weights = true;
    }

    /// Adds rows to the results of all later combines: by rank, BF16 `[tokens, hidden]`, as many tokens in
    /// each round; and a bias of zeros if `biased`. The plan has options. Synchronises.
    pub fn add_steps(&mut self, residual: &[Vec<bf16>], biased: bool) -> Result<(), Error> {
        let mut ranks = self.ranks.iter_mut();
        ranks.try_for_each(|rank| rank.give_steps(&residual[rank.number()], biased))
    }

    /// Gives all later dispatches these tokens instead of those of their problems: by rank, in the form of
    /// the settings, which is encoded.
    pub fn give_encoded(&mut self, encoded: &[Vec<Encoded>]) {
        let ranks = self.ranks.iter_mut();
        ranks.for_each(|rank| rank.give_encoded(&encoded[rank.number()]));
    }

    /// Begins the sums of all later combines with rows, if there are any: by rank, BF16 `[tokens, hidden]`,
    /// as many tokens in each round. Rows stay as they came. Synchronises.
    pub fn begin_with(&mut self, initial: &[Option<Vec<Vec<bf16>>>; 2]) -> Result<(), Error> {
        self.ranks.iter_mut().try_for_each(|rank| {
            let number = rank.number();
            let own = initial.each_ref();
            rank.give_initial(own.map(|rows| rows.as_ref().map(|rows| &rows[number][..])))
        })
    }

    /// Has the host wait for the counts of split dispatches of [rounds](Self::round) from now on, and
    /// compares them with the rows that come.
    pub const fn count_on_host(&mut self, counts: bool) {
        self.counts = counts;
    }

    /// Waits for the counts of all local ranks' open dispatches; none if nobody asks for them.
    fn counts(&mut self) -> Result<Vec<ReceivedCounts>, Error> {
        if !self.counts || !self.settings.split {
            return Ok(Vec::new());
        }
        self.together(Call::DispatchCounts)?;
        let wait = |rank: &Communicator| {
            loop {
                if let Some(counts) = rank.received()? {
                    return Ok(counts);
                }
                spin_loop();
            }
        };
        self.communicators.iter().map(wait).collect()
    }

    /// Dispatches the inputs of each [round](Self::round) twice from now on, and gives up the first dispatch.
    pub const fn give_up_before_rounds(&mut self, gives_up: bool) {
        self.gives_up = gives_up;
    }

    /// Sets the deadlines of all later calls, each local rank's to one that `draw` returns.
    pub fn set_deadlines(&mut self, mut draw: impl FnMut() -> Duration) -> Result<(), Error> {
        let mut ranks = self.communicators.iter_mut();
        ranks.try_for_each(|rank| rank.set_deadline(Some(draw())))
    }

    /// Enqueues the end of a round without a combine on all local ranks.
    pub fn give_up(&mut self) -> Result<(), Error> {
        if self.all_at_once {
            return self.together(Call::GiveUp);
        }
        let mut ranks = self.communicators.iter_mut().zip(&self.ranks);
        ranks.try_for_each(|(communicator, rank)| communicator.give_up(rank.stream))
    }

    /// Makes a call without tensors on all local ranks.
    fn together(&mut self, call: Call) -> Result<(), Error> {
        let streams: Vec<_> = self.ranks.iter().map(|rank| rank.stream).collect();
        let calls = vec![call; streams.len()];
        Communicator::together(&mut self.communicators, &streams, &calls)
    }

    /// Makes each [round](Self::round) in calls of all local ranks from now on, or in one of each.
    pub const fn call_all_at_once(&mut self, all_at_once: bool) {
        self.all_at_once = all_at_once;
    }

    /// Enqueues everything in these streams from now on, by place.
    pub fn use_streams(&mut self, streams: impl IntoIterator<Item = Stream>) {
        for (rank, stream) in self.ranks.iter_mut().zip(streams) {
            rank.stream = stream;
        }
    }

    /// Measures how long enqueuing the dispatches and the combines of a round takes. Synchronises.
    pub fn host_time(&mut self) -> Result<Phases, Error> {
        let start = Instant::now();
        self.launch_halves(0..2)?;
        let dispatch = start.elapsed();
        let start = Instant::now();
        self.launch_halves(2..HALVES)?;
        let combine = start.elapsed();
        self.synchronize()?;
        Ok(Phases { dispatch, combine })
    }

    /// Enqueues each of these half calls of a [first](Turn::FIRST) round on all local ranks.
    pub fn launch_halves(&mut self, halves: Range<usize>) -> Result<(), Error> {
        for half in halves {
            if half % 2 == 1 && !self.settings.split {
                // Done already.
            } else if self.all_at_once {
                self.launch_at_once(half, |_, own| own)?;
            } else {
                (0..self.ranks.len()).try_for_each(|index| self.launch_half(index, half))?;
            }
        }
        Ok(())
    }

    /// Enqueues a half call of a [first](Turn::FIRST) round in a call of all local ranks. `stream` returns
    /// the stream of each, given its place and its own stream.
    pub fn launch_at_once(
        &mut self,
        half: usize,
        stream: impl Fn(usize, Stream) -> Stream,
    ) -> Result<(), Error> {
        let ranks = self.ranks.iter().enumerate();
        let streams: Vec<_> = ranks.map(|(at, rank)| stream(at, rank.stream)).collect();
        let split = self.settings.split;
        let (all, tensors) = self.all(Turn::FIRST);
        Tensors::enqueue_all(all, &streams, &tensors, half, split)
    }

    /// Puts a problem's inputs into a slot. Synchronises.
    pub fn upload(&mut self, slot: usize, problem: &Problem) -> Result<(), Error> {
        self.upload_first(slot, problem, usize::MAX)
    }

    /// Puts each rank's first `tokens` tokens of a problem into a slot. Synchronises.
    pub fn upload_first(
        &mut self,
        slot: usize,
        problem: &Problem,
        tokens: usize,
    ) -> Result<(), Error> {
        let mut ranks = self.ranks.iter_mut();
        ranks.try_for_each(|rank| rank.upload(slot, problem, tokens))
    }

    /// Fills all outputs of all local ranks, in every place. Synchronises.
    pub fn poison(&self) -> Result<(), Error> {
        self.ranks.iter().try_for_each(LocalRank::poison)
    }

    /// Enqueues a half call of a [first](Turn::FIRST) round on one local rank; see [`HALVES`]. Experts return
    /// whatever lies in their rows. Does not synchronise.
    pub fn launch_half(&mut self, index: usize, half: usize) -> Result<(), Error> {
        let (rank, communicator) = (&mut self.ranks[index], &mut self.communicators[index]);
        rank.enqueue(communicator, Turn::FIRST, half)?;
        if half == 1 {
            rank.note_view(communicator)?;
        }
        Ok(())
    }

    /// Enqueues a half call of a turn on one local rank, in a stream of its own or another's.
    pub fn launch_in(
        &mut self,
        index: usize,
        stream: Stream,
        turn: Turn,
        half: usize,
    ) -> Result<(), Error> {
        self.ranks[index].enqueue_in(&mut self.communicators[index], stream, turn, half)
    }

    /// Enqueues a turn on one local rank. Does not synchronise.
    pub fn launch(&mut self, index: usize, turn: Turn) -> Result<(), Error> {
        let (rank, communicator) = (&self.ranks[index], &mut self.communicators[index]);
        (0..HALVES).try_for_each(|half| rank.enqueue(communicator, turn, half))
    }

    /// Enqueues a turn on every local rank, one rank after another. Does not synchronise.
    pub fn launch_all(&mut self, turn: Turn) -> Result<(), Error> {
        (0..self.ranks.len()).try_for_each(|index| self.launch(index, turn))
    }

    /// Plan of the local ranks' communicators.
    pub fn plan(&self) -> &Plan {
        self.communicators[0].plan()
    }

    /// Capacity of the dispatch's outputs.
    pub const fn capacity(&self) -> Capacity {
        self.settings.capacity
    }

    /// Results of a turn on each local rank, with the rank's number.
    pub fn combined(&self, turn: Turn) -> Result<Vec<(usize, Vec<bf16>)>, Error> {
        let of = |rank: &LocalRank| Ok((rank.number(), rank.combined(turn)?));
        self.ranks.iter().map(of).collect()
    }

    /// Waits for all local ranks; returns the first fault in rank order, an input's too.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.told().try_for_each(|(_, told)| strict(told))
    }

    /// Waits for each local rank, and returns what each reports.
    pub fn outcomes(&self) -> Vec<(usize, Result<Option<InputFault>, Error>)> {
        self.told().collect()
    }

    /// Waits for each local rank as its turn comes.
    fn told(&self) -> impl Iterator<Item = (usize, Result<Option<InputFault>, Error>)> {
        let ranks = self.ranks.iter().zip(&self.communicators);
        ranks.map(|(rank, communicator)| {
            let told = communicator.synchronize(rank.stream);
            (rank.number(), told.map(InputReport::fault))
        })
    }

    /// A local rank's communicator and stream, for what only one kind of device can do.
    pub fn local(&mut self, index: usize) -> (&mut Communicator, Stream) {
        (&mut self.communicators[index], self.ranks[index].stream)
    }

    /// Each local rank's communicator and tensors, for threads.
    pub fn each(&mut self) -> impl Iterator<Item = (&mut Communicator, &LocalRank)> {
        self.communicators.iter_mut().zip(&self.ranks)
    }

    /// A local rank's tensors of a turn.
    pub fn tensors(&self, index: usize, turn: Turn) -> Tensors {
        self.ranks[index].tensors(turn)
    }

    /// The communicators and tensors of all local ranks.
    pub fn all(&mut self, turn: Turn) -> (&mut [Communicator], Vec<Tensors>) {
        let tensors = self.ranks.iter().map(|rank| rank.tensors(turn));
        (&mut self.communicators, tensors.collect())
    }

    /// Everything that a [first](Turn::FIRST) round writes on a local rank.
    pub fn written(&self, index: usize) -> Vec<DevicePtr> {
        self.ranks[index].written()
    }

    /// Downloads all local ranks' outputs after a [first](Turn::FIRST) round. Synchronises, but not with the
    /// ranks' streams.
    pub fn outputs(&self) -> Result<Vec<RankOutputs>, Error> {
        threads::each(&self.ranks, self.elements(), LocalRank::outputs)
    }

    /// Closes after a rank gave up: the others first enqueue the rest of an open round, which ends when they
    /// give up, too. Collective.
    pub fn close_after_fault(mut self) -> Result<(), Error> {
        for index in 0..self.ranks.len() {
            let next = match self.communicators[index].round() {
                Round::Idle => HALVES,
                Round::DispatchSent => 1,
                Round::Dispatched => 2,
                Round::CombineSent => 3,
            };
            // Refused on ranks that gave up.
            let _ = (next..HALVES).try_for_each(|half| self.launch_half(index, half));
        }
        self.outcomes();
        self.close()
    }

    /// Frees everything. Collective.
    pub fn close(self) -> Result<(), Error> {
        for rank in &self.ranks {
            rank.free()?;
        }
        Ok(Communicator::close_all(self.communicators)?)
    }
}

/// Makes an error of every fault, an input's too.
pub fn strict(told: Result<Option<InputFault>, Error>) -> Result<(), Error> {
    match told? {
        None => Ok(()),
        Some(InputFault(fault)) => Err(Error::Fault(fault)),
    }
}

/// Whether combines of a plan are given weights in any case.
pub const fn takes_weights(config: &Config) -> bool {
    matches!(
        (config.receive, config.combine),
        (Receive::Padded(_), CombineMode::Reduced)
    )
}
