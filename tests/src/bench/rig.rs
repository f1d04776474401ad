//! The GPUs under measurement, and timed calls on all of them at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ferry::cuda::{CudaDevice, CudaEvent, Grid};
use ferry::{Device, DevicePtr, Group, Stream};
use ferry_probes::ProbeArgs;

use super::meeting::Meeting;
use super::processes::Processes;
use super::samples::{Counts, Samples, from_bytes, summary, to_bytes};
use crate::probes::{Gate, Probe, ProbeMemory, ProbePtx, Probes};

pub use super::samples::Timed;

/// Bytes that a flush writes to push everything else out of the L2 cache: several times its size.
const FLUSH_BYTES: u64 = 256 << 20;
/// Longest wait of a probe if each rank has its own GPU.
const DEADLINE_NS: u64 = 2_000_000_000;

/// A GPU under measurement.
pub struct Gpu {
    /// Rank of the GPU.
    pub rank: usize,
    /// The device.
    pub device: Arc<CudaDevice>,
    /// Kernels that measure it.
    pub probes: Probes,
    /// Stream of everything timed.
    pub stream: Stream,
    /// Probe memory: words, then room for rows.
    pub memory: DevicePtr,
    /// Table of every rank's probe memory.
    peers: DevicePtr,
    /// Memory that a flush writes.
    flushed: DevicePtr,
    /// Source of copies: random bytes, since zeros can be faster than data.
    source: DevicePtr,
}

/// Parts of a [`Rig`].
#[derive(Clone, Copy)]
pub struct Rigged<'a> {
    /// The ranks.
    pub group: &'a Group,
    /// Most ranks on one GPU.
    pub ranks_per_gpu: usize,
    /// Messages to the other processes.
    pub processes: &'a Processes,
    /// PTX of the probes.
    pub probes: &'a ProbePtx,
}

/// The GPUs of a run. This process drives all of them, or one.
pub struct Rig<'a> {
    /// The ranks.
    pub group: Group,
    /// Most ranks on one GPU.
    pub ranks_per_gpu: usize,
    /// Messages to the other processes.
    pub processes: &'a Processes,
    /// GPUs of this process, by rank.
    pub gpus: Vec<Gpu>,
    /// Names of each process's GPUs.
    names: Vec<String>,
    memory: ProbeMemory,
    /// Gate that rank 0 waits for; unused in processes without rank 0.
    gate: Gate,
    /// Iterations so far, warm-up included.
    serial: AtomicU64,
    /// Empty kernels that the last rank runs before a stage in which it is late.
    pub wait_kernels: u32,
}

/// Numbers of calls, and the state of the cache before them.
#[derive(Clone, Copy, Debug)]
pub struct Repeats {
    /// Untimed calls before the timed ones.
    pub warmup: u32,
    /// Timed calls.
    pub iterations: u32,
    /// Whether the L2 cache is flushed before each aligned stage.
    pub flush: bool,
    /// Whether the last rank begins aligned stages later, if a time was asked for.
    pub late: bool,
}

/// One stage of an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// All ranks start together.
    Aligned,
    /// Follows the previous stage at once.
    Following,
}

impl<'a> Rig<'a> {
    /// Prepares the group's GPUs, with room for copies of `copy_bytes` on each. Collective.
    pub fn new(rigged: Rigged<'a>, copy_bytes: u64) -> Result<Self> {
        let Rigged {
            group,
            ranks_per_gpu,
            processes,
            probes,
        } = rigged;
        let memory = ProbeMemory::alloc(group, ProbeArgs::WORDS_BYTES + copy_bytes)?;
        let mut gpus = Vec::new();
        for (rank, (at, peers)) in group.local_ranks().into_iter().zip(memory.local()) {
            let device = group.cuda(rank).context("not a CUDA device")?;
            let probes = Probes::new(&device, probes)?;
            let rank = rank.0 as usize;
            gpus.push(Gpu::new(rank, device, probes, at, peers, copy_bytes)?);
        }
        let gate = Gate::new(&gpus.first().context("no rank in this process")?.device)?;
        let names: Vec<String> = gpus.iter().map(|gpu| gpu.device.name()).collect();
        let names = processes.share(Ok(names.join(", ").into_bytes()))?;
        let names = names
            .iter()
            .map(|name| String::from_utf8_lossy(name).into());
        Ok(Self {
            group: group.clone(),
            ranks_per_gpu,
            processes,
            gpus,
            names: names.collect(),
            memory,
            gate,
            serial: AtomicU64::new(0),
            wait_kernels: 0,
        })
    }

    /// Address of this rank's own entry in its table of every rank's probe memory.
    pub const fn peers_from(&self, gpu: &Gpu) -> u64 {
        gpu.peers.address() + 8 * gpu.rank as u64
    }

    /// Heading: "4 ranks in one process: NVIDIA H200 (cuda:0), ..".
    pub fn title(&self) -> String {
        let (ranks, names) = (self.ranks(), self.names.join(", "));
        if self.names.len() == 1 {
            return format!("{ranks} ranks in one process: {names}");
        }
        let group = self.group.name();
        format!("{ranks} ranks, a process each ({group} group): {names}")
    }

    /// Scales a longest wait of ranks with a GPU each to these ranks.
    pub fn scaled(&self, wait: Duration) -> Duration {
        wait * self.ranks_per_gpu as u32
    }

    /// Ranks of all processes.
    pub fn ranks(&self) -> usize {
        self.group.ranks() as usize
    }

    /// Probe arguments of a rank that sends no rows.
    pub fn probe_args(&self, gpu: &Gpu) -> ProbeArgs {
        ProbeArgs {
            peers: gpu.peers.address(),
            source: gpu.source.address(),
            offset: ProbeArgs::WORDS_BYTES,
            start_flag: 0,
            start_value: 0,
            deadline_ns: DEADLINE_NS * self.ranks_per_gpu as u64,
            row_bytes: 16,
            rows: 0,
            parts: 1,
            rank: gpu.rank as u32,
            ranks: self.ranks() as u32,
            first_peer: 1,
            peer_count: (self.ranks() - 1).max(1) as u32,
            repeats: 0,
        }
    }

    /// Calls every local rank's function for every stage of every iteration, each rank on a thread of its
    /// own, and returns the times over all ranks. `call(stage, iteration)` enqueues on the rank's stream. An
    /// iteration is enqueued on all ranks of all processes before any of it starts. Collective.
    pub fn time<C>(&self, repeats: Repeats, stages: &[Stage], calls: Vec<C>) -> Result<Vec<Timed>>
    where
        C: FnMut(usize, u32) -> Result<()> + Send,
    {
        // A process may have been busy for longer than the others' probes wait.
        self.processes.meet()?;
        let own = self.time_here(repeats, stages, calls);
        let all = self
            .processes
            .share(own.map(|samples| to_bytes(&samples)))?;
        let counts = Counts {
            stages: stages.len(),
            iterations: repeats.iterations as usize,
        };
        let samples = all.iter().map(|bytes| from_bytes(bytes, counts));
        let samples = samples.collect::<Result<Vec<_>>>()?.concat();
        Ok((0..stages.len())
            .map(|stage| summary(&samples, stage))
            .collect())
    }

    /// Number of empty kernels in a row that take so long. Collective.
    pub fn kernels_of(&self, us: f64) -> Result<u32> {
        const KERNELS: u32 = 100;
        let repeats = Repeats {
            warmup: 3,
            iterations: 20,
            flush: false,
            late: false,
        };
        let each = self.gpus.iter().map(|gpu| {
            move |_stage: usize, _iteration: u32| (0..KERNELS).try_for_each(|_| self.pause(gpu))
        });
        let timed = self.time(repeats, &[Stage::Aligned], each.collect())?;
        Ok((us * f64::from(KERNELS) / timed[0].gpu_us.median).round() as u32)
    }

    /// Enqueues an empty kernel.
    fn pause(&self, gpu: &Gpu) -> Result<()> {
        let (probe, args) = (Probe::Empty, self.probe_args(gpu));
        // SAFETY: the kernel reads nothing, and dropping a `Gpu` waits for its stream before its probes are
        // unloaded.
        unsafe {
            gpu.probes
                .launch(gpu.stream, probe, Grid::new(1, 32), &args)
        }
    }

    /// This process's share of [`time`](Self::time): its ranks' samples.
    fn time_here<C>(
        &self,
        repeats: Repeats,
        stages: &[Stage],
        calls: Vec<C>,
    ) -> Result<Vec<Samples>>
    where
        C: FnMut(usize, u32) -> Result<()> + Send,
    {
        let meeting = Meeting::new(calls.len());
        let base = self.serial.load(Ordering::Relaxed);
        let timer = |gpu| Timer {
            rig: self,
            gpu,
            meeting: &meeting,
            repeats,
            stages,
            base,
        };
        let timers = self.gpus.iter().map(timer).zip(calls);
        let results: Vec<Result<Samples>> = if self.gpus.len() == 1 {
            // MPI requires that the thread that joined the other processes talks to them.
            timers.map(|(timer, call)| timer.run(call)).collect()
        } else {
            std::thread::scope(|scope| {
                let threads: Vec<_> = timers
                    .map(|(timer, call)| {
                        scope.spawn(move || timer.run(call).inspect_err(|_| timer.meeting.fail()))
                    })
                    .collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().expect("no panic while timing"))
                    .collect()
            })
        };
        let all = u64::from(repeats.warmup + repeats.iterations);
        self.serial.fetch_add(all, Ordering::Relaxed);
        self.gate.open(base + all);
        let samples = first_cause(results)?;
        self.require_aligned()?;
        Ok(samples)
    }

    /// Resets the ranks' barriers after one has failed. Waits for all streams. Collective.
    pub fn reset(&self) -> Result<()> {
        for gpu in &self.gpus {
            gpu.device.synchronize(gpu.stream)?;
        }
        // No probe of any process runs any more.
        self.processes.meet()?;
        for gpu in &self.gpus {
            gpu.device.fill(gpu.memory, 0, ProbeArgs::WORDS_BYTES)?;
        }
        self.processes.meet()
    }

    /// Frees the probe memory, which belongs to the group. Collective.
    pub fn close(self) -> Result<()> {
        // SAFETY: no probe of any rank runs, since all processes have met after the last timing, and this
        // rig alone used the addresses.
        unsafe { self.memory.free() }
    }

    /// Fails if a probe gave up waiting.
    fn require_aligned(&self) -> Result<()> {
        for gpu in &self.gpus {
            gpu.device.synchronize(gpu.stream)?;
            let mut word = [0; 8];
            gpu.device
                .download(gpu.memory.plus(ProbeArgs::TIMED_OUT), &mut word)?;
            if word != [0; 8] {
                bail!(
                    "a probe of rank {} gave up waiting: the ranks did not start together",
                    gpu.rank
                );
            }
        }
        Ok(())
    }
}

impl Gpu {
    /// Takes the rank's probe memory, and every rank's as this one addresses it.
    fn new(
        rank: usize,
        device: Arc<CudaDevice>,
        probes: Probes,
        memory: DevicePtr,
        peers: &[DevicePtr],
        copy_bytes: u64,
    ) -> Result<Self> {
        let gpu = Self {
            rank,
            probes,
            stream: device.stream()?,
            memory,
            peers: device.alloc(8 * peers.len() as u64)?,
            flushed: device.alloc(FLUSH_BYTES)?,
            source: random_bytes(&device, copy_bytes)?,
            device,
        };
        let table: Vec<u8> = peers
            .iter()
            .flat_map(|peer| peer.address().to_le_bytes())
            .collect();
        gpu.device.upload(gpu.peers, &table)?;
        // The first call loads a kernel, which must not happen while others wait.
        gpu.flush()?;
        gpu.device.synchronize(gpu.stream)?;
        Ok(gpu)
    }

    /// Enqueues a kernel that pushes everything else out of the L2 cache.
    fn flush(&self) -> Result<()> {
        // SAFETY: only flushes in this stream use `flushed`, and `drop` waits for the stream before the
        // probes are unloaded.
        Ok(unsafe { self.probes.clear(self.stream, self.flushed) }?)
    }
}

impl Drop for Gpu {
    /// Waits for the probes, which are unloaded next.
    fn drop(&mut self) {
        // It fails only if the device is broken, and then nothing runs.
        let _ = self.device.synchronize(self.stream);
    }
}

/// Allocates device memory with random bytes.
fn random_bytes(device: &CudaDevice, bytes: u64) -> Result<DevicePtr> {
    const BLOCK: u64 = 16 << 20;
    let at = device.alloc(bytes)?;
    // Xorshift, 64 bits (Marsaglia 2003).
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    });
    let block: Vec<u64> = words.take(BLOCK as usize / 8).collect();
    let block: &[u8] = bytemuck::cast_slice(&block);
    for start in (0..bytes).step_by(BLOCK as usize) {
        let count = BLOCK.min(bytes - start) as usize;
        device.upload(at.plus(start), &block[..count])?;
    }
    Ok(at)
}

/// Returns the results, or the error that is not a mere consequence of another.
fn first_cause(results: Vec<Result<Samples>>) -> Result<Vec<Samples>> {
    let (good, mut bad): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    bad.sort_by_key(|error| {
        error
            .as_ref()
            .is_err_and(|error| error.to_string() == "another rank failed")
    });
    match bad.into_iter().next() {
        Some(error) => error.map(|_| Vec::new()),
        None => good.into_iter().collect(),
    }
}

/// A rank's side of [`Rig::time`].
#[derive(Clone, Copy)]
struct Timer<'a> {
    rig: &'a Rig<'a>,
    gpu: &'a Gpu,
    meeting: &'a Meeting,
    repeats: Repeats,
    stages: &'a [Stage],
    base: u64,
}

impl Timer<'_> {
    fn run(&self, mut call: impl FnMut(usize, u32) -> Result<()>) -> Result<Samples> {
        let device = &self.gpu.device;
        let event = || device.event();
        let events = self.stages.iter().map(|_| Ok((event()?, event()?)));
        let events: Vec<(CudaEvent, CudaEvent)> = events.collect::<Result<_>>()?;
        let mut samples = vec![Vec::new(); self.stages.len()];
        for iteration in 0..self.repeats.warmup + self.repeats.iterations {
            let serial = self.base + u64::from(iteration) + 1;
            let mut host = Vec::new();
            for (stage, (start, end)) in events.iter().enumerate() {
                self.prepare(self.stages[stage], serial)?;
                start.record(self.gpu.stream)?;
                let before = Instant::now();
                call(stage, iteration)?;
                host.push(before.elapsed().as_secs_f64() * 1e6);
                end.record(self.gpu.stream)?;
            }
            self.meet()?;
            if self.gpu.rank == 0 {
                self.rig.gate.open(serial);
            }
            for (stage, (start, end)) in events.iter().enumerate() {
                let gpu = f64::from(end.elapsed_ms_since(start)?) * 1e3;
                if iteration >= self.repeats.warmup {
                    samples[stage].push((gpu, host[stage]));
                }
            }
        }
        Ok(samples)
    }

    /// Waits for the ranks of this process; one of them then waits for the other processes.
    fn meet(&self) -> Result<()> {
        self.meeting.wait()?;
        if self.gpu.rank == self.rig.gpus[0].rank {
            self.rig.processes.meet()?;
        }
        Ok(())
    }

    /// Flushes if asked to, and aligns the ranks at a barrier; rank 0 also waits for the gate.
    fn prepare(&self, stage: Stage, serial: u64) -> Result<()> {
        if stage == Stage::Following {
            return Ok(());
        }
        let Gpu {
            probes,
            stream,
            rank,
            ..
        } = self.gpu;
        if self.repeats.flush {
            self.gpu.flush()?;
        }
        let mut args = self.rig.probe_args(self.gpu);
        if *rank == 0 {
            (args.start_flag, args.start_value) = (self.rig.gate.address(), serial);
        }
        // SAFETY: the addresses are live allocations of the rig, mapped on all of its devices, and dropping a
        // `Gpu` waits for its stream before its probes are unloaded.
        unsafe { probes.launch(*stream, Probe::Barrier, Grid::new(1, 32), &args) }?;
        if self.repeats.late && rank + 1 == self.rig.ranks() {
            (0..self.rig.wait_kernels).try_for_each(|_| self.rig.pause(self.gpu))?;
        }
        Ok(())
    }
}
