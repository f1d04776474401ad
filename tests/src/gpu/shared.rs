//! Ranks that share a GPU: their parts of it, the room that communicators find, and what may come behind what
//! in a stream. Nothing here waits for a deadline.

use anyhow::{Context, Result, bail, ensure};
use ferry::error::{LocalRanksError, SharedGpuError};
use ferry::{Communicator, Config, Error, Group, GroupOptions, Plan, Stream};
use ferry_reference::bf16;

use super::rounds::{compare, returned};
use super::{Outcome, Suite};
use ferry_rig::{Graphs, HALVES, Session, Settings, Tensors, Turn};

const TOKENS: usize = 4;
const HIDDEN: usize = 128;
/// Launches of each graph.
const REPLAYS: usize = 3;
/// Turn of each round.
const TURN: Turn = Turn::RETURNED;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    suite.check("ranks on one GPU: each takes its part", parts)?;
    suite.check("ranks on one GPU: communicators that find room", room)?;
    suite.check("ranks on one GPU: calls in one stream", |suite| {
        in_team(suite, calls)
    })?;
    suite.check("ranks on one GPU: graphs in one stream", |suite| {
        in_team(suite, graphs)
    })
}

/// A rank for each expert.
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

/// Reason to skip, if the ranks are not all on one GPU, in this process.
pub(super) fn elsewhere(suite: &Suite<'_>) -> Option<Outcome> {
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

/// A session with a round to make.
struct Team {
    session: Session,
    /// A stream for each rank.
    apart: Vec<Stream>,
    /// Results, by rank.
    wanted: Vec<Vec<bf16>>,
}

/// Runs a test if the ranks are all on one GPU, in this process.
fn in_team(
    suite: &mut Suite<'_>,
    test: impl FnOnce(&Suite<'_>, &mut Team) -> Result<()>,
) -> Result<Outcome> {
    if let Some(elsewhere) = elsewhere(suite) {
        return Ok(elsewhere);
    }
    let problem = suite.uniform(TOKENS, [suite.ranks(), 1, HIDDEN], suite.args.seed);
    let settings = Settings::of(config(suite), std::slice::from_ref(&problem));
    let mut session = Session::new(suite.group(), &settings)?;
    session.upload(0, &problem)?;
    let mut team = Team {
        apart: (0..suite.ranks())
            .map(|index| session.local(index).1)
            .collect(),
        wanted: returned(&problem),
        session,
    };
    test(suite, &mut team)?;
    team.session.close()?;
    Ok(Outcome::Passed)
}

impl Team {
    fn dispatch(&mut self, index: usize, stream: Stream) -> Result<(), Error> {
        self.session.launch_in(index, stream, TURN, 0)
    }

    fn combine(&mut self, index: usize, stream: Stream) -> Result<(), Error> {
        self.session.launch_in(index, stream, TURN, 2)
    }

    /// Waits for all ranks, each in its stream here, and compares the results.
    fn verify(&mut self, streams: &[Stream]) -> Result<()> {
        self.session.use_streams(streams.iter().copied());
        self.session.synchronize()?;
        compare(&self.session, TURN, &self.wanted)?;
        self.session.use_streams(self.apart.iter().copied());
        Ok(self.session.poison()?)
    }
}

/// Checks that rank 1 was refused behind rank 0.
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

fn calls(_: &Suite<'_>, team: &mut Team) -> Result<()> {
    let apart = team.apart.clone();
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
    let (all, tensors) = team.session.all(TURN);
    require_refused(Tensors::enqueue_all(all, &one, &tensors, 0, false))?;
    for half in 0..HALVES {
        Tensors::enqueue_all(all, &one, &tensors, half, true)?;
    }
    team.verify(&one)
}

fn graphs(suite: &Suite<'_>, team: &mut Team) -> Result<()> {
    let device = suite.group().cuda(suite.group().local_ranks()[0]);
    let (device, apart) = (device.context("a device")?, team.apart.clone());
    // In one capture, which is thrown away.
    let captured = device.capture::<Error>(apart[0], || {
        (0..2).try_for_each(|index| {
            team.dispatch(index, apart[0])?;
            team.combine(index, apart[0])
        })
    });
    require_refused(captured.map(drop))?;
    // Nothing of it waits outside.
    team.session.launch_all(TURN)?;
    team.verify(&apart)?;
    let round = |session: &mut Session, index| session.launch(index, TURN);
    let graphs = Graphs::capture(suite.group(), &mut team.session, round)?;
    let mut graphs = graphs.context("a device")?;
    for _ in 0..REPLAYS {
        graphs.launch(0)?;
        let (second, _) = graphs.each().nth(1).context("a second rank")?;
        require_refused(second.launch(apart[0]))?;
        (1..apart.len()).try_for_each(|index| graphs.launch(index))?;
        team.verify(&apart)?;
    }
    Ok(())
}
