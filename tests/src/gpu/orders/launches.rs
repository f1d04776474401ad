//! Kernels and streams beside those of a round: too many, in one graph, or between dispatch and combine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use ferry::cuda::{CudaDevice, Grid};
use ferry::{Device, DevicePtr, Stream};
use ferry_probes::{ProbeArgs, TensorCopy, WriteArgs};

use super::super::Suite;
use super::super::ending::{Ending, by_number};
use super::super::expected::{STREAMS_BEYOND_QUEUES, STREAMS_WITH_QUEUES};
use super::driver::Graph;
use super::{DEADLINE, Kernels, Scene, Told, check};
use crate::probes::{Gate, Probe, ProbePtx, Probes};
use crate::sharing;
use ferry_rig::Turn;

/// Numbers of streams in which kernels wait, beside those of the ranks.
const STREAMS: [usize; 6] = [4, 16, 24, 28, 32, 48];
/// Numbers of launches for one rank before those for the others, two a round.
const LAUNCHES: [usize; 3] = [100, 500, 1000];
/// Rounds with a kernel that lets combine begin early.
const EARLY_ROUNDS: usize = 20;

pub(super) fn run(suite: &mut Suite<'_>) -> Result<()> {
    first_round(suite)?;
    let probes = suite.probes.clone();
    check(suite, "kernels wait in so many other streams", |scene| {
        streams_at_work(scene, &probes)
    })?;
    for launches in LAUNCHES {
        let name = format!("{launches} launches for one rank before the others'");
        check(suite, &name, |scene| many_launches(scene, launches))?;
    }
    check(
        suite,
        "one graph has the rounds of all ranks as branches",
        one_graph,
    )?;
    let probes = suite.probes.clone();
    check(
        suite,
        "a kernel with an early trigger between dispatch and combine",
        |scene| early_trigger(scene, &probes),
    )
}

/// The first round with kernels that were compiled for its shape: each rank's first launches of them.
fn first_round(suite: &mut Suite<'_>) -> Result<()> {
    let name = "kernels of a shape are launched for the first time";
    suite.check(&format!("order on one GPU: {name}"), |suite| {
        let mut scene = Scene::new(suite, Kernels::New)?;
        let ending = scene.others_behind_the_first(|_| Ok(()));
        scene.close();
        Told::from(ending?).outcome(name)
    })
}

/// Kernels that wait for a gate, each in a stream of its own with one behind it. Dropped, it lets them go and
/// waits for them.
struct Waiting {
    device: Arc<CudaDevice>,
    streams: Vec<Stream>,
    gate: Gate,
    probes: Probes,
    args: ProbeArgs,
}

impl Waiting {
    fn new(scene: &Scene, ptx: &ProbePtx) -> Result<Self> {
        let device = &scene.device;
        let most = STREAMS.into_iter().max().unwrap_or(0);
        let streams = (0..most).map(|_| device.stream());
        let streams = streams.collect::<Result<_, _>>()?;
        let gate = Gate::new(device)?;
        let memory = device.alloc(ProbeArgs::WORDS_BYTES)?;
        let peers = device.alloc(8)?;
        device.fill(memory, 0, ProbeArgs::WORDS_BYTES)?;
        device.upload(peers, &memory.address().to_le_bytes())?;
        let args = ProbeArgs {
            peers: peers.address(),
            source: 0,
            offset: ProbeArgs::WORDS_BYTES,
            start_flag: gate.address(),
            start_value: 0,
            deadline_ns: (4 * DEADLINE).as_nanos() as u64,
            row_bytes: 16,
            rows: 0,
            parts: 1,
            rank: 0,
            // Nobody but the gate is waited for.
            ranks: 0,
            first_peer: 0,
            peer_count: 0,
            repeats: 0,
        };
        let probes = Probes::new(device, ptx)?;
        Ok(Self {
            device: device.clone(),
            streams,
            gate,
            probes,
            args,
        })
    }

    /// Enqueues in so many streams, until the gate is opened at `value`.
    fn enqueue(&self, streams: usize, value: u64) -> Result<()> {
        let args = ProbeArgs {
            start_value: value,
            ..self.args
        };
        for &stream in &self.streams[..streams] {
            for probe in [Probe::Barrier, Probe::Empty] {
                // SAFETY: the memory is never freed, and holds the words of a rank; with no ranks nothing
                // else is touched. The probes are kept until `drop` has waited for the streams.
                unsafe { self.probes.launch(stream, probe, Grid::new(1, 32), &args) }?;
            }
        }
        Ok(())
    }

    /// Opens the gate, and waits until nothing waits.
    fn release(&self, value: u64) -> Result<()> {
        self.gate.open(value);
        let mut streams = self.streams.iter();
        Ok(streams.try_for_each(|&stream| self.device.synchronize(stream))?)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // It fails only where the device is broken, and then nothing runs.
        let _ = self.release(u64::MAX);
    }
}

fn streams_at_work(scene: &mut Scene, ptx: &ProbePtx) -> Result<Told> {
    let waiting = Waiting::new(scene, ptx)?;
    let mut endings = Vec::new();
    for (value, number) in (1..).zip(STREAMS) {
        scene.session.poison()?;
        waiting.enqueue(number, value)?;
        let start = Instant::now();
        let launched = scene.launch(|_| Ok(()))?;
        scene.wait()?;
        let took = start.elapsed();
        // What else asks the device something would wait behind them, too.
        waiting.release(value)?;
        let ending = scene.ending(took, launched)?;
        let is_over = matches!(ending, Ending::Deadline(_));
        endings.push((number, ending));
        if is_over {
            // The communicators gave up; more streams make it no better.
            break;
        }
    }
    let text = by_number(&endings);
    let most = sharing::queues().saturating_sub(scene.ranks());
    let case = |number| {
        if number <= most {
            STREAMS_WITH_QUEUES
        } else {
            STREAMS_BEYOND_QUEUES
        }
    };
    let endings = endings.into_iter();
    let endings = endings.map(|(number, ending)| (Some(case(number)), ending));
    Ok(Told {
        text,
        endings: endings.collect(),
    })
}

fn many_launches(scene: &mut Scene, launches: usize) -> Result<Told> {
    scene.session.poison()?;
    let start = Instant::now();
    let ranks = scene.ranks();
    let mut first_took = Duration::ZERO;
    let mut launched = Ok(());
    for index in 0..ranks {
        for _ in 0..launches / 2 {
            launched = launched.and_then(|()| scene.session.launch(index, Turn::RETURNED));
        }
        if index == 0 {
            first_took = start.elapsed();
        }
    }
    scene.wait()?;
    let ending = scene.ending(start.elapsed(), launched)?;
    Ok(Told {
        text: format!("{ending} (the first rank's were enqueued in {first_took:?})"),
        endings: vec![(None, ending)],
    })
}

fn one_graph(scene: &mut Scene) -> Result<Told> {
    scene.session.poison()?;
    let ranks = scene.ranks();
    let streams: Vec<Stream> = (0..ranks)
        .map(|index| scene.session.local(index).1)
        .collect();
    let device = scene.device.clone();
    let _current = device.enter()?;
    let graph = Graph::capture(&streams, || {
        for index in 0..ranks {
            scene.session.launch(index, Turn::RETURNED)?;
        }
        Ok(())
    })?;
    let start = Instant::now();
    graph.launch(streams[0])?;
    scene.wait()?;
    let took = start.elapsed();
    drop(graph);
    for index in 0..ranks {
        // SAFETY: the graph has ended, and is gone.
        unsafe { scene.session.local(index).0.assume_no_foreign_graphs() };
    }
    Ok(scene.ending(took, Ok(()))?.into())
}

/// Memory whose copy lasts longer than a round.
struct Copied {
    from: DevicePtr,
    to: DevicePtr,
}

const COPIED_BYTES: u64 = 64 << 20;

/// Each rank's own kernel copies the rows that arrived to where combine takes them, last, and lets combine
/// begin before.
fn early_trigger(scene: &mut Scene, ptx: &ProbePtx) -> Result<Told> {
    let probes = Probes::new(&scene.device, ptx)?;
    let copied: Vec<Copied> = (0..scene.ranks())
        .map(|_| {
            let alloc = || scene.device.alloc(COPIED_BYTES);
            Ok(Copied {
                from: alloc()?,
                to: alloc()?,
            })
        })
        .collect::<Result<_>>()?;
    let mut endings = Vec::new();
    for round in 0..EARLY_ROUNDS {
        scene.session.poison()?;
        let start = Instant::now();
        let mut each = copied.iter().enumerate();
        let enqueued = each
            .try_for_each(|(index, copied)| dispatch_copy_combine(scene, &probes, index, copied));
        scene.wait()?;
        enqueued?;
        endings.push((round, scene.ending(start.elapsed(), Ok(()))?));
    }
    for Copied { from, to } in copied {
        // SAFETY: all streams were waited for.
        unsafe {
            scene.device.free(from)?;
            scene.device.free(to)?;
        }
    }
    Ok(Told {
        text: format!("rounds {}", by_number(&endings)),
        endings: endings.into_iter().map(|(_, end)| (None, end)).collect(),
    })
}

fn dispatch_copy_combine(
    scene: &mut Scene,
    probes: &Probes,
    index: usize,
    copied: &Copied,
) -> Result<()> {
    let session = &mut scene.session;
    session.launch_half(index, 0)?;
    let tensors = session.tensors(index, Turn::FIRST);
    let rows = tensors.output.tokens.expect("rows by expert");
    let answers = tensors.expert_rows.expert_rows;
    let args = WriteArgs {
        copies: [
            TensorCopy {
                from: copied.from.address(),
                to: copied.to.address(),
                words: COPIED_BYTES / 4,
            },
            TensorCopy {
                from: rows.at.address(),
                to: answers.at.address(),
                words: answers.bytes() / 4,
            },
            TensorCopy::default(),
            TensorCopy::default(),
        ],
    };
    let (_, stream) = session.local(index);
    // SAFETY: all of it is memory of these sizes; the rows are written before in this stream and the answers
    // read behind. The probes are kept until every stream was waited for.
    unsafe { probes.write(stream, &args) }?;
    Ok(session.launch_half(index, 2)?)
}
