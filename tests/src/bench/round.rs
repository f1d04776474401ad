//! Times dispatch and combine.

use std::time::Duration;

use anyhow::Result;
use ferry::cuda::CudaGraph;
use ferry::{Capacity, Communicator, Config, DispatchInput, Error, Plan, Stream};

use super::inputs::{Extras, Inputs, Outputs, SETS};
use super::rig::{Repeats, Rig, Stage, Timed};
use super::round_options::Options;
use super::traffic::{MemoryTraffic, Traffic};
use crate::session::strict;

/// Pairs of dispatch and combine in a graph.
const PAIRS: usize = 20;
/// Replays of a graph that count.
const REPLAYS: u32 = 10;
/// Longest wait of a kernel, of ranks that have a GPU each.
const DEADLINE: Duration = Duration::from_secs(5);

/// Communicators of this process's ranks for one number of tokens, with their tensors.
pub struct Bench<'a> {
    rig: &'a Rig<'a>,
    inputs: &'a Inputs,
    /// What was measured.
    pub plan: Plan,
    ranks: Vec<RankBench<'a>>,
}

/// A rank's end.
struct RankBench<'a> {
    /// Its number among those of this process.
    local: usize,
    ep: Communicator,
    inputs: &'a Inputs,
    outputs: Outputs,
    stream: Stream,
    tokens: usize,
    extras: Extras,
}

/// A call, or a half of one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Dispatch,
    DispatchAsync,
    DispatchWait,
    Combine,
    CombineAsync,
    CombineWait,
}

impl RankBench<'_> {
    /// Enqueues a call with a set of inputs.
    fn enqueue(&mut self, call: Call, set: usize) -> Result<(), Error> {
        let (stream, mode) = (self.stream, self.ep.plan().config().combine);
        let input = DispatchInput {
            tokens_on_device: self.extras.tokens_on_device,
            ..self.inputs.dispatch(set, self.local, self.tokens)
        };
        let output = self.outputs.dispatch.output();
        let (mut rows, combined) = self.outputs.combine(&input, mode)?;
        rows.epilogue = self.extras.epilogue;
        match call {
            Call::Dispatch => self.ep.dispatch(stream, &input, output),
            Call::DispatchAsync => self.ep.dispatch_async(stream, &input),
            Call::DispatchWait => self.ep.dispatch_wait(stream, output),
            Call::Combine => self.ep.combine(stream, &rows, &combined),
            Call::CombineAsync => self.ep.combine_async(stream, &rows, &combined),
            Call::CombineWait => self.ep.combine_wait(stream),
        }
    }

    /// A graph of pairs, each with other inputs than the one before; the last has the first set.
    fn capture(&mut self, rig: &Rig) -> Result<CudaGraph> {
        let device = rig.gpus[self.local].device.clone();
        let graph = device.capture(self.stream, || {
            (0..PAIRS).rev().try_for_each(|pair| {
                self.enqueue(Call::Dispatch, pair % SETS)?;
                self.enqueue(Call::Combine, pair % SETS)
            })
        });
        Ok(graph?)
    }
}

/// Up to so many tokens outputs hold what any routing can bring, as in a captured graph; above, that would
/// be gigabytes, and they hold what the problems bring.
const ANY_ROUTING_TOKENS: usize = 1024;

impl<'a> Bench<'a> {
    /// Makes communicators and outputs. Collective, as all calls below that time or close.
    pub fn new(rig: &'a Rig<'a>, inputs: &'a Inputs, config: Config) -> Result<Self> {
        let (format, tokens) = (config.format, config.max_tokens_per_rank);
        let config = Config {
            deadline: rig.scaled(DEADLINE),
            ..config
        };
        let plan = Plan::new(&rig.group, config)?;
        let capacity = match tokens <= ANY_ROUTING_TOKENS {
            true => Capacity {
                // The transposed scales want rows of 16 bytes.
                rows: plan.max_rows().next_multiple_of(16),
                scale_blocks: plan.max_scale_blocks(),
            },
            false => {
                let routed = inputs.capacity(tokens, format);
                let shared = usize::from(config.shared_expert) * tokens;
                let blocks = shared.div_ceil(128);
                Capacity {
                    rows: routed.rows + shared.next_multiple_of(16),
                    scale_blocks: routed.scale_blocks + blocks,
                }
            }
        };
        let mut ranks = Vec::new();
        let eps = Communicator::new(&rig.group, &plan)?.into_iter();
        for (local, (ep, gpu)) in eps.zip(&rig.gpus).enumerate() {
            let outputs = Outputs::new(&gpu.device, &plan, capacity)?;
            outputs.poison(0)?;
            ranks.push(RankBench {
                local,
                ep,
                inputs,
                outputs,
                stream: gpu.stream,
                tokens,
                extras: Extras::default(),
            });
        }
        Ok(Self {
            rig,
            inputs,
            plan,
            ranks,
        })
    }

    /// Gives every later call what `options` needs.
    pub fn give(&mut self, options: Options) -> Result<()> {
        let hidden = self.plan.config().hidden;
        for rank in &mut self.ranks {
            let device = &self.rig.gpus[rank.local].device;
            rank.extras = Extras::new(device, options, rank.tokens, hidden)?;
        }
        Ok(())
    }

    /// The kind of the group.
    pub fn group_name(&self) -> &'static str {
        self.rig.group.name()
    }

    /// Most ranks that have one GPU.
    pub const fn ranks_per_gpu(&self) -> usize {
        self.rig.ranks_per_gpu
    }

    /// What crosses the wire, of the first set.
    pub fn traffic(&self) -> Traffic {
        let tokens = self.ranks[0].tokens;
        Traffic::of(&self.inputs.problems[0], self.plan.shape(), tokens)
    }

    /// What device memory reads and writes, of the first set, where all ranks share one GPU.
    pub fn memory_traffic(&self) -> Option<MemoryTraffic> {
        let of = || {
            MemoryTraffic::of(
                &self.inputs.problems[0],
                self.plan.shape(),
                self.ranks[0].tokens,
            )
        };
        let ranks = self.rig.ranks();
        (ranks > 1 && self.rig.ranks_per_gpu == ranks).then(of)
    }

    /// The outputs of each rank of this process.
    pub fn outputs(&self) -> impl Iterator<Item = &Outputs> {
        self.ranks.iter().map(|rank| &rank.outputs)
    }

    fn time(&mut self, repeats: Repeats, calls: &[Call]) -> Result<Vec<Timed>> {
        let stages: Vec<Stage> = calls
            .iter()
            .map(|&call| match call {
                Call::DispatchWait | Call::CombineWait => Stage::Following,
                _ => Stage::Aligned,
            })
            .collect();
        let each = self.ranks.iter_mut().map(|rank| {
            move |stage: usize, iteration: u32| {
                Ok(rank.enqueue(calls[stage], iteration as usize % SETS)?)
            }
        });
        let each: Vec<_> = each.collect();
        let timed = self.rig.time(repeats, &stages, each)?;
        self.check()?;
        Ok(timed)
    }

    /// Dispatch and combine.
    pub fn fused(&mut self, repeats: Repeats) -> Result<[Timed; 2]> {
        let mut timed = self
            .time(repeats, &[Call::Dispatch, Call::Combine])?
            .into_iter();
        Ok([(); 2].map(|()| timed.next().unwrap_or_default()))
    }

    /// Their halves: sending and waiting of dispatch, then of combine.
    pub fn halves(&mut self, repeats: Repeats) -> Result<[Timed; 4]> {
        let calls = [
            Call::DispatchAsync,
            Call::DispatchWait,
            Call::CombineAsync,
            Call::CombineWait,
        ];
        let mut timed = self.time(repeats, &calls)?.into_iter();
        Ok([(); 4].map(|()| timed.next().unwrap_or_default()))
    }

    /// The period of pairs, in microseconds, replayed as a graph back to back.
    pub fn pair_us(&mut self) -> Result<f64> {
        let graphs = self
            .ranks
            .iter_mut()
            .map(|rank| Ok((rank.capture(self.rig)?, rank.stream)));
        let mut graphs: Vec<(CudaGraph, Stream)> = graphs.collect::<Result<_>>()?;
        self.rig.processes.meet()?;
        // The first launch of a graph does more than the later ones.
        for (graph, stream) in &mut graphs {
            graph.launch(*stream)?;
        }
        self.check()?;
        let each = graphs.iter_mut().map(|(graph, stream)| {
            move |_stage: usize, _iteration: u32| Ok(graph.launch(*stream)?)
        });
        let repeats = Repeats {
            warmup: 2,
            iterations: REPLAYS,
            flush: false,
        };
        let timed = self.rig.time(repeats, &[Stage::Aligned], each.collect())?;
        self.check()?;
        Ok(timed[0].gpu_us.median / PAIRS as f64)
    }

    /// One round of the first set, untimed, on outputs full of `poison`.
    pub fn once(&mut self, poison: u8) -> Result<()> {
        for rank in &self.ranks {
            rank.outputs.poison(poison)?;
        }
        self.rig.processes.meet()?;
        for call in [Call::Dispatch, Call::Combine] {
            self.ranks
                .iter_mut()
                .try_for_each(|rank| rank.enqueue(call, 0))?;
        }
        self.check()
    }

    /// Waits for this process's ranks and asks them for faults.
    fn check(&self) -> Result<()> {
        for rank in &self.ranks {
            strict(rank.ep.synchronize(rank.stream))?;
        }
        Ok(())
    }

    /// Frees everything, once no process has failed.
    pub fn close(self) -> Result<()> {
        self.rig.processes.meet()?;
        for rank in self.ranks {
            rank.outputs.free()?;
            rank.extras.free(&self.rig.gpus[rank.local].device)?;
            rank.ep.close()?;
        }
        Ok(())
    }
}
