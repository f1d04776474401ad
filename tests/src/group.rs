//! Opens a group from the command line: GPUs of this process, one process per GPU, or the simulator.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ferry::Group;
use ferry::bootstrap::{Bootstrap, TcpBootstrap};

use crate::kernel_files::KernelFiles;
use crate::sharing;
#[cfg(feature = "cuda")]
use crate::sharing::Gpus;

/// Longest wait for the other processes.
const RENDEZVOUS_TIMEOUT: Duration = Duration::from_secs(60);

/// Kinds of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum GroupKind {
    /// GPUs of this process
    Local,
    /// One process per GPU, all on one node, without NVSHMEM; under mpirun, or with --rendezvous
    Node,
    /// One process per GPU; under mpirun, or with --rendezvous
    Nvshmem,
    /// The simulator, without a GPU
    Simulated,
}

impl GroupKind {
    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Node => "node",
            Self::Nvshmem => "nvshmem",
            Self::Simulated => "simulated",
        }
    }

    /// Whether every rank is a process of its own.
    pub const fn has_processes(self) -> bool {
        matches!(self, Self::Node | Self::Nvshmem)
    }
}

/// Command-line options of every program that opens a group.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct GroupArgs {
    /// Share the available GPUs among the ranks, round-robin
    #[arg(long)]
    pub share_gpus: bool,
    /// Address at which processes meet without MPI
    #[arg(long, value_name = "HOST:PORT")]
    pub rendezvous: Option<SocketAddr>,
    /// Rank of this process, with --rendezvous
    #[arg(long)]
    pub rank: Option<u32>,
    /// File whose bytes are the key of all ranks, with --rendezvous; without a key, anybody who can connect
    /// can take a rank's place
    #[arg(long, value_name = "FILE", requires = "rendezvous")]
    pub rendezvous_key: Option<PathBuf>,
    /// Run the ranks, which --ranks counts, as processes of this machine in an NVSHMEM group, with a network
    /// of the tests between nodes: ORDER[,NAME=VALUE]..., ORDER being fifo, fence, relaxed or broken; for
    /// gpu, replay and soak. Starts an MPS daemon if ranks share GPUs
    #[cfg(feature = "suites")]
    #[arg(long, value_name = "SETTINGS", conflicts_with_all = ["rendezvous", "rank", "rendezvous_key"])]
    pub network: Option<ferry_network::settings::Settings>,
    /// Ranks of a node, the others of which are reached as if they were remote [default: all; with --network
    /// 1]; of gpu's tests, those for other nodes are left out
    #[cfg(feature = "suites")]
    #[arg(long, value_name = "N")]
    pub node: Option<usize>,
}

/// Options of a group.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// Kind of the group.
    pub kind: GroupKind,
    /// Number of ranks.
    pub ranks: usize,
    /// Seed of the simulator.
    pub seed: u64,
    /// Sharing of GPUs, and rendezvous of processes.
    pub args: GroupArgs,
    /// PTX in place of the embedded one. A group loads only the kernels; a caller that launches probes loads
    /// them itself.
    pub files: KernelFiles,
}

impl GroupOptions {
    /// Number of ranks in Ferry's type.
    fn ranks(&self) -> Result<u32> {
        let most = u32::MAX;
        u32::try_from(self.ranks)
            .with_context(|| format!("--ranks {}: must be at most {most}", self.ranks))
    }

    /// This machine's GPUs.
    #[cfg(feature = "cuda")]
    fn gpus(&self) -> Gpus {
        Gpus {
            found: gpus(),
            shared: self.args.share_gpus,
        }
    }

    /// GPU of each rank of a local group.
    #[cfg(feature = "cuda")]
    pub fn devices(&self) -> Vec<usize> {
        let gpus = self.gpus();
        (0..self.ranks).map(|rank| gpus.of_rank(rank)).collect()
    }

    /// Options of the library, with these kernels.
    #[cfg(feature = "cuda")]
    pub fn of_library(&self, kernels: ferry::Kernels) -> ferry::GroupOptions {
        ferry::GroupOptions {
            kernels,
            share_gpus: self.args.share_gpus,
            ..ferry::GroupOptions::default()
        }
    }
}

/// Sends bytes to all processes of a group, and returns every process's by rank. Collective.
pub type Gather = Box<dyn FnMut(&[u8]) -> Result<Vec<Vec<u8>>> + Send>;

/// A group, and an exchange of bytes between its processes.
pub struct OpenGroup {
    /// The group.
    pub group: Group,
    /// Exchange of bytes; a single process gets its own back.
    pub gather: Gather,
    /// Most ranks on one GPU.
    pub ranks_per_gpu: usize,
}

impl OpenGroup {
    /// Returns a group with its exchange of bytes.
    pub fn new(group: Group, gather: Gather) -> Self {
        let ranks_per_gpu = sharing::ranks_per_gpu(&group);
        Self {
            group,
            gather,
            ranks_per_gpu,
        }
    }

    /// Scales a longest wait of ranks with a GPU each to these: ranks that share one take turns.
    pub fn scaled(&self, wait: Duration) -> Duration {
        wait * self.ranks_per_gpu as u32
    }

    /// Whether this process prints and writes for the group.
    pub fn is_first(&self) -> bool {
        self.group
            .local_ranks()
            .first()
            .is_some_and(|rank| rank.0 == 0)
    }

    /// Returns `result` if no process failed, else the first failure on all of them, so that none goes on
    /// to a collective call that the others never make. Collective.
    pub fn agree<T>(&mut self, result: Result<T>) -> Result<T> {
        let own = result.as_ref().err().map(|error| format!("{error:#}"));
        let all = (self.gather)(own.unwrap_or_default().as_bytes())?;
        match all.iter().find(|text| !text.is_empty()) {
            Some(text) => bail!("{}", String::from_utf8_lossy(text)),
            None => result,
        }
    }
}

/// Number of GPUs of this machine; 0 without the feature `cuda` or a driver.
pub fn gpus() -> usize {
    #[cfg(feature = "cuda")]
    return ferry::cuda::device_count().unwrap_or(0);
    #[cfg(not(feature = "cuda"))]
    0
}

/// Opens a group. Collective.
pub fn open(options: &GroupOptions) -> Result<OpenGroup> {
    let ranks = options.ranks()?;
    let flag = options.files.given().next();
    if let (GroupKind::Simulated, Some((flag, _))) = (options.kind, flag) {
        bail!("{flag}: the simulator has none; give --group local, node or nvshmem");
    }
    let alone: Gather = Box::new(|bytes| Ok(vec![bytes.to_vec()]));
    Ok(match options.kind {
        GroupKind::Simulated => OpenGroup::new(Group::simulated(ranks, options.seed)?, alone),
        GroupKind::Local => OpenGroup::new(local(options)?, alone),
        GroupKind::Node | GroupKind::Nvshmem => {
            let bootstrap = bootstrap(options)?;
            let place = place_of(bootstrap.rank());
            over(options, bootstrap, place)?
        }
    })
}

#[cfg(feature = "cuda")]
fn local(options: &GroupOptions) -> Result<Group> {
    let of_library = options.of_library(options.files.kernels()?);
    Ok(Group::local(&options.devices(), &of_library)?)
}

#[cfg(not(feature = "cuda"))]
fn local(_options: &GroupOptions) -> Result<Group> {
    bail!(
        "this program was built without the feature `cuda`, so it has no GPUs; use --group simulated"
    )
}

/// Index of a process on its machine: from mpirun, or as if each machine's GPUs had consecutive ranks.
pub(crate) fn place_of(rank: u32) -> usize {
    let local = std::env::var("OMPI_COMM_WORLD_LOCAL_RANK").ok();
    let local = local.and_then(|local| local.parse().ok());
    local.unwrap_or(rank as usize % gpus().max(1))
}

/// Opens a group of processes over a bootstrap that this program goes on using; `place` is this process's
/// index on its machine. Collective.
#[cfg(not(feature = "cuda"))]
pub(crate) fn over(
    options: &GroupOptions,
    _bootstrap: Box<dyn Bootstrap>,
    _place: usize,
) -> Result<OpenGroup> {
    bail!(
        "this program was built without the feature `cuda`, so it has no {} group; use --group simulated",
        options.kind.name()
    )
}

/// Opens a group of processes over a bootstrap that this program goes on using; `place` is this process's
/// index on its machine. Collective.
#[cfg(feature = "cuda")]
pub(crate) fn over(
    options: &GroupOptions,
    bootstrap: Box<dyn Bootstrap>,
    place: usize,
) -> Result<OpenGroup> {
    use std::sync::{Arc, Mutex};

    let rank = bootstrap.rank();
    let of_library = options.of_library(options.files.kernels()?);
    let device = options.gpus().of_rank(place);
    let bootstrap = Arc::new(Mutex::new(bootstrap));
    let shared = Box::new(Shared(bootstrap.clone()));
    let group = match options.kind {
        GroupKind::Node => Group::node(shared, device, &of_library)?,
        _ => Group::nvshmem(shared, device, &of_library)?,
    };
    debug_assert_eq!(group.local_ranks()[0].0, rank);
    let gather: Gather = Box::new(move |bytes| {
        let mut bootstrap = bootstrap
            .lock()
            .expect("no panic while holding the bootstrap");
        Ok(bootstrap.all_gather(bytes)?)
    });
    Ok(OpenGroup::new(group, gather))
}

/// A bootstrap that the group and this program share.
#[cfg(feature = "cuda")]
struct Shared(std::sync::Arc<std::sync::Mutex<Box<dyn Bootstrap>>>);

#[cfg(feature = "cuda")]
impl Shared {
    fn inner(&self) -> std::sync::MutexGuard<'_, Box<dyn Bootstrap>> {
        self.0.lock().expect("no panic while holding the bootstrap")
    }
}

#[cfg(feature = "cuda")]
// SAFETY: ranks, order and bytes are those of the inner bootstrap, which keeps the promises of `Bootstrap`.
// This program makes its own calls of it on every rank, in the same order.
unsafe impl Bootstrap for Shared {
    fn rank(&self) -> u32 {
        self.inner().rank()
    }

    fn ranks(&self) -> u32 {
        self.inner().ranks()
    }

    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, ferry::error::BootstrapError> {
        self.inner().all_gather(bytes)
    }
}

/// Meets the other processes over TCP, with the key in a file if one is named.
pub(crate) fn meet(
    rank: u32,
    ranks: u32,
    address: SocketAddr,
    timeout: Duration,
    key: Option<&Path>,
) -> Result<TcpBootstrap> {
    let Some(file) = key else {
        return Ok(TcpBootstrap::connect(rank, ranks, address, timeout)?);
    };
    let flag = || format!("--rendezvous-key {}", file.display());
    let key = std::fs::read(file).with_context(flag)?;
    TcpBootstrap::connect_with_key(rank, ranks, address, timeout, &key).with_context(flag)
}

/// Bootstraps over TCP with `--rendezvous`, else over MPI if this program has it.
pub(crate) fn bootstrap(options: &GroupOptions) -> Result<Box<dyn Bootstrap>> {
    if let Some(address) = options.args.rendezvous {
        let Some(rank) = options.args.rank else {
            bail!("--rendezvous needs --rank")
        };
        let (ranks, key) = (options.ranks()?, options.args.rendezvous_key.as_deref());
        let bootstrap = meet(rank, ranks, address, RENDEZVOUS_TIMEOUT, key)?;
        return Ok(Box::new(bootstrap));
    }
    #[cfg(feature = "mpi")]
    return Ok(Box::new(crate::mpi_bootstrap::MpiBootstrap::new()?));
    #[cfg(not(feature = "mpi"))]
    bail!(
        "this program was built without the feature `mpi`; give --rendezvous HOST:PORT, --rank and --ranks"
    )
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use tempfile::NamedTempFile;

    use super::*;

    /// Writes a file.
    fn file(bytes: &[u8]) -> NamedTempFile {
        let file = NamedTempFile::new().unwrap();
        std::fs::write(&file, bytes).unwrap();
        file
    }

    #[test]
    fn processes_meet_if_their_files_have_the_same_bytes() {
        let [one, same, other] = [1, 1, 2].map(|byte| file(&[0, byte, b'\n', 0xff]));
        let met = |keys: [&NamedTempFile; 2]| {
            let free = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = free.local_addr().unwrap();
            drop(free);
            std::thread::scope(|scope| {
                let threads = [0, 1].map(|rank| {
                    let (key, timeout) = (keys[rank as usize].path(), Duration::from_secs(2));
                    scope.spawn(move || meet(rank, 2, address, timeout, Some(key)))
                });
                threads.map(|thread| thread.join().unwrap())
            })
        };
        assert!(met([&one, &same]).iter().all(Result::is_ok));
        for refused in met([&one, &other]) {
            let text = format!("{:#}", refused.unwrap_err());
            assert!(
                text.contains("--rendezvous-key") && text.contains("another"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_file_that_is_not_there_or_is_empty_is_named() {
        let address = "127.0.0.1:0".parse().unwrap();
        let refused = |path: &Path| {
            let refused = meet(0, 1, address, Duration::ZERO, Some(path));
            format!("{:#}", refused.unwrap_err())
        };
        let empty = file(&[]);
        for path in [empty.path(), Path::new("no/such/file")] {
            let text = refused(path);
            let flag = format!("--rendezvous-key {}", path.display());
            assert!(text.contains(&flag), "{text}");
        }
    }
}
