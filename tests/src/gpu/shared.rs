//! Ranks that share a GPU: their parts of it, the room that communicators find, and what may come behind what
//! in a stream. Nothing here waits for a deadline.

use anyhow::{Context, Result, bail, ensure};
use ferry::cuda::CudaGraph;
use ferry::error::{LocalRanksError, SharedGpuError};
use ferry::{
    CombineBuffers, CombineInput, CombineOutput, Communicator, Config, DispatchBuffers,
    DispatchInput, DispatchOutput, Error, Group, GroupOptions, Plan, Stream,
};

use super::{Outcome, Suite};

const TOKENS: usize = 4;
const HIDDEN: usize = 128;
/// Launches of each graph.
const REPLAYS: usize = 3;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    suite.check("ranks on one GPU: each takes its part", parts)?;
    suite.check("ranks on one GPU: communicators that find room", room)?;
    suite.check("ranks on one GPU: calls in one stream", calls)?;
    suite.check("ranks on one GPU: graphs in one stream", graphs)
}

/// A rank for each expert, whose tokens go round.
fn config(suite: &Suite<'_>) -> Config {
    Config {
        deadline: suite.deadline(),
        ..Config::new(suite.ranks(), 1, HIDDEN, TOKENS)
    }
}

fn parts(suite: &mut Suite<'_>) -> Result<Outcome> {
    let group = suite.group().clone();
    let local = group.local_ranks();
    let shared = local.iter().filter_map(|&rank| group.gpu_ranks(rank));
    if !shared.clone().any(|gpu| gpu.is_shared()) {
        return Ok(Outcome::Skipped("every rank has a GPU of its own".into()));
    }
    let plan = Plan::new(&group, config(suite))?;
    let ranks = Communicator::new(&group, &plan);
    let ranks = suite.open.agree(ranks.map_err(Into::into))?;
    let mut told = Vec::new();
    for rank in &ranks {
        let gpu = group.gpu_ranks(rank.rank()).context("a GPU")?;
        let limit = gpu.limit(rank.rank(), None);
        ensure!(
            rank.max_sms() == limit,
            "{:?}, not {limit:?}",
            rank.max_sms()
        );
        told.push(format!(
            "rank {}: {limit:?} of {} multiprocessors, {} ranks there",
            rank.rank().0,
            gpu.multiprocessors(),
            gpu.ranks().len()
        ));
    }
    for rank in ranks {
        rank.close()?;
    }
    Ok(Outcome::Measured(told.join("; ")))
}

/// Why the ranks are not all on one GPU, in this process.
fn elsewhere(suite: &Suite<'_>) -> Option<Outcome> {
    let group = suite.group();
    let local = group.local_ranks();
    let gpu = local.first().and_then(|&rank| group.gpu_ranks(rank));
    let here = gpu.map_or(0, |gpu| gpu.ranks().len());
    let is_one = here > 1 && here == suite.ranks() && here == local.len();
    (!is_one).then(|| Outcome::Skipped("the ranks are not those of one process on one GPU".into()))
}

/// Communicators of two groups over one GPU.
fn room(suite: &mut Suite<'_>) -> Result<Outcome> {
    if let Some(elsewhere) = elsewhere(suite) {
        return Ok(elsewhere);
    }
    let group = suite.group().clone();
    let gpu = group.gpu_ranks(group.local_ranks()[0]).context("a GPU")?;
    let half = gpu.multiprocessors() / suite.ranks() as u32 / 2;
    let device = group.cuda(group.local_ranks()[0]).context("a device")?;
    let other = Group::local(
        &vec![device.ordinal(); suite.ranks()],
        &GroupOptions {
            kernels: suite.args.files.kernels()?,
            share_gpus: true,
            ..GroupOptions::default()
        },
    )?;
    let all = config(suite);
    let halved = Config {
        max_sms: Some(half.max(1)),
        ..all
    };
    let begin = |group: &Group, config| Communicator::new(group, &Plan::new(group, config)?);
    let whole = begin(&group, all)?;
    match begin(&other, all) {
        Err(Error::SharedGpu(refused @ SharedGpuError::NoRoom { .. })) => {
            let text = refused.to_string();
            ensure!(text.contains(gpu.gpu()), "{text}");
        }
        other => bail!("not refused for want of room: {other:?}"),
    }
    close(whole)?;
    let two = [begin(&group, halved)?, begin(&other, halved)?];
    two.into_iter().try_for_each(close)?;
    other.close()?;
    Ok(Outcome::Passed)
}

fn close(ranks: Vec<Communicator>) -> Result<()> {
    for rank in ranks {
        rank.close()?;
    }
    Ok(())
}

/// The ranks of a communicator, and the tensors of each.
struct Team {
    ranks: Vec<Communicator>,
    streams: Vec<Stream>,
    tokens: Vec<Vec<u16>>,
    inputs: Vec<DispatchInput>,
    rows: Vec<DispatchOutput>,
    sums: Vec<CombineOutput>,
}

impl Team {
    fn new(suite: &Suite<'_>) -> Result<Self> {
        let group = suite.group();
        let plan = Plan::new(group, config(suite))?;
        let mut team = Self {
            ranks: Communicator::new(group, &plan)?,
            streams: Vec::new(),
            tokens: Vec::new(),
            inputs: Vec::new(),
            rows: Vec::new(),
            sums: Vec::new(),
        };
        for (index, rank) in team.ranks.iter().enumerate() {
            let device = rank.device();
            let number = |at: usize| 0x3f80 + 16 * index as u16 + (at / HIDDEN) as u16;
            let tokens: Vec<u16> = (0..TOKENS * HIDDEN).map(number).collect();
            let expert = |token| ((index + token) % plan.config().experts) as i32;
            let experts: Vec<i32> = (0..TOKENS).map(expert).collect();
            let x = device.upload_tensor([TOKENS, HIDDEN], &tokens)?;
            let ids = device.upload_tensor([TOKENS, 1], &experts)?;
            team.inputs.push(DispatchInput::new(x, ids));
            team.rows
                .push(*DispatchBuffers::new(device, &plan)?.output());
            team.sums
                .push(CombineBuffers::new(device, &plan)?.output(TOKENS)?);
            team.streams.push(device.stream()?);
            team.tokens.push(tokens);
        }
        Ok(team)
    }

    fn dispatch(&mut self, index: usize, stream: Stream) -> Result<(), Error> {
        self.ranks[index].dispatch(stream, &self.inputs[index], &self.rows[index])
    }

    fn combine(&mut self, index: usize, stream: Stream) -> Result<(), Error> {
        let experts = CombineInput::new(self.rows[index].tokens);
        self.ranks[index].combine(stream, &experts, &self.sums[index])
    }

    fn round(&mut self, index: usize, stream: Stream) -> Result<(), Error> {
        self.dispatch(index, stream)?;
        self.combine(index, stream)
    }

    /// Waits for all ranks, each in its stream here, and compares what came back.
    fn verify(&self, streams: &[Stream]) -> Result<()> {
        for (index, rank) in self.ranks.iter().enumerate() {
            let fault = rank.synchronize(streams[index])?;
            ensure!(fault.is_none(), "{fault:?}");
            let sums: Vec<u16> = rank.device().download_tensor(&self.sums[index].rows())?;
            ensure!(sums == self.tokens[index], "rank {index}: other sums");
        }
        Ok(())
    }
}

/// That rank 1 was refused behind rank 0.
fn require_refused(outcome: Result<(), Error>) -> Result<()> {
    let error = match outcome {
        Err(Error::LocalRanks(LocalRanksError::Refused { source, .. })) => Err(*source),
        other => other,
    };
    match error {
        Err(Error::SharedGpu(SharedGpuError::OneStream { rank, waiting, .. })) => {
            ensure!((rank.0, waiting.0) == (1, 0), "{rank:?} behind {waiting:?}");
            Ok(())
        }
        other => bail!("not refused behind rank 0: {other:?}"),
    }
}

fn calls(suite: &mut Suite<'_>) -> Result<Outcome> {
    if let Some(elsewhere) = elsewhere(suite) {
        return Ok(elsewhere);
    }
    let mut team = Team::new(suite)?;
    let apart = team.streams.clone();
    let one = vec![apart[0]; apart.len()];
    team.dispatch(0, apart[0])?;
    require_refused(team.dispatch(1, apart[0]))?;
    // It still comes in time, in another stream.
    for (index, &stream) in apart.iter().enumerate().skip(1) {
        team.dispatch(index, stream)?;
    }
    for (index, &stream) in apart.iter().enumerate() {
        team.combine(index, stream)?;
    }
    team.verify(&apart)?;
    let all = Communicator::dispatch_all(&mut team.ranks, &one, &team.inputs, &team.rows);
    require_refused(all)?;
    Communicator::dispatch_async_all(&mut team.ranks, &one, &team.inputs)?;
    Communicator::dispatch_wait_all(&mut team.ranks, &one, &team.rows)?;
    let experts: Vec<_> = team
        .rows
        .iter()
        .map(|rows| CombineInput::new(rows.tokens))
        .collect();
    Communicator::combine_async_all(&mut team.ranks, &one, &experts, &team.sums)?;
    Communicator::combine_wait_all(&mut team.ranks, &one)?;
    team.verify(&one)?;
    close(team.ranks)?;
    Ok(Outcome::Passed)
}

fn graphs(suite: &mut Suite<'_>) -> Result<Outcome> {
    if let Some(elsewhere) = elsewhere(suite) {
        return Ok(elsewhere);
    }
    let device = suite
        .group()
        .cuda(suite.group().local_ranks()[0])
        .context("a device")?;
    let mut team = Team::new(suite)?;
    let apart = team.streams.clone();
    // In one capture, which is thrown away.
    let captured = device.capture::<Error>(apart[0], || {
        team.round(0, apart[0])?;
        team.round(1, apart[0])
    });
    require_refused(captured.map(drop))?;
    // Nothing of it waits outside.
    for (index, &stream) in apart.iter().enumerate() {
        team.round(index, stream)?;
    }
    team.verify(&apart)?;
    let mut graphs: Vec<CudaGraph> = Vec::new();
    for (index, &stream) in apart.iter().enumerate() {
        graphs.push(device.capture::<Error>(stream, || team.round(index, stream))?);
    }
    for _ in 0..REPLAYS {
        graphs[0].launch(apart[0])?;
        require_refused(graphs[1].launch(apart[0]))?;
        for (graph, &stream) in graphs.iter_mut().zip(&apart).skip(1) {
            graph.launch(stream)?;
        }
        team.verify(&apart)?;
    }
    drop(graphs);
    close(team.ranks)?;
    Ok(Outcome::Passed)
}
