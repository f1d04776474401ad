//! Order of kernels on a GPU that ranks of one process share. A rank's kernel waits there for the others';
//! what waits for it before the others' are launched ends with the deadline.
//!
//! Each case says how it ended: right, slow, or with the deadline. Those that Ferry or the driver promises to
//! end right fail if they do not; what comes of the others is the driver's matter, and written down.

mod calls;
mod driver;
mod launches;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ferry::cuda::CudaDevice;
use ferry::{Config, Device, Error, Fault, FaultKind, Rank};
use ferry_reference::{Problem, bf16};

use super::ending::Ending;
use super::expected::require;
use super::rounds::{compare, returned};
use super::{Outcome, Suite};
use crate::group::GroupKind;
use ferry_rig::{Session, Settings, Turn};

/// Longest wait of a kernel.
const DEADLINE: Duration = Duration::from_secs(1);
/// Time that the first rank's kernel has to begin.
const HEAD_START: Duration = Duration::from_millis(2);
const HIDDEN: usize = 1024;
const TOKENS: usize = 16;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    if !has_one_gpu(suite) {
        return suite.check("what orders kernels on one GPU", |_| {
            let why = "the ranks are not those of one process on one GPU";
            Ok(Outcome::Skipped(why.into()))
        });
    }
    calls::run(suite)?;
    launches::run(suite)
}

/// Whether all ranks are in this process and share a GPU.
fn has_one_gpu(suite: &Suite<'_>) -> bool {
    let group = suite.group();
    let gpu_of = |rank: Rank| group.cuda(rank).map(|gpu| gpu.ordinal());
    let mut ranks = group.local_ranks().into_iter();
    let is_shared = suite.args.group == GroupKind::Local && ranks.len() > 1;
    is_shared && ranks.all(|rank| gpu_of(rank) == gpu_of(Rank(0)))
}

/// Runs a case on ranks of its own.
fn check(
    suite: &mut Suite<'_>,
    name: &str,
    case: impl FnOnce(&mut Scene) -> Result<Told>,
) -> Result<()> {
    suite.check(&format!("order on one GPU: {name}"), |suite| {
        let mut scene = Scene::new(suite, Kernels::Warm)?;
        let told = case(&mut scene);
        scene.close();
        told?.outcome(name)
    })
}

/// Ends of the rounds of a case.
struct Told {
    text: String,
    /// Each with the case of the table that it belongs to, where that is not the one that ran.
    endings: Vec<(Option<&'static str>, Ending)>,
}

impl Told {
    /// An error if a round ended otherwise than it must.
    fn outcome(self, name: &str) -> Result<Outcome> {
        for (other, ending) in &self.endings {
            require(other.unwrap_or(name), ending).context(self.text.clone())?;
        }
        Ok(Outcome::Measured(self.text))
    }
}

impl From<Ending> for Told {
    fn from(ending: Ending) -> Self {
        Self {
            text: ending.to_string(),
            endings: vec![(None, ending)],
        }
    }
}

/// Whether a scene's kernels have run before.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kernels {
    /// They have.
    Warm,
    /// They were made for a shape that no other scene has, and have not.
    New,
}

/// Ranks with a round to make, the first two of which share a GPU.
struct Scene {
    session: Session,
    /// Device of the first rank.
    device: Arc<CudaDevice>,
    problem: Problem,
    /// Results of the round, by rank.
    wanted: Vec<Vec<bf16>>,
    /// The time of a round, once one has run.
    usual: Duration,
}

impl Scene {
    fn new(suite: &Suite<'_>, kernels: Kernels) -> Result<Self> {
        let experts = 8 * suite.ranks();
        let problem = suite.uniform(TOKENS, [experts, 8, HIDDEN], suite.args.seed * 77);
        let config = Config {
            deadline: DEADLINE,
            specialise: kernels == Kernels::New,
            ..Config::new(
                experts,
                8,
                HIDDEN,
                TOKENS + usize::from(kernels == Kernels::New),
            )
        };
        let settings = Settings::of(config, std::slice::from_ref(&problem));
        let group = suite.group();
        let mut scene = Self {
            session: Session::new(group, &settings)?,
            device: group.cuda(Rank(0)).context("not on GPUs")?,
            wanted: returned(&problem),
            problem,
            usual: Duration::ZERO,
        };
        scene.session.upload(0, &scene.problem)?;
        scene.session.poison()?;
        if kernels == Kernels::Warm {
            for _ in 0..3 {
                match scene.others_behind_the_first(|_| Ok(()))? {
                    Ending::Right(took) | Ending::Slow(took) => scene.usual = took,
                    Ending::Deadline(told) => bail!("a round with nothing beside it: {told}"),
                }
            }
        }
        Ok(scene)
    }

    fn ranks(&self) -> usize {
        self.problem.ranks
    }

    /// A round, with a call between the launch of the first rank and those of the others.
    fn others_behind_the_first(
        &mut self,
        call: impl FnOnce(&CudaDevice) -> Result<()>,
    ) -> Result<Ending> {
        self.session.poison()?;
        let start = Instant::now();
        let launched = self.launch(call)?;
        self.wait()?;
        self.ending(start.elapsed(), launched)
    }

    /// Enqueues a round, with a call between the launch of the first rank and those of the others.
    fn launch(
        &mut self,
        call: impl FnOnce(&CudaDevice) -> Result<()>,
    ) -> Result<Result<(), Error>> {
        let launched = self.session.launch(0, Turn::RETURNED);
        std::thread::sleep(HEAD_START);
        call(&self.device)?;
        let mut others = 1..self.ranks();
        let launch = |index| self.session.launch(index, Turn::RETURNED);
        Ok(launched.and_then(|()| others.try_for_each(launch)))
    }

    /// Waits for the streams of all ranks, and asks the device nothing else.
    fn wait(&mut self) -> Result<()> {
        for index in 0..self.ranks() {
            let (_, stream) = self.session.local(index);
            self.device.synchronize(stream)?;
        }
        Ok(())
    }

    /// Judges the end of a round that took so long. An error if the results are wrong, or if ranks failed for
    /// another reason than that one did not come in time.
    fn ending(&self, took: Duration, launched: Result<(), Error>) -> Result<Ending> {
        let outcomes = self.session.outcomes();
        let errors = outcomes.into_iter().filter_map(|(_, said)| match said {
            Ok(None) => None,
            Ok(Some(input)) => Some(Error::Fault(input.0)),
            Err(error) => Some(error),
        });
        if let Some(error) = launched.err().into_iter().chain(errors).next() {
            return missed(error);
        }
        compare(&self.session, Turn::RETURNED, &self.wanted)?;
        Ok(Ending::of(took, self.usual))
    }

    /// Gives everything back; a communicator that gave up may say so.
    fn close(self) {
        let _ = self.session.close();
    }
}

/// The end of a round of which a rank said this.
fn missed(error: Error) -> Result<Ending> {
    match error {
        Error::PeerGaveUp { .. }
        | Error::Fault(Fault {
            kind: FaultKind::PeerTimeout,
            ..
        })
        | Error::Poisoned(Fault {
            kind: FaultKind::PeerTimeout,
            ..
        }) => Ok(Ending::Deadline(error.to_string())),
        other => bail!(other),
    }
}
