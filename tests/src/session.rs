//! A session: the ranks of a group that this process drives, their tensors, and rounds on them.

mod local_rank;

use std::ops::Range;
use std::time::{Duration, Instant};

use ferry::{
    Capacity, CombineInput, CombineOutput, Communicator, Config, DevicePtr, Error, Group,
    InputFault, Plan, Round, Stream, TokenFormat,
};
use ferry_reference::{Problem, bf16};

use crate::halves::HALVES;
use crate::verify::{Placement, RankOutputs, SHARED_FACTOR};
use local_rank::LocalRank;

/// What a session is made for.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Of the plan.
    pub config: Config,
    /// What the dispatch's outputs hold.
    pub capacity: Capacity,
    /// Whether to make the split calls.
    pub split: bool,
}

/// Which inputs a round takes, and where its result goes.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// The slot with the inputs.
    pub slot: usize,
    /// The result's place, of as many as there are slots. Two rounds that follow each other in
    /// one place should have different inputs: a round that did not run is not noticed otherwise.
    pub into: usize,
}

impl Turn {
    /// Inputs of the first slot, result in the first place.
    pub const FIRST: Self = Self { slot: 0, into: 0 };
}

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
    /// In the order of the communicators.
    ranks: Vec<LocalRank>,
    phases: Phases,
    /// Whether rounds are made in calls of all local ranks.
    all_at_once: bool,
    /// What the shared expert multiplies by.
    shared_factor: f32,
    /// Whether combines are given the weights that dispatches are not.
    late_weights: bool,
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
        })
    }

    /// The ranks of this process.
    pub fn local_ranks(&self) -> Vec<usize> {
        self.ranks.iter().map(LocalRank::rank).collect()
    }

    /// Wall time of the last [`round`](Self::round).
    pub const fn phases(&self) -> Phases {
        self.phases
    }

    /// One round on all local ranks: uploads, dispatch, the stand-in for the experts (each row
    /// times its expert's factor in `scale`, rounded to BF16), combine; downloads everything.
    /// `weights`: in exact mode, whether combine sums with the router's weights or keeps rows
    /// apart. Synchronises. Collective.
    pub fn round(
        &mut self,
        problem: &Problem,
        scale: &[f32],
        weights: bool,
    ) -> Result<Vec<RankOutputs>, Error> {
        self.upload(0, problem)?;
        self.poison()?;
        let start = Instant::now();
        self.enqueue_dispatch()?;
        self.synchronize()?;
        self.phases.dispatch = start.elapsed();
        self.run_experts(problem, scale)?;
        let start = Instant::now();
        self.enqueue_combine(weights)?;
        self.synchronize()?;
        self.phases.combine = start.elapsed();
        self.ranks
            .iter()
            .map(|rank| rank.outputs(weights))
            .collect()
    }

    /// The stand-in for the experts on all local ranks, whose dispatches have ended: see
    /// [`round`](Self::round). Synchronises.
    pub fn run_experts(&mut self, problem: &Problem, scale: &[f32]) -> Result<(), Error> {
        let (config, factor) = (&self.settings.config, self.shared_factor);
        // The experts get rows of other formats only after a matrix multiplication.
        let is_encoded = config.format != TokenFormat::Bf16;
        let placements = (is_encoded || self.late_weights)
            .then(|| Placement::of_config(problem, config, factor));
        for rank in &mut self.ranks {
            let placement = placements.as_ref().map(|all| &all[rank.rank()]);
            match placement.filter(|_| is_encoded) {
                None => rank.run_experts(scale, config.shared_expert.then_some(factor))?,
                Some(placement) => rank.answer(problem, scale, placement)?,
            }
            if let Some(placement) = placement.filter(|_| self.late_weights) {
                rank.give_row_weights(problem, placement)?;
            }
        }
        Ok(())
    }

    /// What the shared expert multiplies by from now on, in place of [`SHARED_FACTOR`].
    pub const fn set_shared_factor(&mut self, factor: f32) {
        self.shared_factor = factor;
    }

    /// From now on a [round](Self::round)'s combine is given the router's weights, on the experts' ranks, and
    /// its dispatch is not. The plan has options and is of reduced mode.
    pub fn give_weights_late(&mut self) {
        self.give_weights(false);
        self.late_weights = true;
    }

    /// From now on combines add rows to the results: by rank, BF16 `[tokens, hidden]`, as many tokens in each
    /// round. The plan has options. Synchronises.
    pub fn add_residual(&mut self, residual: &[Vec<bf16>]) -> Result<(), Error> {
        self.each(|rank| rank.give_residual(&residual[rank.rank()]))
    }

    /// Whether a [round](Self::round) is made in calls of all local ranks from now on, or in one of each.
    pub const fn call_all_at_once(&mut self, all_at_once: bool) {
        self.all_at_once = all_at_once;
    }

    /// How long enqueuing the dispatches and the combines of a round takes, of what was uploaded.
    /// Synchronises.
    pub fn host_time(&mut self) -> Result<Phases, Error> {
        let start = Instant::now();
        self.enqueue_dispatch()?;
        let dispatch = start.elapsed();
        let start = Instant::now();
        self.enqueue_combine(true)?;
        let combine = start.elapsed();
        self.synchronize()?;
        Ok(Phases { dispatch, combine })
    }

    fn enqueue_dispatch(&mut self) -> Result<(), Error> {
        if self.all_at_once {
            return self.dispatch_at_once(|_, own| own);
        }
        self.launch_halves(0..2, true)
    }

    fn enqueue_combine(&mut self, weights: bool) -> Result<(), Error> {
        if self.all_at_once {
            return self.combine_at_once(weights);
        }
        self.launch_halves(2..HALVES, weights)
    }

    /// Enqueues each of these half calls on all local ranks, one rank after another.
    fn launch_halves(&mut self, halves: Range<usize>, weights: bool) -> Result<(), Error> {
        for half in halves {
            for index in 0..self.ranks.len() {
                self.launch_half(index, half, weights)?;
            }
        }
        Ok(())
    }

    /// Enqueues the dispatches of a [first](Turn::FIRST) round in calls of all local ranks. `stream` returns
    /// the stream of each, given its place and its own stream.
    pub fn dispatch_at_once(
        &mut self,
        stream: impl Fn(usize, Stream) -> Stream,
    ) -> Result<(), Error> {
        let ranks = self.ranks.iter().enumerate();
        let streams: Vec<_> = ranks.map(|(at, rank)| stream(at, rank.stream)).collect();
        let tensors = self.ranks.iter().map(|rank| rank.tensors(true));
        let (inputs, outputs): (Vec<_>, Vec<_>) = tensors.map(|t| (t.input, t.output)).unzip();
        let all = &mut self.communicators;
        if self.settings.split {
            Communicator::dispatch_async_all(all, &streams, &inputs)?;
            Communicator::dispatch_wait_all(all, &streams, &outputs)
        } else {
            Communicator::dispatch_all(all, &streams, &inputs, &outputs)
        }
    }

    /// Enqueues the combines of a [first](Turn::FIRST) round in calls of all local ranks.
    fn combine_at_once(&mut self, weights: bool) -> Result<(), Error> {
        let streams: Vec<_> = self.ranks.iter().map(|rank| rank.stream).collect();
        let tensors = self.ranks.iter().map(|rank| rank.tensors(weights));
        let (inputs, outputs): (Vec<CombineInput>, Vec<CombineOutput>) =
            tensors.map(|t| (t.expert_rows, t.combined)).unzip();
        let all = &mut self.communicators;
        if self.settings.split {
            Communicator::combine_async_all(all, &streams, &inputs, &outputs)?;
            Communicator::combine_wait_all(all, &streams)
        } else {
            Communicator::combine_all(all, &streams, &inputs, &outputs)
        }
    }

    /// Gives NVFP4 this global scale from now on, in place of [`INPUT_SCALE`](crate::formats::INPUT_SCALE).
    /// Synchronises.
    pub fn set_input_scale(&self, scale: f32) -> Result<(), Error> {
        let mut ranks = self.ranks.iter();
        ranks.try_for_each(|rank| rank.set_input_scale(scale))
    }

    /// Puts a problem's inputs into a slot. Synchronises.
    pub fn upload(&mut self, slot: usize, problem: &Problem) -> Result<(), Error> {
        self.each(|rank| rank.upload(slot, problem))
    }

    /// Fills all outputs of all local ranks, in every place. Synchronises.
    pub fn poison(&self) -> Result<(), Error> {
        self.ranks
            .iter()
            .try_for_each(|rank| rank.poison(&self.settings))
    }

    /// Enqueues a half call of a [first](Turn::FIRST) round on one local rank; see [`HALVES`]. Experts return
    /// whatever lies in their rows. Does not synchronise.
    pub fn launch_half(&mut self, index: usize, half: usize, weights: bool) -> Result<(), Error> {
        let (rank, split) = (&self.ranks[index], self.settings.split);
        let tensors = rank.tensors(weights);
        tensors.enqueue(&mut self.communicators[index], rank.stream, half, split)
    }

    /// What the local ranks' communicators were made with.
    pub fn plan(&self) -> &Plan {
        self.communicators[0].plan()
    }

    /// What the dispatch's outputs hold.
    pub const fn capacity(&self) -> Capacity {
        self.settings.capacity
    }

    /// Enqueues a round with experts that return what they get (BF16 only), on every local rank
    /// in the order that `order` gives, calling `before` before each. Does not synchronise.
    pub fn launch_identity(
        &mut self,
        turn: Turn,
        order: &[usize],
        mut before: impl FnMut(usize),
    ) -> Result<(), Error> {
        for &index in order {
            before(index);
            self.launch_identity_on(index, turn)?;
        }
        Ok(())
    }

    /// What a turn's combine gave on each local rank, with the rank's number.
    pub fn combined(&self, turn: Turn) -> Result<Vec<(usize, Vec<bf16>)>, Error> {
        let of = |rank: &LocalRank| Ok((rank.rank(), rank.combined(turn, true)?));
        self.ranks.iter().map(of).collect()
    }

    /// Waits for all local ranks; the first fault in rank order, an input's too.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.said().try_for_each(|(_, said)| strict(said))
    }

    /// Waits for each local rank, and what each says.
    pub fn outcomes(&self) -> Vec<(usize, Result<Option<InputFault>, Error>)> {
        self.said().collect()
    }

    /// Waits for each local rank as its turn comes.
    fn said(&self) -> impl Iterator<Item = (usize, Result<Option<InputFault>, Error>)> {
        let ranks = self.ranks.iter().zip(&self.communicators);
        ranks.map(|(rank, communicator)| (rank.rank(), communicator.synchronize(rank.stream)))
    }

    /// A local rank's communicator and stream, for what only one kind of device can do.
    pub fn local(&mut self, index: usize) -> (&mut Communicator, Stream) {
        (&mut self.communicators[index], self.ranks[index].stream)
    }

    /// Enqueues a round on one local rank. See [`launch_identity`](Self::launch_identity).
    pub fn launch_identity_on(&mut self, index: usize, turn: Turn) -> Result<(), Error> {
        let (rank, communicator) = (&self.ranks[index], &mut self.communicators[index]);
        let tensors = rank.identity(turn);
        tensors.enqueue(communicator, rank.stream, 0, false)?;
        tensors.enqueue(communicator, rank.stream, 2, false)
    }

    /// Whether dispatches are given the router's weights from now on. They are until this is called.
    pub fn give_weights(&mut self, weights: bool) {
        for rank in &mut self.ranks {
            rank.gives_weights = weights;
        }
    }

    /// From now on the device says how many tokens there are, and every tensor has as many rows as the plan
    /// allows. The plan has options.
    pub fn count_on_device(&mut self) {
        for rank in &mut self.ranks {
            rank.is_counted = true;
        }
    }

    /// Where the inputs of a slot lie on a local rank, and their bytes: the tokens, their experts,
    /// the weights, and the scale of all, which slots share.
    pub fn inputs(&self, index: usize, slot: usize) -> [(DevicePtr, usize); 4] {
        self.ranks[index].inputs(slot)
    }

    /// Where everything lies that a [first](Turn::FIRST) round writes on a local rank, and its bytes.
    pub fn written(&self, index: usize) -> Vec<(DevicePtr, usize)> {
        self.ranks[index].written(&self.settings)
    }

    /// Where the experts' rows are expected on a local rank, and their bytes.
    pub fn expert_rows(&self, index: usize) -> (DevicePtr, usize) {
        self.ranks[index].expert_rows(&self.settings)
    }

    /// What stands in a local rank's outputs; `weights` as for [`round`](Self::round). Synchronises, but not
    /// with the rank's stream.
    pub fn outputs_on(&self, index: usize, weights: bool) -> Result<RankOutputs, Error> {
        self.ranks[index].outputs(weights)
    }

    /// Enqueues a [first](Turn::FIRST) round on one local rank, with an event before, between and after its
    /// halves.
    #[cfg(feature = "cuda")]
    pub fn launch_timed(
        &mut self,
        index: usize,
        events: Option<&[ferry::cuda::CudaEvent; 3]>,
    ) -> Result<(), Error> {
        let (rank, communicator) = (&self.ranks[index], &mut self.communicators[index]);
        let (tensors, stream) = (rank.identity(Turn::FIRST), rank.stream);
        let record = |which: usize| match events {
            Some(events) => events[which].record(stream),
            None => Ok(()),
        };
        record(0)?;
        tensors.enqueue(communicator, stream, 0, false)?;
        record(1)?;
        tensors.enqueue(communicator, stream, 2, false)?;
        record(2)
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
            let _ = (next..HALVES).try_for_each(|half| self.launch_half(index, half, true));
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

    fn each(
        &mut self,
        mut run: impl FnMut(&mut LocalRank) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.ranks.iter_mut().try_for_each(&mut run)
    }
}

/// What a rank says, where a fault of the input is as bad as any other.
pub fn strict(said: Result<Option<InputFault>, Error>) -> Result<(), Error> {
    match said? {
        None => Ok(()),
        Some(InputFault(fault)) => Err(Error::Fault(fault)),
    }
}
