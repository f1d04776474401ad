//! A local rank's memory beside its session's, and the kernel that copies between them.

use std::sync::Arc;

use anyhow::Result;
#[cfg(feature = "cuda")]
use ferry::cuda::CudaDevice;
use ferry::{Device, DevicePtr, Error, Group, Rank, Stream};
#[cfg(feature = "cuda")]
use ferry_probes::{TensorCopy, WriteArgs};
use ferry_reference::Problem;

#[cfg(feature = "cuda")]
use crate::probes::{ProbePtx, Probes};
use ferry_rig::verify::{Oracle, POISON};
use ferry_rig::{Session, Tensors, Turn};

/// Contents of rounds.
pub(super) struct Sources<'a> {
    /// Problems, all with as many tokens on a rank, in the session's slots from 1 on.
    pub(super) problems: &'a [Problem],
    /// Oracle of each problem.
    pub(super) oracles: &'a [Oracle],
    /// Factor of each expert.
    pub(super) scale: &'a [f32],
    /// Rounds whose outputs can be saved.
    pub(super) logs: usize,
    /// PTX of the kernel that copies.
    #[cfg(feature = "cuda")]
    pub(super) probes: &'a ProbePtx,
}

/// Something that is enqueued on a rank's stream.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// Fills all outputs, and the input scale.
    Poison,
    /// Writes what the experts will answer to a problem.
    Stage(usize),
    /// Writes a problem's inputs, with one kernel.
    Inputs(usize),
    /// Dispatches what was written.
    Dispatch,
    /// Writes the experts' answers.
    Experts,
    /// Brings them back.
    Combine,
    /// Makes the last three, from a graph.
    Replay,
    /// Copies all outputs to a log.
    Save(usize),
    /// Copies them back.
    Restore(usize),
}

impl Step {
    /// A round.
    pub(super) const ROUND: [Self; 3] = [Self::Dispatch, Self::Experts, Self::Combine];
}

/// Device memory, and how many bytes of it.
type Space = (DevicePtr, u64);

/// Memory that a local rank's session lacks.
pub(super) struct Copies {
    device: Arc<dyn Device>,
    stream: Stream,
    #[cfg(feature = "cuda")]
    gpu: Option<(Arc<CudaDevice>, Probes)>,
    /// Inputs of rounds, the input scale last if there is one.
    inputs: Vec<Space>,
    /// Inputs of each problem.
    problems: Vec<Vec<Space>>,
    /// Everything that rounds write.
    outputs: Vec<Space>,
    /// Poison, as many bytes as the largest output has bytes.
    poison: DevicePtr,
    /// Answers of the experts to each problem.
    answers: Vec<DevicePtr>,
    /// Answers to the present problem.
    staged: DevicePtr,
    expert_rows: Space,
    /// Places for the outputs of several rounds.
    logs: Vec<Vec<DevicePtr>>,
    /// Allocations of this value.
    owned: Vec<DevicePtr>,
}

fn inputs(tensors: &Tensors) -> Vec<Space> {
    let input = &tensors.input;
    let scale = input.input_scale.map(|scale| (scale.at, scale.bytes()));
    let weights = input.topk_weights.map(|all| (all.at, all.bytes()));
    let ids = (input.topk_ids.at, input.topk_ids.bytes());
    let x = (input.x.at, input.x.bytes());
    [x, ids].into_iter().chain(weights).chain(scale).collect()
}

impl Copies {
    /// Allocates those of a local rank, whose session has the problems.
    pub(super) fn new(
        group: &Group,
        session: &mut Session,
        index: usize,
        sources: &Sources<'_>,
    ) -> Result<Self> {
        let number = session.local_ranks()[index];
        let rank = Rank(number as u32);
        let device = group.device(rank)?;
        let written = session.written(index).into_iter();
        let outputs: Vec<Space> = written.map(|at| (at, at.bytes())).collect();
        let rows = session.tensors(index, Turn::FIRST).expert_rows.expert_rows;
        let mut owned = Vec::new();
        let mut alloc = |bytes: u64| -> Result<DevicePtr, Error> {
            let at = device.alloc(bytes)?;
            owned.push(at);
            Ok(at)
        };
        let largest = outputs.iter().map(|&(_, bytes)| bytes).max().unwrap_or(16);
        let poison = alloc(largest)?;
        device.fill(poison, POISON, largest)?;
        let mut answers = Vec::new();
        for (problem, oracle) in sources.problems.iter().zip(sources.oracles) {
            let placement = oracle.placement(number);
            let answer = placement.expert_rows(problem, sources.scale, number, rows.dims[0]);
            let at = alloc(rows.bytes())?;
            device.upload(at, bytemuck::cast_slice(&answer))?;
            answers.push(at);
        }
        let staged = alloc(rows.bytes())?;
        let mut log = || outputs.iter().map(|&(_, bytes)| alloc(bytes)).collect();
        let logs = (0..sources.logs).map(|_| log());
        let logs = logs.collect::<Result<_, Error>>()?;
        let of_slot = |slot| {
            let turn = Turn {
                slot,
                ..Turn::FIRST
            };
            inputs(&session.tensors(index, turn))
        };
        Ok(Self {
            #[cfg(feature = "cuda")]
            gpu: (group.cuda(rank))
                .map(|gpu| Probes::new(&gpu, sources.probes).map(|probes| (gpu, probes)))
                .transpose()?,
            inputs: of_slot(0),
            problems: (1..=sources.problems.len()).map(of_slot).collect(),
            stream: session.local(index).1,
            outputs,
            poison,
            answers,
            staged,
            expert_rows: (rows.at, rows.bytes()),
            logs,
            owned,
            device,
        })
    }

    /// Copies of a step: from where, to where.
    fn of(&self, step: Step) -> Vec<(DevicePtr, Space)> {
        let logged = |log: usize| self.logs[log].iter().zip(&self.outputs);
        let (answers, bytes) = self.expert_rows;
        match step {
            Step::Poison => {
                let spoiled = self.outputs.iter().chain(&self.inputs[3..]);
                spoiled.map(|&to| (self.poison, to)).collect()
            }
            Step::Stage(problem) => vec![(self.answers[problem], (self.staged, bytes))],
            Step::Inputs(problem) => {
                let pairs = self.problems[problem].iter().zip(&self.inputs);
                pairs.map(|(from, &to)| (from.0, to)).collect()
            }
            Step::Experts => vec![(self.staged, (answers, bytes))],
            Step::Save(log) => logged(log)
                .map(|(&to, &(from, bytes))| (from, (to, bytes)))
                .collect(),
            Step::Restore(log) => logged(log).map(|(&from, &to)| (from, to)).collect(),
            Step::Dispatch | Step::Combine | Step::Replay => Vec::new(),
        }
    }

    /// Enqueues the copies of a step, four with a kernel; without a GPU, makes them.
    pub(super) fn write(&self, step: Step) -> Result<(), Error> {
        let copies = self.of(step);
        #[cfg(feature = "cuda")]
        if let Some((_, probes)) = &self.gpu {
            for four in copies.chunks(WriteArgs::default().copies.len()) {
                let mut args = WriteArgs::default();
                for (place, (from, (to, bytes))) in args.copies.iter_mut().zip(four) {
                    *place = TensorCopy {
                        from: from.address(),
                        to: to.address(),
                        words: bytes / 4,
                    };
                }
                // SAFETY: `copies` names memory of the session and of this value with at least that
                // many bytes. All of it lives until `free`, which the stream has passed by then;
                // only the stream's kernels use it.
                unsafe { probes.write(self.stream, &args) }?;
            }
            return Ok(());
        }
        self.device.synchronize(self.stream)?;
        for (from, (to, bytes)) in copies {
            let mut copied = vec![0; bytes as usize];
            self.device.download(from, &mut copied)?;
            self.device.upload(to, &copied)?;
        }
        Ok(())
    }

    /// Frees what was allocated here. The stream has passed everything.
    pub(super) fn free(self) -> Result<()> {
        let mut owned = self.owned.iter();
        // SAFETY: allocated here, and the stream has passed everything.
        Ok(owned.try_for_each(|&at| unsafe { self.device.free(at) })?)
    }
}
