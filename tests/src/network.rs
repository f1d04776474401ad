//! `--network`: the ranks of a command as processes of this machine, with the tests' network between them.
//!
//! `Launch` starts the processes, and a daemon of MPS where ranks share GPUs, and ends them all, also after
//! Ctrl-C. Each process preloads the transport, which has NVSHMEM think that it is on a node of a few ranks.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ferry_network::{counts, host_name, settings};
use tempfile::TempDir;

use crate::group::gpus;

pub(crate) mod mps;

use mps::Mps;

/// The transport's file, beside this program.
const LIBRARY: &str = "libnvshmem_transport_ferry.so";
/// NVSHMEM's library.
const NVSHMEM: &str = "libnvshmem_host.so.3";
/// Folders of the loader.
const FOLDERS: &str = "LD_LIBRARY_PATH";
/// Prints the folder of NVSHMEM among Python's packages.
const OF_PYTHON: &str = "import os, sys
folders = (os.path.join(path, 'nvidia', 'nvshmem', 'lib') for path in sys.path)
print(next((f for f in folders if os.path.exists(os.path.join(f, sys.argv[1]))), ''))";
/// Longest that the others go on after a process has failed.
const AFTER_FAILURE: Duration = Duration::from_secs(60);

/// Variables that NVSHMEM needs. `host/docs/checks.md` says why.
const VARIABLES: [(&str, &str); 5] = [
    ("NVSHMEM_REMOTE_TRANSPORT", "ucx"),
    ("NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY", "AF_INET"),
    ("NVSHMEM_DISABLE_MNNVL", "1"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
    ("NCCL_NVLS_ENABLE", "0"),
];

/// Whether the user wants all to end.
static ENDS: AtomicBool = AtomicBool::new(false);

/// The network of processes: their variables, the folder of their counts, and a daemon of MPS where they
/// share GPUs. A drop ends the daemon and removes the folder.
pub struct Network {
    settings: String,
    /// Ranks of a node.
    node: usize,
    /// Whether NVSHMEM is told of a lost peer, and then ends the process.
    ends_survivors: bool,
    /// Variables of all.
    variables: Vec<(OsString, OsString)>,
    // The daemon ends before its folder.
    mps: Option<Mps>,
    folder: Option<TempDir>,
}

impl Network {
    /// A network with these settings between nodes of `node` ranks each, which divide `ranks`.
    fn new(settings: &str, node: usize, ranks: usize) -> Result<Self> {
        let parsed = settings
            .parse::<settings::Settings>()
            .with_context(|| format!("--network {settings}"))?;
        ensure!(
            ranks.is_multiple_of(node),
            "--node {node}: does not divide the {ranks} of --ranks"
        );
        let alone = (node == 1).then_some(("NVSHMEM_DISABLE_NCCL", "1"));
        let variables = VARIABLES.into_iter().chain(alone);
        Ok(Self {
            settings: settings.to_owned(),
            node,
            ends_survivors: parsed.lost == settings::Lost::Error,
            variables: variables
                .map(|(name, value)| (name.into(), value.into()))
                .collect(),
            mps: None,
            folder: None,
        })
    }

    /// Finds the transport, and NVSHMEM.
    fn load(&mut self, program: &Path) -> Result<()> {
        let library = library(program)?;
        let preloaded = env::var_os("LD_PRELOAD").unwrap_or_default();
        let preloaded = joined(library.as_os_str(), &preloaded, ":");
        self.variables.push(("LD_PRELOAD".into(), preloaded));
        self.variables.push((FOLDERS.into(), folders_of_nvshmem()));
        Ok(())
    }

    /// Makes the folder, and starts the daemon that `mps` names if ranks share the `gpus` GPUs.
    fn open(&mut self, mps: &OsStr, shares_gpus: bool, gpus: usize) -> Result<()> {
        let folder = self.folder.insert(scratch()?);
        if shares_gpus {
            let visible = env::var_os(mps::VISIBLE);
            let daemon = Mps::start(mps, folder.path(), gpus, visible)?;
            let daemon = self.mps.insert(daemon);
            self.variables.extend(daemon.variables());
        }
        Ok(())
    }

    /// A network for `ranks` processes of this program, which the caller starts: see
    /// [`add_to`](Self::add_to).
    pub fn start(settings: &str, node: usize, ranks: usize, gpus: usize) -> Result<Self> {
        end_when_asked()?;
        let mut network = Self::new(settings, node, ranks)?;
        network.load(&env::current_exe().context("finding this program")?)?;
        network.open(OsStr::new(mps::PROGRAM), ranks > gpus, gpus)?;
        Ok(network)
    }

    /// Adds the variables of a rank to the command that starts it.
    pub fn add_to(&self, command: &mut Command, rank: usize) {
        let counts = self.folder.iter();
        let counts: String = counts
            .map(|folder| format!(",counts={}", folder.path().display()))
            .collect();
        command
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .env(settings::VARIABLE, format!("{}{counts}", self.settings))
            .env(host_name::VARIABLE, format!("node{}", rank / self.node));
    }

    /// Whether NVSHMEM may end the process of a rank that has lost a peer.
    pub const fn ends_survivors(&self) -> bool {
        self.ends_survivors
    }

    /// Prints what the transport of each of the ranks counted.
    pub fn print_counts(&self, ranks: usize) {
        let Some(folder) = &self.folder else {
            return;
        };
        for rank in 0..ranks {
            let text = fs::read_to_string(counts::file(folder.path(), rank)).unwrap_or_default();
            println!("network of rank {rank}: {}", text.trim());
        }
    }
}

/// Settings of the network of which this process is a rank, as `--network` gave them.
pub fn of_this_process() -> Option<String> {
    let text = env::var(settings::VARIABLE).ok()?;
    let given = text.split(",counts=").next()?;
    Some(given.to_owned())
}

/// Whether the user wants all to end: Ctrl-C is only noted once a network was started.
pub fn is_to_end() -> bool {
    ENDS.load(Ordering::Relaxed)
}

/// Has Ctrl-C only noted from here on.
pub(crate) fn end_when_asked() -> Result<()> {
    ctrlc::set_handler(|| ENDS.store(true, Ordering::Relaxed)).context("listening for Ctrl-C")
}

/// Processes to be started.
struct Launch {
    program: PathBuf,
    /// Arguments of all.
    arguments: Vec<OsString>,
    ranks: usize,
    shares_gpus: bool,
    network: Network,
}

/// Takes `name VALUE` and `name=VALUE` out of arguments; returns the last value.
pub(crate) fn take(arguments: &mut Vec<OsString>, name: &str) -> Option<OsString> {
    let mut value = None;
    let with_value = format!("{name}=");
    let mut rest = std::mem::take(arguments).into_iter();
    while let Some(argument) = rest.next() {
        let inline = argument
            .to_str()
            .and_then(|text| text.strip_prefix(&with_value));
        match inline {
            Some(text) => value = Some(text.into()),
            None if argument == name => value = rest.next(),
            None => arguments.push(argument),
        }
    }
    value
}

/// A number among arguments, which it leaves.
fn number(arguments: &mut Vec<OsString>, name: &str) -> Result<Option<usize>> {
    let Some(text) = take(arguments, name) else {
        return Ok(None);
    };
    let text = text.to_string_lossy();
    let number = text.parse().ok().filter(|number| *number > 0);
    let number = number.with_context(|| format!("{name} {text}: must be a number above 0"))?;
    Ok(Some(number))
}

impl Launch {
    /// Processes for the arguments of a command, without its name, on so many GPUs.
    fn new(mut arguments: Vec<OsString>, gpus: usize) -> Result<Self> {
        let settings = take(&mut arguments, "--network").unwrap_or_default();
        let settings = settings.to_string_lossy();
        settings
            .parse::<settings::Settings>()
            .with_context(|| format!("--network {settings}"))?;
        ensure!(
            arguments.first().is_none_or(|command| command != "bench"),
            "--network: not for bench, whose ranks begin together by memory that all of them map"
        );
        let ranks = number(&mut arguments, "--ranks")?.context("--network needs --ranks")?;
        let node = number(&mut arguments, "--node")?.unwrap_or(1);
        let network = Network::new(&settings, node, ranks)?;
        let group = take(&mut arguments, "--group");
        if let Some(group) = group.filter(|group| group != "nvshmem") {
            bail!("--group {}: --network is for nvshmem", group.display());
        }
        ensure!(gpus > 0, "--network: no GPU was found");
        let given = arguments
            .iter()
            .position(|argument| argument == "--share-gpus");
        given.map(|index| arguments.remove(index));
        let shares_gpus = ranks > gpus;
        arguments.extend(["--group", "nvshmem", "--ranks", &ranks.to_string()].map(OsString::from));
        arguments.extend(["--node", &node.to_string()].map(OsString::from));
        arguments.extend(shares_gpus.then(|| "--share-gpus".into()));
        Ok(Self {
            program: env::current_exe().context("finding this program")?,
            arguments,
            ranks,
            shares_gpus,
            network,
        })
    }

    /// Arguments and variables of a rank.
    fn command(&self, rank: usize, address: &str) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .args(["--rank", &rank.to_string(), "--rendezvous", address]);
        self.network.add_to(&mut command, rank);
        command
    }

    /// Starts all processes, and waits until they have ended. An error if one failed.
    fn run(&self) -> Result<()> {
        let address = free_address()?.to_string();
        let mut processes = Processes(Vec::new());
        for rank in 0..self.ranks {
            let mut command = self.command(rank, &address);
            let child = command.spawn();
            let child = child.with_context(|| format!("starting {}", self.program.display()))?;
            processes.0.push((child, None));
        }
        let ends = processes.wait();
        self.network.print_counts(self.ranks);
        for (rank, end) in ends?.into_iter().enumerate() {
            ensure!(end.success(), "rank {rank} ended with {end}");
        }
        Ok(())
    }
}

/// Processes that are killed when they are dropped, and how they ended.
struct Processes(Vec<(Child, Option<ExitStatus>)>);

impl Processes {
    /// Waits until all have ended, or so long after one has failed.
    fn wait(&mut self) -> Result<Vec<ExitStatus>> {
        let mut failed: Option<Instant> = None;
        loop {
            for (child, end) in self.0.iter_mut().filter(|(_, end)| end.is_none()) {
                *end = child.try_wait().context("waiting for a process")?;
                if end.is_some_and(|end| !end.success()) {
                    failed.get_or_insert_with(Instant::now);
                }
            }
            let ends: Option<Vec<_>> = self.0.iter().map(|(_, end)| *end).collect();
            if let Some(ends) = ends {
                return Ok(ends);
            }
            ensure!(!is_to_end(), "ended by the user");
            if failed.is_some_and(|since| since.elapsed() > AFTER_FAILURE) {
                let ended = |(rank, (_, end)): (usize, &(_, Option<ExitStatus>))| {
                    end.map_or_else(
                        || format!("rank {rank} goes on"),
                        |end| format!("rank {rank}: {end}"),
                    )
                };
                let all: Vec<String> = self.0.iter().enumerate().map(ended).collect();
                bail!("{AFTER_FAILURE:?} after a failure: {}", all.join(", "));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for (child, end) in &mut self.0 {
            if end.is_none() {
                // One that has ended meanwhile cannot be killed, and need not be.
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

/// An address that nobody listens on at the moment.
pub(crate) fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("finding a free port")?;
    Ok(listener.local_addr()?)
}

/// A folder that is removed when it is dropped.
pub(crate) fn scratch() -> Result<TempDir> {
    let made = tempfile::Builder::new().prefix("ferry-").tempdir();
    made.context("making a folder")
}

/// The transport beside this program.
fn library(program: &Path) -> Result<PathBuf> {
    let library = program.with_file_name(LIBRARY);
    ensure!(
        library.exists(),
        "--network: {} is missing: `cargo build --release -p ferry-network-plugin` makes it, and \
         `cargo xtask dist` packs it",
        library.display()
    );
    Ok(library)
}

/// The loader's folders, with that of NVSHMEM if only Python has it.
pub(crate) fn folders_of_nvshmem() -> OsString {
    let folders = env::var_os(FOLDERS).unwrap_or_default();
    if env::split_paths(&folders).any(|folder| folder.join(NVSHMEM).exists()) {
        return folders;
    }
    let found = Command::new("python3")
        .args(["-c", OF_PYTHON, NVSHMEM])
        .output();
    let found = found.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    match found {
        Ok(found) if !found.is_empty() => joined(OsStr::new(&found), &folders, ":"),
        _ => folders,
    }
}

/// Two texts with a separator between them, unless the second one is empty.
fn joined(first: &OsStr, second: &OsStr, separator: &str) -> OsString {
    let mut all = first.to_owned();
    if !second.is_empty() {
        all.push(separator);
        all.push(second);
    }
    all
}

/// Runs this program's command, whose arguments have `--network`, as a process for each rank.
pub fn run() -> Result<()> {
    let mut launch = Launch::new(env::args_os().skip(1).collect(), gpus())?;
    launch.network.load(&launch.program)?;
    run_all(launch, OsStr::new(mps::PROGRAM), gpus())
}

/// Runs a launch on so many GPUs, with a daemon of MPS if it shares them, until it has ended or the user ends
/// it.
fn run_all(mut launch: Launch, mps: &OsStr, gpus: usize) -> Result<()> {
    end_when_asked()?;
    launch.network.open(mps, launch.shares_gpus, gpus)?;
    launch.run()
}

#[cfg(test)]
mod tests;
