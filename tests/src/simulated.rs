//! Rounds on simulated ranks: seeded cases, how they run, and what the oracle says of them. Whatever is wrong
//! panics with the whole case.

mod case;
pub mod finish;

use ferry::layout::{Kernel, Region};
use ferry::simulator::SimulatorError;
use ferry::*;
use ferry_reference::{Problem, bf16};

use crate::formats;
use crate::halves::{HALVES, Tensors};
use crate::verify::{Compared, Oracle, Received, without_overflow};

pub use crate::verify::{POISON, download};
pub use case::*;

/// What a round must give, on every rank.
struct Expected {
    oracle: Oracle,
    /// What each expert multiplies by.
    scale: Vec<f32>,
    combined: Vec<Vec<bf16>>,
    /// What the outputs hold, by rank.
    capacities: Vec<Capacity>,
}

impl Expected {
    fn of(case: &Case, problem: &Problem, round: usize) -> Self {
        let scale = scale_of(case, round);
        let oracle_of = |problem| {
            let compared = Compared::with_shared(case.shared_expert);
            Oracle::of(problem, &scale, case.format, compared)
        };
        let oracle = oracle_of(problem);
        let mut dice = Dice::new(case.seed ^ (round as u64) << 32);
        let capacities: Vec<_> = oracle
            .placements()
            .iter()
            .zip(&problem.inputs)
            .map(|(placement, input)| case.capacity(placement.capacity(), input.tokens, &mut dice))
            .collect();
        let (mode, summed) = (case.how.mode(), case.how != Return::Apart);
        let held = without_overflow(problem, case.format, oracle.placements(), &capacities);
        let combined = match case.short {
            true => oracle_of(&held).combined(mode, summed),
            false => oracle.combined(mode, summed),
        };
        Self {
            oracle,
            scale,
            combined,
            capacities,
        }
    }
}

/// What each expert multiplies by in a round.
pub fn scale_of(case: &Case, round: usize) -> Vec<f32> {
    let factor = |expert| 1.0 + (expert % 7) as f32 / 8.0 + round as f32;
    (0..case.experts).map(factor).collect()
}

/// Memory of a rank that is full of [`POISON`].
pub fn poisoned(rank: &Communicator, bytes: usize) -> DevicePtr {
    let bytes = bytes.max(16) as u64;
    let at = rank.device().alloc(bytes).unwrap();
    rank.device().fill(at, POISON, bytes).unwrap();
    at
}

impl Tensors {
    /// `rows` arrive; the experts' answers are there beforehand, so that nobody has to wait.
    fn new(rank: &Communicator, case: &Case, problem: &Problem, expected: &Expected) -> Self {
        let r = rank.rank().0 as usize;
        let input = &problem.inputs[r];
        let (top_k, hidden) = (case.top_k, case.hidden);
        let more = case.counted.unwrap_or(0);
        let tokens = input.tokens + more;
        let space = expected.capacities[r];
        let capacity = space.rows;
        let (device, plan) = (rank.device(), rank.plan());
        let buffers = DispatchBuffers::with_capacity(device, plan, space).unwrap();
        buffers.fill(POISON).unwrap();
        // What stands behind the tokens that are counted would be seen in the results.
        let x = [&input.x[..], &vec![bf16::NAN; more * hidden]].concat();
        let ids = [&input.topk_ids[..], &vec![0; more * top_k]].concat();
        let weights = [&input.topk_weights[..], &vec![f32::NAN; more * top_k]].concat();
        let weights = device.upload_tensor([tokens, top_k], &weights).unwrap();
        let count = [input.tokens as u32];
        let placement = expected.oracle.placement(r).cut(case.format, space);
        let answers = placement.expert_rows(problem, &expected.scale, r, capacity);
        let summed = || {
            Tensor::contiguous(
                poisoned(rank, tokens * hidden * 2),
                DataType::Bf16,
                [tokens, hidden],
            )
        };
        let combined = match case.how {
            Return::Reduced | Return::Exact => CombineOutput::Summed(summed()),
            Return::Apart => CombineOutput::Apart(Tensor::contiguous(
                poisoned(rank, tokens * top_k * hidden * 2),
                DataType::Bf16,
                [tokens, top_k, hidden],
            )),
        };
        Self {
            input: DispatchInput {
                topk_weights: Some(weights),
                input_scale: matches!(case.format, TokenFormat::Nvfp4(_))
                    .then(|| device.upload_tensor([1], &[formats::INPUT_SCALE]).unwrap()),
                tokens_on_device: (case.counted)
                    .map(|_| device.upload_tensor([1], &count).unwrap()),
                ..DispatchInput::new(
                    device.upload_tensor([tokens, hidden], &x).unwrap(),
                    device.upload_tensor([tokens, top_k], &ids).unwrap(),
                )
            },
            output: *buffers.output(),
            expert_rows: CombineInput {
                topk_weights: (case.how == Return::Exact).then_some(weights),
                ..CombineInput::new(device.upload_tensor([capacity, hidden], &answers).unwrap())
            },
            combined,
        }
    }
}

/// How a rank came out of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Well.
    Finished,
    /// It gave up.
    Fault(Fault),
    /// It was lost.
    Lost,
    /// It came late, and a peer had given up on it. All that it had enqueued has ended well.
    Late {
        /// Rounds that it has dispatched.
        dispatched: usize,
        /// Rounds that it has combined.
        combined: usize,
    },
}

/// A run that is over; its outputs are still on the devices.
pub struct Run {
    /// What was run.
    pub case: Case,
    /// Its communicators.
    pub ranks: Vec<Communicator>,
    /// One for each rank: ranks that share a GPU cannot have one together.
    streams: Vec<Stream>,
    /// `[round][rank]`.
    pub tensors: Vec<Vec<Tensors>>,
    /// By rank.
    pub outcomes: Vec<Outcome>,
    /// Input faults, as they were found, with the rank whose check returned them.
    pub input_faults: Vec<Fault>,
    expected: Vec<Expected>,
}

impl Run {
    /// Runs a case with the inputs of its workload.
    pub fn of(case: &Case) -> Self {
        Self::with(case, &case.problems(), |_, _| {})
    }

    /// Runs a case whose problems are `problems`, with tensors changed by `change` after they
    /// were made: bad inputs, outputs that are too small.
    pub fn with(
        case: &Case,
        problems: &[Problem],
        change: impl Fn(&mut Vec<Vec<Tensors>>, &[Communicator]),
    ) -> Self {
        let group = Group::simulated_with(case.machine()).unwrap();
        Self::on(&group, case.config(), case, problems, change)
    }

    /// As [`with`](Self::with), on the ranks of a group and with a configuration of its own.
    pub fn on(
        group: &Group,
        config: Config,
        case: &Case,
        problems: &[Problem],
        change: impl Fn(&mut Vec<Vec<Tensors>>, &[Communicator]),
    ) -> Self {
        let plan = Plan::new(group, config).unwrap();
        // Ranks need not have allocated alike before.
        for rank in group.local_ranks() {
            let device = group.device(rank).unwrap();
            device.alloc(1_000 * u64::from(rank.0)).unwrap();
        }
        let ranks = Communicator::new(group, &plan).unwrap();
        let expected: Vec<_> = problems
            .iter()
            .enumerate()
            .map(|(round, problem)| Expected::of(case, problem, round))
            .collect();
        let mut tensors: Vec<Vec<_>> = problems
            .iter()
            .zip(&expected)
            .map(|(problem, expected)| {
                ranks
                    .iter()
                    .map(|rank| Tensors::new(rank, case, problem, expected))
                    .collect()
            })
            .collect();
        change(&mut tensors, &ranks);
        let mut run = Self {
            case: case.clone(),
            outcomes: vec![Outcome::Finished; ranks.len()],
            streams: ranks
                .iter()
                .map(|rank| rank.device().stream().unwrap())
                .collect(),
            ranks,
            tensors,
            input_faults: Vec::new(),
            expected,
        };
        for round in 0..run.tensors.len() {
            for half in 0..HALVES {
                run.enqueue(round, half);
                if case.synchronize {
                    let (waits, ends) = (half >= 1, half >= 3);
                    run.synchronize(round + usize::from(waits), round + usize::from(ends));
                }
            }
        }
        let rounds = run.tensors.len();
        run.synchronize(rounds, rounds);
        run
    }

    fn enqueue(&mut self, round: usize, half: usize) {
        for (r, rank) in self.ranks.iter_mut().enumerate() {
            if self.outcomes[r] != Outcome::Finished || self.case.absent == Some(r) {
                continue;
            }
            let (stream, split) = (self.streams[r], self.case.is_split(r));
            match self.tensors[round][r].enqueue(rank, stream, half, split) {
                Ok(()) => {}
                Err(Error::Poisoned(fault)) => self.outcomes[r] = Outcome::Fault(fault),
                Err(error) => panic!("{:?}: rank {r}: {error}", self.case),
            }
        }
    }

    /// Waits for each rank, which has enqueued so many dispatches and combines.
    fn synchronize(&mut self, dispatched: usize, combined: usize) {
        for (r, rank) in self.ranks.iter().enumerate() {
            if self.outcomes[r] != Outcome::Finished {
                continue;
            }
            match rank.synchronize(self.streams[r]) {
                Ok(told) => self
                    .input_faults
                    .extend(told.map(|InputFault(fault)| fault)),
                Err(Error::Fault(fault) | Error::Poisoned(fault)) => {
                    self.outcomes[r] = Outcome::Fault(fault);
                }
                Err(Error::Simulator(SimulatorError::RankLost { .. })) => {
                    self.outcomes[r] = Outcome::Lost;
                }
                Err(Error::PeerGaveUp { .. }) => {
                    self.outcomes[r] = Outcome::Late {
                        dispatched,
                        combined,
                    };
                }
                Err(error) => panic!("{:?}: rank {r}: {error}", self.case),
            }
        }
    }

    /// Rounds that a rank has dispatched, and rounds that it has combined, for certain.
    fn progress(&self, rank: usize) -> (usize, usize) {
        match &self.outcomes[rank] {
            Outcome::Finished | Outcome::Late { .. } if self.case.absent == Some(rank) => (0, 0),
            &Outcome::Late {
                dispatched,
                combined,
            } => (dispatched, combined),
            Outcome::Finished => (self.tensors.len(), self.tensors.len()),
            Outcome::Lost => (0, 0),
            Outcome::Fault(fault) => {
                let round = fault.epoch as usize - 1;
                let dispatched = match fault.kernel {
                    Kernel::Dispatch | Kernel::DispatchAsync | Kernel::DispatchWait => round,
                    _ => round + 1,
                };
                (dispatched, round)
            }
        }
    }

    /// What a rank's outputs lack in a round, if anything: rows, or else blocks of scales; how many come, and
    /// how many they hold.
    pub fn lacks(&self, round: usize, rank: usize) -> Option<(Region, usize, usize)> {
        let expected = &self.expected[round];
        let needed = expected.oracle.placement(rank).capacity();
        let given = expected.capacities[rank];
        let is_tiled = self.case.format.scale_layout() == Some(ScaleLayout::Tiled);
        let blocks = (Region::ScaleBlocks, needed.scale_blocks, given.scale_blocks);
        [
            (true, (Region::Output, needed.rows, given.rows)),
            (is_tiled, blocks),
        ]
        .into_iter()
        .find(|&(counts, (_, needed, given))| counts && needed > given)
        .map(|(_, numbers)| numbers)
    }

    /// Compares all that is certain to be there with the oracle.
    pub fn compare(&self) {
        for r in 0..self.ranks.len() {
            let (dispatched, combined) = self.progress(r);
            for round in 0..dispatched {
                self.compare_dispatch(round, r);
            }
            for round in 0..combined {
                self.compare_combine(round, r);
            }
        }
    }

    /// As [`compare`](Self::compare), where nothing went wrong; and closes.
    pub fn expect_success(self) {
        for outcome in &self.outcomes {
            assert_eq!(*outcome, Outcome::Finished, "{:?}", self.case);
        }
        assert_eq!(self.input_faults, [], "{:?}", self.case);
        self.compare();
        self.close();
    }

    /// Frees everything, but of a lost rank whose round can never be finished.
    pub fn close(self) {
        for (rank, outcome) in self.ranks.into_iter().zip(&self.outcomes) {
            let is_lost = *outcome == Outcome::Lost;
            match rank.close().map_err(Error::from) {
                Err(Error::RoundOpen { .. }) if is_lost => {}
                closed => closed.unwrap_or_else(|e| panic!("{:?}: {e}", self.case)),
            }
        }
    }

    fn compare_dispatch(&self, round: usize, r: usize) {
        let (device, output) = (self.ranks[r].device(), &self.tensors[round][r].output);
        let received = Received::download(&**device, output, self.case.format).unwrap();
        let result = self.expected[round].oracle.verify_dispatch(r, &received);
        result.unwrap_or_else(|e| panic!("{e}: round {round} of {:?}", self.case));
    }

    fn compare_combine(&self, round: usize, r: usize) {
        let device = self.ranks[r].device();
        let rows = self.tensors[round][r].combined.rows();
        let mut given: Vec<bf16> = device.download_tensor(&rows).unwrap();
        let expected = &self.expected[round];
        let beyond = given.split_off(expected.combined[r].len().min(given.len()));
        let is_poison = |x: &bf16| x.to_le_bytes() == [POISON; 2];
        assert!(
            beyond.iter().all(is_poison),
            "rank {r}: combine wrote behind the tokens that are counted: round {round} of {:?}",
            self.case
        );
        let result = expected
            .oracle
            .verify_combined(r, &expected.combined[r], &given);
        result.unwrap_or_else(|e| panic!("{e}: round {round} of {:?}", self.case));
    }
}
