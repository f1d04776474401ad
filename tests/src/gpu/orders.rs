//! Order of kernels on a GPU that ranks of one process share: a rank's kernel waits there for the others'.
//! What Ferry promises of such rounds: they end right, and about as soon as one that has the GPU to itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferry::cuda::{CudaDevice, Grid};
use ferry::{Config, Device, DevicePtr, Stream};
use ferry_probes::{ProbeArgs, TensorCopy, WriteArgs};
use ferry_reference::bf16;

use super::invalid::wait;
use super::rounds::{compare, returned};
use super::shared::elsewhere;
use super::{Outcome, Suite};
use crate::probes::{Gate, Probe, ProbePtx, Probes};
use crate::sharing;
use ferry_rig::{Session, Settings, Turn};

/// Longest wait of a kernel.
const DEADLINE: Duration = Duration::from_secs(1);
/// Time that the first rank's kernel has to begin.
const HEAD_START: Duration = Duration::from_millis(2);
/// A round that takes longer than that, and many times as long as another, is slow.
const SLOW: Duration = Duration::from_millis(100);
const MANY_TIMES: u32 = 20;
const HIDDEN: usize = 1024;
const TOKENS: usize = 16;
/// Bytes that are copied to the device and back.
const PAGEABLE: usize = 16 << 20;
/// Rounds, of two launches each, that are enqueued for one rank before those for the others.
const AHEAD: usize = 50;
/// Rounds with a kernel that lets combine begin early, and bytes that it copies: longer than a round.
const EARLY_ROUNDS: usize = 20;
const EARLY_BYTES: u64 = 64 << 20;

/// A case, which returns how long its round took, or the longest one.
type Case = fn(&mut Scene<'_>, &ProbePtx) -> Result<Duration>;

#[rustfmt::skip]
const CASES: [(&str, Kernels, Case); 5] = [
    ("kernels of a shape are launched for the first time", Kernels::New, round),
    ("pageable memory is copied by Ferry's device", Kernels::Warm, copies),
    ("kernels wait in other streams, a queue each", Kernels::Warm, queues),
    ("100 launches for one rank before the others'", Kernels::Warm, launches_ahead),
    ("a kernel with an early trigger between dispatch and combine", Kernels::Warm, early_trigger),
];

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    let mut cases = CASES.into_iter();
    cases.try_for_each(|(name, kernels, case)| check(suite, name, kernels, case))
}

/// Whether a scene's kernels have run before.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kernels {
    /// They have.
    Warm,
    /// They were compiled for a shape that no other test has, and have not.
    New,
}

/// Ranks on one GPU, with a round to make.
struct Scene<'a> {
    session: &'a mut Session,
    device: Arc<CudaDevice>,
    /// Results of the round, by rank.
    wanted: Vec<Vec<bf16>>,
    /// Time of a round, once some have run.
    usual: Duration,
}

/// Runs a case in a session of its own, if the ranks are all on one GPU, in this process.
fn check(suite: &mut Suite<'_>, name: &str, kernels: Kernels, case: Case) -> Result<()> {
    suite.check(&format!("order on one GPU: {name}"), |suite| {
        if let Some(elsewhere) = elsewhere(suite) {
            return Ok(elsewhere);
        }
        let rank = suite.group().local_ranks()[0];
        let device = suite.group().cuda(rank).context("a device")?;
        let experts = 8 * suite.ranks();
        let problem = suite.uniform(TOKENS, [experts, 8, HIDDEN], suite.args.seed * 77);
        let is_new = kernels == Kernels::New;
        let config = Config {
            deadline: DEADLINE,
            specialise: is_new,
            ..Config::new(experts, 8, HIDDEN, TOKENS + usize::from(is_new))
        };
        let settings = Settings::of(config, std::slice::from_ref(&problem));
        let took = suite.with_session(&settings, 1, |suite, session| {
            session.upload(0, &problem)?;
            let mut scene = Scene {
                session,
                device,
                wanted: returned(&problem),
                usual: if is_new { Duration::ZERO } else { DEADLINE },
            };
            if !is_new {
                for _ in 0..3 {
                    scene.usual = scene.others_after_the_first(|_| Ok(()))?;
                }
            }
            case(&mut scene, &suite.probes)
        })?;
        let ms = 1e3 * took.as_secs_f64();
        Ok(Outcome::Measured(format!("right, in {ms:.1} ms")))
    })
}

impl Scene<'_> {
    /// A round, with a call between the launch of the first rank and those of the others. Returns its time.
    fn others_after_the_first(
        &mut self,
        call: impl FnOnce(&CudaDevice) -> Result<()>,
    ) -> Result<Duration> {
        self.session.poison()?;
        let start = Instant::now();
        self.launch(call)?;
        wait(self.session)?;
        self.judged(start.elapsed())
    }

    /// Enqueues a round, with a call between the launch of the first rank and those of the others.
    fn launch(&mut self, call: impl FnOnce(&CudaDevice) -> Result<()>) -> Result<()> {
        self.session.launch(0, Turn::RETURNED)?;
        std::thread::sleep(HEAD_START);
        call(&self.device)?;
        let mut others = 1..self.wanted.len();
        Ok(others.try_for_each(|index| self.session.launch(index, Turn::RETURNED))?)
    }

    /// The time of a round that has ended. An error if a rank gave up, the results are wrong, or it was slow.
    fn judged(&mut self, took: Duration) -> Result<Duration> {
        self.session.synchronize()?;
        compare(self.session, Turn::RETURNED, &self.wanted)?;
        let usual = self.usual;
        ensure!(
            took <= SLOW + MANY_TIMES * usual,
            "right, but in {took:?}, where others take {usual:?}"
        );
        Ok(took)
    }
}

fn round(scene: &mut Scene<'_>, _: &ProbePtx) -> Result<Duration> {
    scene.others_after_the_first(|_| Ok(()))
}

fn copies(scene: &mut Scene<'_>, _: &ProbePtx) -> Result<Duration> {
    let at = scene.device.alloc(PAGEABLE as u64)?;
    let took = scene.others_after_the_first(|device| {
        let mut bytes = vec![1; PAGEABLE];
        device.upload(at, &bytes)?;
        Ok(device.download(at, &mut bytes)?)
    })?;
    // SAFETY: both copies have ended.
    unsafe { scene.device.free(at) }?;
    Ok(took)
}

/// Kernels that wait for a gate, each in a stream of its own with one after it. Dropped, it lets them go and
/// waits for them.
struct Waiting {
    device: Arc<CudaDevice>,
    streams: Vec<Stream>,
    gate: Gate,
    probes: Probes,
}

impl Waiting {
    /// Enqueues them in so many streams.
    fn enqueue(scene: &Scene<'_>, ptx: &ProbePtx, streams: usize) -> Result<Self> {
        let device = &scene.device;
        let streams = (0..streams).map(|_| device.stream());
        let waiting = Self {
            device: device.clone(),
            streams: streams.collect::<Result<_, _>>()?,
            gate: Gate::new(device)?,
            probes: Probes::new(device, ptx)?,
        };
        let memory = device.alloc(ProbeArgs::WORDS_BYTES)?;
        let peers = device.alloc(8)?;
        device.fill(memory, 0, ProbeArgs::WORDS_BYTES)?;
        device.upload(peers, &memory.address().to_le_bytes())?;
        let args = ProbeArgs {
            peers: peers.address(),
            source: 0,
            offset: ProbeArgs::WORDS_BYTES,
            start_flag: waiting.gate.address(),
            start_value: 1,
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
        for &stream in &waiting.streams {
            for probe in [Probe::Barrier, Probe::Empty] {
                // SAFETY: the memory is never freed, and holds the words of a rank; with no ranks nothing
                // else is touched. The probes are kept until `drop` has waited for the streams.
                unsafe { (waiting.probes).launch(stream, probe, Grid::new(1, 32), &args) }?;
            }
        }
        Ok(waiting)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.gate.open(1);
        for &stream in &self.streams {
            // It fails only where the device is broken, and then nothing runs.
            let _ = self.device.synchronize(stream);
        }
    }
}

/// Other streams have the queues that the ranks' leave.
fn queues(scene: &mut Scene<'_>, ptx: &ProbePtx) -> Result<Duration> {
    scene.session.poison()?;
    let others = sharing::queues().saturating_sub(scene.wanted.len());
    let waiting = Waiting::enqueue(scene, ptx, others)?;
    let start = Instant::now();
    scene.launch(|_| Ok(()))?;
    wait(scene.session)?;
    let took = start.elapsed();
    // What else asks the device something would wait for them as well.
    drop(waiting);
    scene.judged(took)
}

fn launches_ahead(scene: &mut Scene<'_>, _: &ProbePtx) -> Result<Duration> {
    scene.session.poison()?;
    let start = Instant::now();
    for index in 0..scene.wanted.len() {
        for _ in 0..AHEAD {
            scene.session.launch(index, Turn::RETURNED)?;
        }
    }
    wait(scene.session)?;
    scene.judged(start.elapsed())
}

/// Each rank's own kernel copies the rows that arrived to where combine takes them, last, and lets combine
/// begin before.
fn early_trigger(scene: &mut Scene<'_>, ptx: &ProbePtx) -> Result<Duration> {
    let probes = Probes::new(&scene.device, ptx)?;
    let alloc = || scene.device.alloc(EARLY_BYTES);
    let copied = (scene.wanted.iter()).map(|_| Ok([alloc()?, alloc()?]));
    let copied: Vec<[DevicePtr; 2]> = copied.collect::<Result<_>>()?;
    let mut longest = Duration::ZERO;
    for _ in 0..EARLY_ROUNDS {
        scene.session.poison()?;
        let start = Instant::now();
        let mut each = copied.iter().enumerate();
        let enqueued =
            each.try_for_each(|(index, &copied)| copy_between(scene, &probes, index, copied));
        // The probes and the memory are kept until then.
        wait(scene.session)?;
        enqueued?;
        longest = longest.max(scene.judged(start.elapsed())?);
    }
    for at in copied.into_iter().flatten() {
        // SAFETY: all streams were waited for.
        unsafe { scene.device.free(at) }?;
    }
    Ok(longest)
}

/// Enqueues a rank's dispatch, its copy, and combine.
fn copy_between(
    scene: &mut Scene<'_>,
    probes: &Probes,
    index: usize,
    copied: [DevicePtr; 2],
) -> Result<()> {
    let ([from, to], session) = (copied, &mut *scene.session);
    session.launch_half(index, 0)?;
    let tensors = session.tensors(index, Turn::FIRST);
    let rows = tensors.output.tokens.expect("rows by expert");
    let answers = tensors.expert_rows.expert_rows;
    let copy = |from: DevicePtr, to: DevicePtr, bytes: u64| TensorCopy {
        from: from.address(),
        to: to.address(),
        words: bytes / 4,
    };
    let none = TensorCopy::default();
    let copies = [
        copy(from, to, EARLY_BYTES),
        copy(rows.at, answers.at, answers.bytes()),
        none,
        none,
    ];
    let (_, stream) = session.local(index);
    // SAFETY: all of it is memory of these sizes; the rows are written before in this stream and the answers
    // read after. The caller keeps the probes until every stream was waited for.
    unsafe { probes.write(stream, &WriteArgs { copies }) }?;
    Ok(session.launch_half(index, 2)?)
}
