//! Opens a group from the command line: GPUs of this process, a process a GPU, or the simulator.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ferry::{Bootstrap, Group};

use crate::kernel_files::KernelFiles;

/// Longest wait for the other processes.
const RENDEZVOUS_TIMEOUT: Duration = Duration::from_secs(60);

/// Where the ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum GroupKind {
    /// GPUs of this process
    Local,
    /// A process a GPU, all on one node, without NVSHMEM; under mpirun, or with --rendezvous
    Node,
    /// A process a GPU; under mpirun, or with --rendezvous
    Nvshmem,
    /// No GPU: the simulator
    Simulated,
}

impl GroupKind {
    /// As the command line has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Node => "node",
            Self::Nvshmem => "nvshmem",
            Self::Simulated => "simulated",
        }
    }

    /// Whether it has a process a GPU.
    pub const fn has_processes(self) -> bool {
        matches!(self, Self::Node | Self::Nvshmem)
    }
}

/// How to open a group.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// Where the ranks are.
    pub kind: GroupKind,
    /// How many there are.
    pub ranks: usize,
    /// Of the simulator.
    pub seed: u64,
    /// Where processes meet, without MPI.
    pub rendezvous: Option<SocketAddr>,
    /// This process's rank, with `rendezvous`.
    pub rank: Option<u32>,
    /// PTX in place of the embedded one. Of it, a group loads the kernels; the probes are loaded by whoever
    /// launches them.
    pub files: KernelFiles,
}

impl GroupOptions {
    /// The number of ranks as Ferry takes it.
    fn ranks(&self) -> Result<u32> {
        let most = u32::MAX;
        u32::try_from(self.ranks)
            .with_context(|| format!("--ranks {}: it must be at most {most}", self.ranks))
    }
}

/// Exchanges bytes between the processes of a group: every process's, by rank. Collective.
pub type Gather = Box<dyn FnMut(&[u8]) -> Result<Vec<Vec<u8>>> + Send>;

/// A group, and a way to talk between its processes beside it.
pub struct OpenGroup {
    /// The group.
    pub group: Group,
    /// In one process, its own bytes come back.
    pub gather: Gather,
}

impl OpenGroup {
    /// Whether this process speaks for the group: prints and writes.
    pub fn is_first(&self) -> bool {
        self.group
            .local_ranks()
            .first()
            .is_some_and(|rank| rank.0 == 0)
    }

    /// What this process got, if no process failed; else the first failure, on all of them. So
    /// that none goes on to a collective call that the others never make. Collective.
    pub fn agree<T>(&mut self, result: Result<T>) -> Result<T> {
        let own = result.as_ref().err().map(|error| format!("{error:#}"));
        let all = (self.gather)(own.unwrap_or_default().as_bytes())?;
        match all.iter().find(|text| !text.is_empty()) {
            Some(text) => bail!("{}", String::from_utf8_lossy(text)),
            None => result,
        }
    }
}

/// GPUs of this machine; 0 without the feature `cuda` or a driver.
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
        GroupKind::Simulated => OpenGroup {
            group: Group::simulated(ranks, options.seed)?,
            gather: alone,
        },
        GroupKind::Local => OpenGroup {
            group: local(options)?,
            gather: alone,
        },
        GroupKind::Node | GroupKind::Nvshmem => {
            let bootstrap = bootstrap(options)?;
            let device = device_of(bootstrap.rank());
            over(options.kind, &options.files, bootstrap, device)?
        }
    })
}

#[cfg(feature = "cuda")]
fn local(options: &GroupOptions) -> Result<Group> {
    let devices: Vec<_> = (0..options.ranks).collect();
    let with = ferry::GroupOptions {
        kernels: options.files.kernels()?,
        ..Default::default()
    };
    Ok(Group::local_with(&devices, &with)?)
}

#[cfg(not(feature = "cuda"))]
fn local(_options: &GroupOptions) -> Result<Group> {
    bail!(
        "this program was built without the feature `cuda`, so it has no GPUs; use --group simulated"
    )
}

/// The GPU of a process: each has one of its own, and on a node ranks are numbered in a row.
pub(crate) fn device_of(rank: u32) -> usize {
    let local = std::env::var("OMPI_COMM_WORLD_LOCAL_RANK").ok();
    let local = local.and_then(|local| local.parse().ok());
    local.unwrap_or(rank as usize % gpus().max(1))
}

/// A group of processes, each with a GPU, over a bootstrap that this program goes on using. Collective.
#[cfg(not(feature = "cuda"))]
pub(crate) fn over(
    kind: GroupKind,
    _files: &KernelFiles,
    _bootstrap: Box<dyn Bootstrap>,
    _device: usize,
) -> Result<OpenGroup> {
    bail!(
        "this program was built without the feature `cuda`, so it has no {} group; use --group simulated",
        kind.name()
    )
}

/// A group of processes, each with a GPU, over a bootstrap that this program goes on using. Collective.
#[cfg(feature = "cuda")]
pub(crate) fn over(
    kind: GroupKind,
    files: &KernelFiles,
    bootstrap: Box<dyn Bootstrap>,
    device: usize,
) -> Result<OpenGroup> {
    use std::sync::{Arc, Mutex};

    let rank = bootstrap.rank();
    let with = ferry::GroupOptions {
        kernels: files.kernels()?,
        ..Default::default()
    };
    let bootstrap = Arc::new(Mutex::new(bootstrap));
    let shared = Box::new(Shared(bootstrap.clone()));
    let group = match kind {
        GroupKind::Node => Group::node_with(shared, device, &with)?,
        _ => {
            let library = None;
            Group::nvshmem_with(shared, ferry::NvshmemOptions { device, library }, &with)?
        }
    };
    debug_assert_eq!(group.local_ranks()[0].0, rank);
    let gather: Gather = Box::new(move |bytes| {
        let mut bootstrap = bootstrap
            .lock()
            .expect("no panic while holding the bootstrap");
        Ok(bootstrap.all_gather(bytes)?)
    });
    Ok(OpenGroup { group, gather })
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
// SAFETY: all is the inner bootstrap's. This program makes its own calls of it on every rank, in the same
// order.
unsafe impl Bootstrap for Shared {
    fn rank(&self) -> u32 {
        self.inner().rank()
    }

    fn ranks(&self) -> u32 {
        self.inner().ranks()
    }

    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, ferry::BootstrapError> {
        self.inner().all_gather(bytes)
    }
}

/// MPI if this program has it, else TCP.
pub(crate) fn bootstrap(options: &GroupOptions) -> Result<Box<dyn Bootstrap>> {
    if let Some(address) = options.rendezvous {
        let Some(rank) = options.rank else {
            bail!("--rendezvous needs --rank")
        };
        let ranks = options.ranks()?;
        let bootstrap = ferry::TcpBootstrap::connect(rank, ranks, address, RENDEZVOUS_TIMEOUT)?;
        return Ok(Box::new(bootstrap));
    }
    #[cfg(feature = "mpi")]
    return Ok(Box::new(crate::mpi_bootstrap::MpiBootstrap::new()?));
    #[cfg(not(feature = "mpi"))]
    bail!(
        "this program was built without the feature `mpi`; give --rendezvous HOST:PORT, --rank and --ranks"
    )
}
