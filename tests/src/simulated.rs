//! Rounds on simulated ranks: seeded cases, how they run, and what the oracle says of them. Whatever is wrong
//! panics with the whole case.

mod case;

use std::time::Duration;

use ferry::simulator::{Options, SimulatorError};
use ferry::*;
use ferry_reference::{Problem, apply_expert_scale, bf16, first_difference, fp8};

use crate::formats::{self, Capacity, Images, Place};

pub use case::*;

/// A simulated rank has one.
pub const STREAM: Stream = Stream::DEFAULT;
/// What outputs hold before a round.
pub const POISON: u8 = 0xcd;
/// Half calls that a round is made of; a fused rank skips the second and the fourth.
pub const PHASES: usize = 4;

/// What a round must give, on every rank.
struct Expected {
    /// Rows without padding.
    dispatched: Vec<ferry_reference::Dispatched>,
    /// First row of each expert in the outputs, with padding.
    offsets: Vec<Vec<u32>>,
    expert_rows: Vec<Vec<bf16>>,
    combined: Vec<Vec<bf16>>,
}

impl Expected {
    fn of(case: &Case, problem: &Problem, round: usize) -> Self {
        let scale: Vec<f32> = (0..case.experts)
            .map(|expert| 1.0 + (expert % 7) as f32 / 8.0 + round as f32)
            .collect();
        let dispatched = ferry_reference::dispatch(problem);
        let expert_rows = apply_expert_scale(problem, &dispatched, &scale);
        let combined = ferry_reference::combine(problem, &expert_rows, case.how.reference());
        let alignment = case.format.sizes().row_alignment;
        let offsets = dispatched
            .iter()
            .map(|rank| fp8::padded_offsets(&rank.row_offsets, alignment))
            .collect();
        Self {
            dispatched,
            offsets,
            expert_rows,
            combined,
        }
    }
}

impl Expected {
    /// What a rank's outputs can hold.
    fn capacity(&self, rank: usize, case: &Case) -> Capacity {
        let blocks = formats::first_blocks(&self.offsets[rank]);
        let needed = Capacity {
            rows: self.rows(rank),
            blocks: blocks[blocks.len() - 1] + case.spare_rows,
        };
        needed.with_spare_rows(case.format, case.spare_rows)
    }

    /// Rows of a rank's outputs that are in use, padding included.
    fn rows(&self, rank: usize) -> usize {
        self.offsets[rank].last().copied().unwrap_or(0) as usize
    }

    /// The row of a rank's outputs in which its `row`-th received row stands.
    fn position(&self, rank: usize, row: usize) -> usize {
        let place = self.place(rank, row);
        place.start + place.row
    }

    /// The place of a rank's `row`-th received row.
    fn place(&self, rank: usize, row: usize) -> Place {
        let starts = &self.dispatched[rank].row_offsets;
        let expert = starts.partition_point(|&start| start as usize <= row) - 1;
        Place {
            start: self.offsets[rank][expert] as usize,
            block: formats::first_blocks(&self.offsets[rank])[expert],
            row: row - starts[expert] as usize,
        }
    }
}

/// Panics with the first place where two tensors differ.
fn assert_same<T: PartialEq + std::fmt::Debug>(
    given: &[T],
    wanted: &[T],
    tensor: &str,
    place: &dyn Fn() -> String,
) {
    assert_eq!(given.len(), wanted.len(), "{tensor}: {}", place());
    if let Some(at) = given.iter().zip(wanted).position(|(a, b)| a != b) {
        let (given, wanted) = (&given[at], &wanted[at]);
        panic!(
            "{tensor}: at {at} wanted {wanted:x?}, found {given:x?}: {}",
            place()
        );
    }
}

/// A rank's tensors of one round.
#[derive(Clone, Copy)]
pub struct Tensors {
    /// What dispatch takes.
    pub input: DispatchInput,
    /// What it writes.
    pub output: DispatchOutput,
    /// What combine takes.
    pub expert_rows: CombineInput,
    /// What it writes.
    pub combined: CombineOutput,
}

/// A copy of `values` on a rank's device.
pub fn upload<T: Copy, const B: usize>(
    rank: &ExpertParallel,
    values: &[T],
    bytes: fn(T) -> [u8; B],
) -> DevicePtr {
    let data: Vec<u8> = values.iter().flat_map(|&value| bytes(value)).collect();
    let at = rank.device().alloc(data.len().max(16) as u64).unwrap();
    rank.device().upload(at, &data).unwrap();
    at
}

fn poisoned(rank: &ExpertParallel, bytes: usize) -> DevicePtr {
    let bytes = bytes.max(16) as u64;
    let at = rank.device().alloc(bytes).unwrap();
    rank.device().fill(at, POISON, bytes).unwrap();
    at
}

/// `count` values from a rank's device.
pub fn download<T, const B: usize>(
    rank: &ExpertParallel,
    at: DevicePtr,
    count: usize,
    value: fn([u8; B]) -> T,
) -> Vec<T> {
    let mut data = vec![0; count * B];
    rank.device().download(at, &mut data).unwrap();
    let (chunks, _) = data.as_chunks::<B>();
    chunks.iter().map(|&chunk| value(chunk)).collect()
}

impl Tensors {
    /// `rows` arrive; the experts' answers are there beforehand, so that nobody has to wait.
    fn new(rank: &ExpertParallel, case: &Case, problem: &Problem, expected: &Expected) -> Self {
        let r = rank.rank().0 as usize;
        let input = &problem.inputs[r];
        let (tokens, top_k, hidden) = (input.tokens, case.top_k, case.hidden);
        let space = expected.capacity(r, case);
        let capacity = space.rows;
        let local = case.experts / case.ranks;
        let weights = upload(rank, &input.topk_weights, f32::to_le_bytes);
        let weights = Tensor::contiguous(weights, [tokens, top_k]);
        let mut answers = vec![bf16::NAN; capacity * hidden];
        for (row, answer) in expected.expert_rows[r].chunks(hidden).enumerate() {
            let start = expected.position(r, row) * hidden;
            answers[start..start + hidden].copy_from_slice(answer);
        }
        let answers = upload(rank, &answers, bf16::to_le_bytes);
        let summed = || Tensor::contiguous(poisoned(rank, tokens * hidden * 2), [tokens, hidden]);
        let combined = match case.how {
            Return::Reduced | Return::Exact => CombineTensor::Summed(summed()),
            Return::Apart => CombineTensor::Apart(Tensor::contiguous(
                poisoned(rank, tokens * top_k * hidden * 2),
                [tokens, top_k, hidden],
            )),
        };
        Self {
            input: DispatchInput {
                x: Tensor::contiguous(upload(rank, &input.x, bf16::to_le_bytes), [tokens, hidden]),
                topk_ids: Tensor::contiguous(
                    upload(rank, &input.topk_ids, i32::to_le_bytes),
                    [tokens, top_k],
                ),
                topk_weights: Some(weights),
                input_scale: matches!(case.format, TokenFormat::Nvfp4(_)).then(|| {
                    let at = upload(rank, &[formats::INPUT_SCALE], f32::to_le_bytes);
                    Tensor::contiguous(at, [1])
                }),
            },
            output: DispatchOutput {
                tokens: Tensor::contiguous(
                    poisoned(rank, capacity * formats::row_bytes(case.format, hidden)),
                    [capacity, hidden],
                ),
                scales: formats::scale_tensor(case.format, hidden, space, {
                    let bytes = formats::scales_bytes(case.format, hidden, space);
                    (poisoned(rank, bytes), poisoned(rank, 4 * local), local)
                }),
                row_scales: case
                    .format
                    .sizes()
                    .has_row_scale
                    .then(|| Tensor::contiguous(poisoned(rank, 2 * capacity), [capacity])),
                row_offsets: Tensor::contiguous(poisoned(rank, (local + 1) * 4), [local + 1]),
                expert_ids: Tensor::contiguous(poisoned(rank, local * 4), [local]),
                src_info: Tensor::contiguous(poisoned(rank, capacity * 8), [capacity, 2]),
            },
            expert_rows: CombineInput {
                expert_rows: Tensor::contiguous(answers, [capacity, hidden]),
                topk_weights: (case.how == Return::Exact).then_some(weights),
            },
            combined: CombineOutput { combined },
        }
    }
}

/// One half call of a round, or nothing where a fused rank has done both halves.
fn enqueue(rank: &mut ExpertParallel, phase: usize, split: bool, t: &Tensors) -> Result<(), Error> {
    match (phase, split) {
        (0, false) => drop(rank.dispatch(STREAM, &t.input, &t.output)?),
        (0, true) => drop(rank.dispatch_async(STREAM, &t.input)?),
        (2, false) => {
            let Unfinished::Combine(dispatched) = rank.unfinished() else {
                panic!("no combine is due")
            };
            dispatched.combine(STREAM, &t.expert_rows, &t.combined)?;
        }
        (_, false) => {}
        (_, true) => match rank.unfinished() {
            Unfinished::DispatchWait(sent) => drop(sent.wait(STREAM, &t.output)?),
            Unfinished::Combine(dispatched) => {
                drop(dispatched.combine_async(STREAM, &t.expert_rows, &t.combined)?);
            }
            Unfinished::CombineWait(returned) => returned.wait(STREAM)?,
            Unfinished::Nothing => panic!("no half call is due"),
        },
    }
    Ok(())
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
}

/// A run that is over; its outputs are still on the devices.
pub struct Run {
    /// What was run.
    pub case: Case,
    /// Its communicators.
    pub ranks: Vec<ExpertParallel>,
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
        change: impl Fn(&mut Vec<Vec<Tensors>>, &[ExpertParallel]),
    ) -> Self {
        let group = Group::simulated_with(Options {
            warps: case.warps,
            stall_one_in: case.stall_one_in,
            lost: case.lost,
            patience: Some(Duration::ZERO),
            ..Options::new(case.ranks as u32, case.seed)
        })
        .unwrap();
        let plan = Plan::new(&group, case.config()).unwrap();
        // Ranks need not have allocated alike before.
        for rank in group.local_ranks() {
            let device = group.device(rank).unwrap();
            device.alloc(1_000 * u64::from(rank.0)).unwrap();
        }
        let ranks = ExpertParallel::new(&group, &plan).unwrap();
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
            ranks,
            tensors,
            input_faults: Vec::new(),
            expected,
        };
        for round in 0..run.tensors.len() {
            for phase in 0..PHASES {
                run.enqueue(round, phase);
                if case.synchronize {
                    run.synchronize();
                }
            }
        }
        run.synchronize();
        run
    }

    fn enqueue(&mut self, round: usize, phase: usize) {
        for (r, rank) in self.ranks.iter_mut().enumerate() {
            if self.outcomes[r] != Outcome::Finished || self.case.absent == Some(r) {
                continue;
            }
            match enqueue(rank, phase, self.case.is_split(r), &self.tensors[round][r]) {
                Ok(()) => {}
                Err(Error::Poisoned(fault)) => self.outcomes[r] = Outcome::Fault(fault),
                Err(error) => panic!("{:?}: rank {r}: {error}", self.case),
            }
        }
    }

    fn synchronize(&mut self) {
        for (r, rank) in self.ranks.iter().enumerate() {
            if self.outcomes[r] != Outcome::Finished {
                continue;
            }
            match rank.synchronize(STREAM) {
                Ok(()) => {}
                Err(Error::Fault(fault)) if fault.kind.is_input() => self.input_faults.push(fault),
                Err(Error::Fault(fault) | Error::Poisoned(fault)) => {
                    self.outcomes[r] = Outcome::Fault(fault);
                }
                Err(Error::Simulator(SimulatorError::RankLost { .. })) => {
                    self.outcomes[r] = Outcome::Lost;
                }
                Err(error) => panic!("{:?}: rank {r}: {error}", self.case),
            }
        }
    }

    /// Rounds that a rank has dispatched, and rounds that it has combined, for certain.
    fn progress(&self, rank: usize) -> (usize, usize) {
        match &self.outcomes[rank] {
            Outcome::Finished if self.case.absent == Some(rank) => (0, 0),
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

    /// Frees everything.
    pub fn close(self) {
        let Self { ranks, case, .. } = self;
        for rank in ranks {
            rank.close().unwrap_or_else(|e| panic!("{case:?}: {e}"));
        }
    }

    fn compare_dispatch(&self, round: usize, r: usize) {
        let (case, rank) = (&self.case, &self.ranks[r]);
        let all = &self.expected[round];
        let expected = &all.dispatched[r];
        let output = &self.tensors[round][r].output;
        let place = || format!("round {round}, rank {r} of {case:?}");
        let count = expected.row_offsets.len();
        let offsets = download(rank, output.row_offsets.at, count, u32::from_le_bytes);
        assert_eq!(offsets, all.offsets[r], "row_offsets: {}", place());
        let count = expected.expert_ids.len();
        let ids = download(rank, output.expert_ids.at, count, i32::from_le_bytes);
        assert_eq!(ids, expected.expert_ids, "expert_ids: {}", place());

        let (format, hidden) = (case.format, case.hidden);
        let space = all.capacity(r, case);
        let capacity = output.src_info.dims[0];
        assert_eq!(capacity, space.rows, "{}", place());
        let mut wanted = Images::poisoned(format, hidden, space, POISON);
        wanted.clear_unused(format, hidden, space, &all.offsets[r]);
        let mut info = vec![[i32::from_le_bytes([POISON; 4]); 2]; capacity];
        for (row, token) in expected.tokens.chunks(hidden).enumerate() {
            let at = all.place(r, row);
            info[at.start + at.row] = expected.src_info[row];
            let encoded = formats::encode(format, token);
            wanted.put(format, hidden, space, (at, &encoded));
        }
        let info = info.as_flattened();
        let given = download(rank, output.src_info.at, info.len(), i32::from_le_bytes);
        assert_same(&given, info, "src_info", &place);
        let count = wanted.tokens.len();
        let given = download(rank, output.tokens.at, count, u8::from_le_bytes);
        assert_same(&given, &wanted.tokens, "tokens", &place);
        let count = wanted.row_scales.len();
        if let Some(scales) = output.row_scales {
            let given = download(rank, scales.at, count, u16::from_le_bytes);
            assert_same(&given, &wanted.row_scales, "row_scales", &place);
        }
        let at = match output.scales {
            None => return,
            Some(ScaleTensor::Transposed(scales) | ScaleTensor::RowMajor(scales)) => scales.at,
            Some(ScaleTensor::Tiled { scales, offsets }) => {
                let count = offsets.elements();
                let given = download(rank, offsets.at, count, u32::from_le_bytes);
                let wanted = formats::scales_offsets(&all.offsets[r]);
                assert_same(&given, &wanted, "scales_offsets", &place);
                scales.at
            }
        };
        let given = download(rank, at, wanted.scales.len(), u8::from_le_bytes);
        assert_same(&given, &wanted.scales, "scales", &place);
    }

    fn compare_combine(&self, round: usize, r: usize) {
        let (case, rank) = (&self.case, &self.ranks[r]);
        let expected = &self.expected[round].combined[r];
        let at = match self.tensors[round][r].combined.combined {
            CombineTensor::Summed(tensor) => tensor.at,
            CombineTensor::Apart(tensor) => tensor.at,
        };
        let combined = download(rank, at, expected.len(), bf16::from_le_bytes);
        if let Some(difference) = first_difference(expected, &combined, case.hidden) {
            panic!("combined: {difference} round {round}, rank {r} of {case:?}");
        }
    }
}
