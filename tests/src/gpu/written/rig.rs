//! A local rank's memory beside its session's, and the kernel that copies between them.

use std::sync::Arc;

use anyhow::{Result, ensure};
#[cfg(feature = "cuda")]
use ferry::cuda::{CudaDevice, CudaGraph};
use ferry::{Device, DevicePtr, Error, Group, Rank, Stream};
#[cfg(feature = "cuda")]
use ferry_probes::{TensorCopy, WriteArgs};
use ferry_reference::{Problem, apply_expert_scale, dispatch};

use crate::formats::INPUT_SCALE;
#[cfg(feature = "cuda")]
use crate::probes::{ProbePtx, Probes};
use crate::session::Session;
use crate::verify::POISON;

/// What rounds are made of.
pub(super) struct Sources<'a> {
    /// All with as many tokens on a rank.
    pub(super) problems: &'a [Problem],
    /// What each expert multiplies by.
    pub(super) scale: &'a [f32],
    /// Rounds whose outputs can be saved.
    pub(super) logs: usize,
    /// What the kernel that copies is of.
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
    /// The experts' answers.
    Experts,
    /// Brings them back.
    Combine,
    /// The last three, from a graph.
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

/// Device memory.
#[derive(Clone, Copy, Debug)]
struct Space {
    at: DevicePtr,
    bytes: usize,
}

impl Space {
    fn of(at: DevicePtr, bytes: usize) -> Self {
        Self { at, bytes }
    }
}

/// From where, to where. As many bytes as the target has.
struct Copy {
    from: DevicePtr,
    to: Space,
}

/// What a local rank's session lacks.
pub(super) struct Rig {
    device: Arc<dyn Device>,
    stream: Stream,
    #[cfg(feature = "cuda")]
    gpu: Option<(Arc<CudaDevice>, Probes)>,
    #[cfg(feature = "cuda")]
    graph: Option<CudaGraph>,
    /// What rounds read.
    inputs: [Space; 4],
    /// Where each problem's lie.
    problems: Vec<[DevicePtr; 4]>,
    /// Everything that rounds write.
    outputs: Vec<Space>,
    /// As much poison as the largest output has bytes.
    poison: DevicePtr,
    /// What experts answer to each problem.
    answers: Vec<Space>,
    /// Those to the present problem.
    staged: Space,
    expert_rows: DevicePtr,
    /// Places for the outputs of several rounds.
    logs: Vec<Vec<DevicePtr>>,
    /// What was allocated here.
    owned: Vec<DevicePtr>,
}

impl Rig {
    /// Those of all local ranks. Uploads the problems into the session's slots from 1 on.
    pub(super) fn set_up(
        group: &Group,
        session: &mut Session,
        sources: &Sources<'_>,
    ) -> Result<Vec<Self>> {
        // The first one says how many tokens there are.
        session.upload(0, &sources.problems[0])?;
        for (slot, problem) in (1..).zip(sources.problems) {
            session.upload(slot, problem)?;
        }
        let ranks = session.local_ranks().into_iter().enumerate();
        ranks
            .map(|(index, rank)| Self::of_rank(group, session, index, rank, sources))
            .collect()
    }

    fn of_rank(
        group: &Group,
        session: &mut Session,
        index: usize,
        rank: usize,
        sources: &Sources<'_>,
    ) -> Result<Self> {
        let number = Rank(rank as u32);
        let device = group.device(number)?;
        let (_, stream) = session.local(index);
        let outputs: Vec<Space> = session
            .written(index)
            .into_iter()
            .map(|(at, bytes)| Space::of(at, bytes))
            .collect();
        let (rows_at, rows_bytes) = session.expert_rows(index);
        let expert_rows = Space::of(rows_at, rows_bytes);
        let mut owned = Vec::new();
        let mut alloc = |bytes: usize| -> Result<DevicePtr, Error> {
            let at = device.alloc(bytes.max(16) as u64)?;
            owned.push(at);
            Ok(at)
        };
        let input_scale = alloc(4)?;
        device.upload(input_scale, &INPUT_SCALE.to_le_bytes())?;
        let largest = outputs.iter().map(|space| space.bytes).max().unwrap_or(0);
        let poison = alloc(largest)?;
        device.fill(poison, POISON, largest as u64)?;
        let mut answers = Vec::new();
        for problem in sources.problems {
            let rows = apply_expert_scale(problem, &dispatch(problem), sources.scale);
            let rows: &[u8] = bytemuck::cast_slice(&rows[rank]);
            let (bytes, room) = (rows.len(), expert_rows.bytes);
            ensure!(
                bytes <= room,
                "rank {rank}: {bytes} bytes of expert rows, room for {room}"
            );
            let at = alloc(bytes)?;
            device.upload(at, rows)?;
            answers.push(Space { at, bytes });
        }
        let staged = Space {
            at: alloc(expert_rows.bytes)?,
            bytes: expert_rows.bytes,
        };
        // So that every byte of it is defined.
        device.fill(staged.at, POISON, staged.bytes as u64)?;
        let log = |_| outputs.iter().map(|space| alloc(space.bytes)).collect();
        let logs = (0..sources.logs)
            .map(log)
            .collect::<Result<Vec<Vec<_>>, _>>()?;
        let of_slot = |slot| {
            let [x, ids, weights, _] = session.inputs(index, slot);
            [x.0, ids.0, weights.0, input_scale]
        };
        Ok(Self {
            #[cfg(feature = "cuda")]
            gpu: (group.cuda(number))
                .map(|gpu| Probes::new(&gpu, sources.probes).map(|probes| (gpu, probes)))
                .transpose()?,
            #[cfg(feature = "cuda")]
            graph: None,
            inputs: session
                .inputs(index, 0)
                .map(|(at, bytes)| Space::of(at, bytes)),
            problems: (1..=sources.problems.len()).map(of_slot).collect(),
            device,
            stream,
            outputs,
            poison,
            answers,
            staged,
            expert_rows: expert_rows.at,
            logs,
            owned,
        })
    }

    /// Captures a round.
    #[cfg(feature = "cuda")]
    pub(super) fn capture(&mut self, session: &mut Session, index: usize) -> Result<()> {
        let Some((gpu, _)) = &self.gpu else {
            return Ok(());
        };
        let gpu = gpu.clone();
        let graph = gpu.capture(self.stream, || {
            Step::ROUND
                .into_iter()
                .try_for_each(|step| self.perform(session, index, step))
        })?;
        self.graph = Some(graph);
        Ok(())
    }

    /// There is nothing to capture with.
    #[cfg(not(feature = "cuda"))]
    pub(super) fn capture(&mut self, _: &mut Session, _: usize) -> Result<()> {
        Ok(())
    }

    /// Enqueues a step. `session` is the one that this was set up with, and `index` its local rank's.
    pub(super) fn perform(
        &mut self,
        session: &mut Session,
        index: usize,
        step: Step,
    ) -> Result<(), Error> {
        match step {
            Step::Dispatch => session.launch_half(index, 0, true),
            Step::Combine => session.launch_half(index, 2, true),
            Step::Replay => self.replay(),
            _ => self.write(step),
        }
    }

    #[cfg(feature = "cuda")]
    fn replay(&mut self) -> Result<(), Error> {
        match &mut self.graph {
            Some(graph) => graph.launch(self.stream),
            None => Ok(()),
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn replay(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// What a step copies.
    fn copies(&self, step: Step) -> Vec<Copy> {
        let copy = |(from, to): (&DevicePtr, &Space)| Copy {
            from: *from,
            to: *to,
        };
        match step {
            Step::Poison => {
                let spoiled = self.outputs.iter().chain(&self.inputs[3..]);
                spoiled.map(|to| copy((&self.poison, to))).collect()
            }
            Step::Stage(problem) => {
                let Space { at, bytes } = self.answers[problem];
                let to = Space {
                    bytes,
                    ..self.staged
                };
                vec![Copy { from: at, to }]
            }
            Step::Inputs(problem) => {
                let from = self.problems[problem].iter();
                from.zip(&self.inputs).map(copy).collect()
            }
            Step::Experts => {
                let to = Space {
                    at: self.expert_rows,
                    bytes: self.staged.bytes,
                };
                vec![copy((&self.staged.at, &to))]
            }
            Step::Save(log) => {
                let to = self.logs[log].iter().zip(&self.outputs);
                to.map(|(&at, from)| Copy {
                    from: from.at,
                    to: Space { at, ..*from },
                })
                .collect()
            }
            Step::Restore(log) => self.logs[log].iter().zip(&self.outputs).map(copy).collect(),
            Step::Dispatch | Step::Combine | Step::Replay => Vec::new(),
        }
    }

    /// Enqueues the copies of a step, four with a kernel; without a GPU, makes them.
    fn write(&self, step: Step) -> Result<(), Error> {
        let copies = self.copies(step);
        #[cfg(feature = "cuda")]
        if let Some((_, probes)) = &self.gpu {
            let tensor_copy = |copy: &Copy| TensorCopy {
                from: number(copy.from),
                to: number(copy.to.at),
                words: copy.to.bytes as u64 / 4,
            };
            for four in copies.chunks(WriteArgs::default().copies.len()) {
                let mut args = WriteArgs::default();
                for (place, copy) in args.copies.iter_mut().zip(four) {
                    *place = tensor_copy(copy);
                }
                // SAFETY: `copies` names memory of the session and of this value with at least that
                // many bytes. All of it lives until `free`, which the stream has passed by then;
                // only the stream's kernels use it.
                unsafe { probes.write(self.stream, &args) }?;
            }
            return Ok(());
        }
        self.device.synchronize(self.stream)?;
        for Copy { from, to } in copies {
            let mut bytes = vec![0; to.bytes];
            self.device.download(from, &mut bytes)?;
            self.device.upload(to.at, &bytes)?;
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

/// An address as the kernel takes it.
#[cfg(feature = "cuda")]
const fn number(at: DevicePtr) -> u64 {
    at.address()
}
