//! Runs: all rounds of a case on a group, and what the oracle says of them. Whatever is wrong panics with the
//! whole case.

mod counts;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ferry::ReceiveLayout;
use ferry::layout::Kernel;
use ferry::simulator::SimulatorError;
use ferry::*;
use ferry_reference::workload::Routing;
use ferry_reference::{Problem, RankInput};

use super::case::Case;
use super::expected::Expected;
use super::inputs::Return;
use super::seeds::drawn;
use super::tensors::{HALVES, Memory, Room, Tensors};
use crate::formats::INPUT_SCALE;
use crate::verify::{Contents, POISON, RowLayout, Viewed, read_view};

/// End of a run for a rank.
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
    /// The case.
    pub case: Case,
    /// Its communicators.
    pub ranks: Vec<Communicator>,
    /// One for each rank: ranks that share a GPU cannot have one together.
    streams: Vec<Stream>,
    /// `[round][rank]`.
    pub tensors: Vec<Vec<Tensors>>,
    /// End of each rank.
    pub outcomes: Vec<Outcome>,
    /// Input faults, as they were found, with the rank whose check returned them.
    pub input_faults: Vec<Fault>,
    /// Oracle's outcome of each round.
    pub expected: Vec<Expected>,
    /// Inputs of each round.
    problems: Vec<Problem>,
    /// Views that the rounds have, `[round][rank]`.
    views: Vec<Vec<Option<Seen>>>,
}

/// A view, and its rows if they were read.
struct Seen {
    view: View,
    rows: Option<Viewed>,
}

impl Run {
    /// Runs a case on simulated ranks with the inputs of its workload.
    pub fn of(case: &Case) -> Self {
        Self::with(case, &case.problems(), |_, _| {})
    }

    /// Runs a case on simulated ranks whose problems are `problems`, with tensors changed by `change` after
    /// they were made: bad inputs, outputs that are too small.
    pub fn with(
        case: &Case,
        problems: &[Problem],
        change: impl Fn(&mut Vec<Vec<Tensors>>, &[Communicator]),
    ) -> Self {
        let group = Group::simulated_with(case.machine()).unwrap();
        Self::on(&group, case.config(), case, problems, change)
    }

    /// Runs a case as [`with`](Self::with) does, on the ranks of a group and with a configuration of its own.
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
        let locals: Vec<usize> = ranks.iter().map(number).collect();
        let given = problems.iter().enumerate();
        let rounds = given.map(|(round, problem)| {
            let expected = Expected::of(case, problem, round, &locals);
            let tensors = ranks.iter().map(|rank| {
                let input = &problem.inputs[number(rank)];
                tensors_of(rank, case, input, &expected, round).unwrap()
            });
            (tensors.collect(), expected)
        });
        let (mut tensors, expected): (Vec<Vec<_>>, Vec<_>) = rounds.unzip();
        change(&mut tensors, &ranks);
        let streams = ranks.iter().map(|rank| rank.device().stream().unwrap());
        let mut run = Self {
            case: case.clone(),
            outcomes: vec![Outcome::Finished; ranks.len()],
            streams: streams.collect(),
            ranks,
            tensors,
            input_faults: Vec::new(),
            expected,
            problems: problems.to_vec(),
            views: Vec::new(),
        };
        for round in 0..run.tensors.len() {
            for half in 0..HALVES {
                run.enqueue(round, half);
                if half == 0 && case.counts {
                    run.look_at_counts(round);
                }
                if half == 1 && case.receive == ReceiveLayout::View {
                    run.look_at_views(round);
                }
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
            if self.case.limits {
                rank.limit_sms(self.case.limit_of(r, round, half)).unwrap();
            }
            let deadline = self.case.deadline_of(r, round, half);
            rank.set_deadline(deadline).unwrap();
            let enqueued = match (self.case.gives_up(round), half) {
                (true, 2) => rank.give_up(stream),
                (true, 3..) => Ok(()),
                _ => self.tensors[round][r].enqueue(rank, stream, half, split),
            };
            match enqueued {
                Ok(()) => {}
                Err(Error::Poisoned(fault)) => self.outcomes[r] = Outcome::Fault(fault),
                Err(error) => panic!("{:?}: rank {r}: {error}", self.case),
            }
        }
    }

    /// Notes where the views of a round are. If the case reads views, waits for all ranks and does so.
    fn look_at_views(&mut self, round: usize) {
        if self.case.reads_views {
            self.synchronize(round + 1, round);
        }
        let look = |r: usize| {
            if self.outcomes[r] != Outcome::Finished || self.case.absent == Some(r) {
                return None;
            }
            let (rank, output) = (&self.ranks[r], &self.tensors[round][r].output);
            let layout = RowLayout::of(rank.plan().config(), output.src_info.dims[0]);
            // SAFETY: the simulator checks every access.
            let view = unsafe { rank.view() }.unwrap();
            let device = &**rank.device();
            let rows = (self.case.reads_views).then(|| read_view(device, &view, &layout).unwrap());
            Some(Seen { view, rows })
        };
        let seen = (0..self.ranks.len()).map(look).collect();
        self.views.push(seen);
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
                    .extend(told.fault().map(|InputFault(fault)| fault)),
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
                let round = self.case.round_of(fault.epoch);
                let dispatched = match fault.kernel {
                    Kernel::Dispatch
                    | Kernel::DispatchAsync
                    | Kernel::DispatchCounts
                    | Kernel::DispatchWait => round,
                    _ => round + 1,
                };
                (dispatched, round)
            }
        }
    }

    /// Compares all that is certain to be there with the oracle.
    pub fn compare(&self) {
        for r in 0..self.ranks.len() {
            let (dispatched, combined) = self.progress(r);
            for round in 0..dispatched {
                self.compare_dispatch(round, r);
                self.compare_kept_ids(round, r);
            }
            for round in (0..combined).filter(|&round| !self.case.gives_up(round)) {
                self.compare_combine(round, r);
            }
            if combined == self.tensors.len() {
                self.compare_ended_view(r);
            }
        }
    }

    /// Compares as [`compare`](Self::compare) does, if nothing went wrong but that outputs were made too
    /// small, or experts listed twice; and closes.
    pub fn expect_success(self) {
        for outcome in &self.outcomes {
            assert_eq!(*outcome, Outcome::Finished, "{:?}", self.case);
        }
        let is_meant = |fault: &Fault| match fault.kind {
            FaultKind::OutputTooSmall => self.case.short || self.is_of_a_block(fault),
            // Only reported, and only by debug checks.
            FaultKind::DuplicateExpert => self.case.routing == Routing::Duplicates,
            _ => false,
        };
        let faults = self.input_faults.iter().filter(|fault| !is_meant(fault));
        let faults: Vec<_> = faults.collect();
        assert!(faults.is_empty(), "{faults:?}: {:?}", self.case);
        self.compare();
        self.close();
    }

    /// Whether a fault is that of an expert whose block does not hold all rows of a round.
    fn is_of_a_block(&self, fault: &Fault) -> bool {
        let round = &self.expected[self.case.round_of(fault.epoch)];
        let rank = fault.rank.0 as usize;
        let found = (fault.region, fault.saw as usize, fault.wanted as usize);
        let expert = round.above_blocks[rank].map(|(expert, _)| expert as u64);
        round.lacks(rank) == Some(found) && expert == Some(fault.index)
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

    /// View of a rank's dispatch, if it has one.
    pub fn view(&self, round: usize, r: usize) -> Option<View> {
        let seen = self.views.get(round)?[r].as_ref()?;
        Some(seen.view)
    }

    /// Contents of the outputs of a rank's dispatch, with the view of it that was read.
    pub fn contents(&self, round: usize, r: usize) -> Contents {
        let (rank, output) = (&self.ranks[r], &self.tensors[round][r].output);
        let seen = self.views.get(round).and_then(|seen| seen[r].as_ref());
        let viewed = seen.and_then(|seen| seen.rows.as_ref());
        Contents::download(&**rank.device(), output, rank.plan().config(), viewed).unwrap()
    }

    fn compare_dispatch(&self, round: usize, r: usize) {
        let (oracle, number) = self.expected[round].oracle(number(&self.ranks[r]));
        let result = match &self.contents(round, r) {
            Contents::ByExpert(received) => oracle.verify_dispatch(number, received),
            Contents::Rows(rows) => oracle.verify_rows(number, rows),
        };
        result.unwrap_or_else(|e| panic!("{e}: round {round} of {:?}", self.case));
    }

    fn compare_kept_ids(&self, round: usize, r: usize) {
        let (rank, tensors) = (&self.ranks[r], &self.tensors[round][r]);
        let tokens = self.expected[round].tokens(number(rank));
        let kept = tensors.compare_kept_ids(&**rank.device(), tokens, self.case.experts);
        kept.unwrap_or_else(|e| panic!("{e}: round {round} of {:?}", self.case));
    }

    fn compare_combine(&self, round: usize, r: usize) {
        let (rank, tensors) = (&self.ranks[r], &self.tensors[round][r]);
        let found = tensors.result(&**rank.device()).unwrap();
        let wanted = &self.expected[round].wanted[number(rank)];
        let about = || format!("rank {}, round {round} of {:?}", number(rank), self.case);
        let mut pairs = wanted.iter().zip(&found);
        if let Some(at) = pairs.position(|(wanted, found)| wanted != found) {
            let width = tensors.combined.rows().data_type.bits() as usize / 8;
            let (row, column) = (at / width / self.case.hidden, at / width % self.case.hidden);
            let at = at / width * width..(at / width + 1) * width;
            let (found, wanted) = (&found[at.clone()], &wanted[at]);
            panic!(
                "combined, row {row}, column {column}: {found:x?} instead of {wanted:x?}: {}",
                about()
            );
        }
        assert!(found.len() > wanted.len(), "{}", about());
        assert!(
            found[wanted.len()..].iter().all(|&byte| byte == POISON),
            "combine wrote behind the tokens: {}",
            about()
        );
        if let Some(rows) = &self.expected[round].rows {
            let found = tensors.returned_weights(&**rank.device()).unwrap();
            let wanted = rows.combined_weights(number(rank));
            let (own, others) = found.split_at(wanted.len().min(found.len()));
            assert_eq!(own, wanted, "weights: {}", about());
            let poison = u32::from_ne_bytes([POISON; 4]);
            let is_poison = others.iter().all(|&word| word == poison);
            assert!(is_poison, "combine wrote behind the weights: {}", about());
        }
    }

    /// Checks, if the case has debug checks, that a view that has ended is all ones in its rows' payload and
    /// scales.
    fn compare_ended_view(&self, r: usize) {
        let round = self.tensors.len() - 1;
        let seen = self.views.get(round).and_then(|seen| seen[r].as_ref());
        let Some(seen) = seen.filter(|_| self.case.debug_checks) else {
            return;
        };
        let rank = &self.ranks[r];
        let Contents::Rows(rows) = self.contents(round, r) else {
            return;
        };
        let ended = read_view(&**rank.device(), &seen.view, &rows.layout).unwrap();
        let parts = [
            (&ended.tokens, rows.layout.row_bytes()),
            (&ended.scales, rows.layout.scale_bytes()),
            (&ended.row_scales, rows.layout.row_scale_bytes()),
        ];
        for (row, source, token) in rows.present() {
            for (part, width) in parts.into_iter().filter(|(part, _)| !part.is_empty()) {
                let is_over = part[row * width..(row + 1) * width]
                    .iter()
                    .all(|&byte| byte == 0xff);
                assert!(
                    is_over,
                    "token {token} of rank {source} is still there after its round: rank {}, {:?}",
                    number(rank),
                    self.case
                );
            }
        }
    }
}

/// A rank's number.
fn number(rank: &Communicator) -> usize {
    rank.rank().0 as usize
}

/// The tensors of a rank's round. The experts' answers are there beforehand, so that nobody has to wait.
fn tensors_of(
    rank: &Communicator,
    case: &Case,
    input: &RankInput,
    expected: &Expected,
    round: usize,
) -> Result<Tensors, Error> {
    let (device, number) = (&**rank.device(), number(rank));
    let rows = case.rows(input.tokens);
    let room = Room {
        rows,
        capacity: expected.capacities[number],
        how: case.how,
        element: (case.finish).map_or(DataType::Bf16, |options| options.element.into()),
        counted: case.counted.is_some(),
        input_scale: Some(INPUT_SCALE),
        given: case.given,
        strides: case.strides,
        wide_ids: case.has_wide_ids(number),
        keeps_ids: case.keeps_ids(number),
        lead: if case.skip_a2a { lead(case.seed) } else { 0 },
    };
    let mut tensors = Tensors::new(rank, room, &mut Memory::default(), None)?;
    tensors.put(device, input, input.tokens, rows)?;
    tensors.answer(device, &expected.answers(number))?;
    if case.skip_a2a && case.how != Return::Reduced {
        // In exact mode combine's count.
        tensors.input.topk_weights = None;
    }
    if case.is_unweighted(number) {
        tensors.input.topk_weights = None;
    }
    if let Some(rows) = &expected.rows {
        let initial = rows.initial[number].each_ref();
        tensors.expert_rows.initial = initial.map(|given| {
            given.as_ref().map(|given| {
                let dims = [given.len() / case.hidden, case.hidden];
                device.upload_tensor(dims, given).unwrap()
            })
        });
        if case.combine_weights {
            let dims = [expected.capacities[number].rows, case.top_k];
            let weights = device.upload_tensor(dims, &rows.weights[number])?;
            tensors.expert_rows.received_weights = Some(weights);
        }
    }
    if let Some(options) = &case.finish {
        let subject = expected.subject(round, number);
        options.give(&subject, rank, &mut tensors.expert_rows);
    }
    Ok(tensors)
}

/// Elements before the expert ids, from 0 to 3.
const fn lead(seed: u64) -> usize {
    ((seed % 3).saturating_sub(1) * (1 + seed / 3 % 3)) as usize
}

/// Runs one case on simulated ranks for each seed that is [drawn], and compares it.
pub fn run_all(seeds: Range<u64>, case: impl Fn(u64) -> Case) {
    for seed in drawn(seeds) {
        Run::of(&case(seed)).expect_success();
    }
}

/// Makes an error of a panic: of its text.
pub fn caught(run: impl FnOnce()) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).into()));
        text.unwrap_or_else(|| String::from("a panic without a text"))
    })
}
