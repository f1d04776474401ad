//! Processes that lose one of them: each survivor is told in time, leaves in time, and meets the
//! others again.

mod report;
mod survivor;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};

use crate::group::{GroupKind, gpus};
use crate::network::mps::wait;
use crate::network::{Network, free_address, is_to_end};
use ferry_rig::Dice;
use report::{Kill, RECOVERY, Report};

/// Word of a process when its rounds go on.
const READY: &str = "ready";
/// Word before a survivor's report.
const REPORT: &str = "report ";

/// Longest start of all processes.
const START: Duration = Duration::from_secs(120);
/// Longest time from the kill to the last report, beside the deadline.
const REPORTS: Duration = Duration::from_secs(60);
/// Exit codes of a survivor that succeeded, failed or panicked.
const OWN_EXITS: [i32; 3] = [0, 1, 101];
/// Longest end of a process that has reported, where it is only told.
const EXIT: Duration = Duration::from_secs(10);
/// The kill comes at most so late after all processes are ready.
const LATEST_KILL: Duration = Duration::from_millis(500);

/// Start one process per GPU and kill one of them, repeatedly
///
/// Each time all survivors must report the rank that was killed, within the deadline and a margin, and leave
/// the group without a hang. With --network, NVSHMEM may also end a survivor's process, within the same time,
/// unless the settings say lost=ignore.
#[derive(clap::Args, Clone, Debug)]
#[command(verbatim_doc_comment)]
pub struct KilledArgs {
    /// Place of the ranks: node, nvshmem, or simulated, where each process has a simulated rank of its
    /// own and all it has of the others is what they say to each other
    #[arg(long, value_enum, default_value = "nvshmem")]
    group: GroupKind,
    /// Let processes share the GPUs that are there: each has the next one, in turns
    #[arg(long)]
    pub share_gpus: bool,
    /// Processes [default: as many as there are GPUs]
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Fail if this machine has fewer GPUs
    #[arg(long, value_name = "N")]
    require_gpus: Option<usize>,
    /// Number of times
    #[arg(long, value_name = "N", default_value_t = 20)]
    times: u64,
    /// Longest wait of a kernel, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    deadline_ms: u64,
    /// Seed of the moments, and of who is killed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Whether survivors also try to make a communicator before they leave the group
    #[arg(long, hide = true)]
    tries_again: bool,
    /// File whose bytes are the key with which the processes meet
    #[arg(long, value_name = "FILE")]
    rendezvous_key: Option<PathBuf>,
    /// Run the processes, which --ranks counts, with a network of the tests between nodes: see `gpu --help`
    #[arg(long, value_name = "SETTINGS", conflicts_with = "rendezvous")]
    network: Option<String>,
    /// Ranks of a node [default: all; with --network 1]
    #[arg(long, value_name = "N")]
    node: Option<usize>,
    /// Address at which the processes meet: this is one of them
    #[arg(long, value_name = "HOST:PORT", hide = true, requires = "rank")]
    rendezvous: Option<SocketAddr>,
    /// Number of this process
    #[arg(long, hide = true, requires = "rendezvous")]
    rank: Option<u32>,
}

/// Starts the processes and kills one of them, again and again. An error if any survivor was not
/// told in time.
pub fn run(args: &KilledArgs) -> Result<()> {
    if let (Some(address), Some(rank)) = (args.rendezvous, args.rank) {
        return survivor::run(args, address, rank);
    }
    let found = gpus();
    if let Some(wanted) = args.require_gpus.filter(|&wanted| found < wanted) {
        bail!("--require-gpus {wanted}: this machine has {found}");
    }
    if args.group == GroupKind::Local {
        bail!("--group local: one process has all ranks of it");
    }
    let ranks = args.ranks.or(args.require_gpus).unwrap_or(found);
    if ranks < 2 {
        println!("skip a killed process: needs two processes");
        return Ok(());
    }
    let network = network_of(args, ranks, found)?;
    let mut failed = 0;
    let mut dice = Dice::new(args.seed);
    for time in 1..=args.times {
        ensure!(!is_to_end(), "ended by the user");
        let name = format!("a killed process, {time} of {}, {ranks} ranks", args.times);
        let start = Instant::now();
        match kill_one(args, network.as_ref(), ranks, time, &mut dice) {
            Ok(figures) => println!(
                "ok   {name} ({} ms): {figures}",
                start.elapsed().as_millis()
            ),
            Err(error) => {
                failed += 1;
                println!(
                    "FAIL {name} ({} ms): {error:#}",
                    start.elapsed().as_millis()
                );
            }
        }
    }
    println!("{} passed, {failed} failed, 0 skipped", args.times - failed);
    ensure!(failed == 0, "{failed} of {} times", args.times);
    Ok(())
}

/// The network between the processes, if there is to be one.
fn network_of(args: &KilledArgs, ranks: usize, gpus: usize) -> Result<Option<Network>> {
    let Some(settings) = &args.network else {
        return Ok(None);
    };
    ensure!(
        args.group == GroupKind::Nvshmem,
        "--group {}: --network is for nvshmem",
        args.group.name()
    );
    // Seen under MPS: survivors' kernels end with an illegal address, probably that of NVSHMEM's channel in
    // the memory of the process that was killed.
    ensure!(
        ranks <= gpus,
        "--network needs a GPU for each of the {ranks} ranks, and {gpus} were found: under MPS the \
         survivors' kernels end with those of a process that is killed"
    );
    let node = args.node.unwrap_or(1);
    Network::start(settings, node, ranks, gpus).map(Some)
}

/// Nanoseconds since 1970: processes compare theirs.
fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

/// Once: what was measured.
fn kill_one(
    args: &KilledArgs,
    network: Option<&Network>,
    ranks: usize,
    time: u64,
    dice: &mut Dice,
) -> Result<String> {
    let victim = dice.below(ranks) as u32;
    let moment = Duration::from_micros(dice.bits() % LATEST_KILL.as_micros() as u64);
    let mut processes = Processes::start(args, network, ranks, time.is_multiple_of(2))?;
    processes.wait_until_ready()?;
    std::thread::sleep(moment);
    let mut kill = Kill {
        victim,
        ns: now_ns(),
        deadline: Duration::from_millis(args.deadline_ms),
        recovers: args.group != GroupKind::Nvshmem,
        meets: true,
    };
    processes.kill(victim)?;
    processes.tell(victim, &format!("{victim} {}", free_address()?))?;
    let may_end = network.is_some_and(Network::ends_survivors);
    let (reports, ended) = processes.reports(victim, kill.deadline + REPORTS, may_end)?;
    // Survivors wait for all others that were not killed.
    kill.meets = ended.is_empty();
    let within = if kill.recovers { RECOVERY } else { EXIT };
    let exits = processes.wait_for_exits(victim, within)?;
    let mut problems = kill.problems(&reports);
    let own = ended.iter().filter(|&rank| exits.own.contains(rank));
    problems.extend(own.map(|rank| format!("rank {rank} ended by itself, and before its report")));
    // How a process ends that has lost others is NVSHMEM's business, where it is in: it is told, not judged.
    if kill.recovers {
        problems.extend(exits.problems.iter().cloned());
    }
    ensure!(problems.is_empty(), "{}", problems.join("; "));
    let moment = moment.as_millis();
    let ends = if exits.problems.is_empty() {
        format!(
            "ended {} ms after the last report",
            exits.slowest.as_millis()
        )
    } else {
        exits.problems.join("; ")
    };
    let told = match ended.as_slice() {
        [] => kill.figures(&reports),
        all if reports.is_empty() => format!("NVSHMEM ended ranks {all:?}"),
        some => format!("NVSHMEM ended ranks {some:?}; {}", kill.figures(&reports)),
    };
    Ok(format!(
        "rank {victim} killed after {moment} ms: {told}; {ends}"
    ))
}

/// End of the processes that had reported.
#[derive(Default)]
struct Exits {
    slowest: Duration,
    problems: Vec<String>,
    /// Ranks that ended otherwise than NVSHMEM ends a process: by a signal, or with the code of a program
    /// that succeeded, failed or panicked.
    own: Vec<u32>,
}

/// The processes, by rank. Dropped, they are killed.
struct Processes {
    children: Vec<Child>,
    /// Lines that they print; none at the end.
    lines: Receiver<(u32, Option<String>)>,
}

impl Processes {
    fn start(
        args: &KilledArgs,
        network: Option<&Network>,
        ranks: usize,
        tries_again: bool,
    ) -> Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        let address = free_address()?;
        let (sender, lines) = channel();
        let mut processes = Self {
            children: Vec::new(),
            lines,
        };
        let shares_gpus = args.share_gpus;
        let node = args.node.or(network.map(|_| 1));
        let node = node.map(|node| ["--node".to_owned(), node.to_string()]);
        let key = args.rendezvous_key.as_deref();
        let key = key.map(|file| [OsStr::new("--rendezvous-key"), file.as_os_str()]);
        for rank in 0..ranks as u32 {
            let mut command = Command::new(&program);
            command
                .args(["killed", "--ranks", &ranks.to_string()])
                .args(["--rank", &rank.to_string()])
                .args(["--rendezvous", &address.to_string()])
                .args(["--deadline-ms", &args.deadline_ms.to_string()])
                .args(["--seed", &args.seed.to_string()])
                .args(["--group", args.group.name()])
                .args(tries_again.then_some("--tries-again"))
                .args(shares_gpus.then_some("--share-gpus"))
                .args(node.iter().flatten())
                .args(key.iter().flatten())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped());
            if let Some(network) = network {
                network.add_to(&mut command, rank as usize);
            }
            let mut child = command
                .spawn()
                .with_context(|| format!("starting {}", program.display()))?;
            listen(rank, &mut child, sender.clone());
            processes.children.push(child);
        }
        Ok(processes)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let limit = Instant::now() + START;
        let mut missing: Vec<u32> = (0..self.children.len() as u32).collect();
        while !missing.is_empty() {
            let (rank, line) = self
                .line(limit)
                .with_context(|| format!("ranks {missing:?} are not ready after {START:?}"))?;
            match line.as_deref() {
                Some(READY) => missing.retain(|&other| other != rank),
                Some(line) => eprintln!("rank {rank}: {line}"),
                None => bail!("rank {rank} ended before all were ready"),
            }
        }
        Ok(())
    }

    /// The next line that any of them prints.
    fn line(&mut self, limit: Instant) -> Result<(u32, Option<String>)> {
        let left = limit.saturating_duration_since(Instant::now());
        Ok(self.lines.recv_timeout(left)?)
    }

    /// SIGKILL, and the end.
    fn kill(&mut self, rank: u32) -> Result<()> {
        let child = &mut self.children[rank as usize];
        child
            .kill()
            .with_context(|| format!("killing rank {rank}"))?;
        child
            .wait()
            .with_context(|| format!("waiting for rank {rank}"))?;
        Ok(())
    }

    /// Writes a line to all but one.
    fn tell(&mut self, victim: u32, line: &str) -> Result<()> {
        for (rank, child) in (0..).zip(&mut self.children) {
            if rank != victim {
                let stdin = child.stdin.as_mut().context("a process has no input")?;
                writeln!(stdin, "{line}").with_context(|| format!("telling rank {rank}"))?;
            }
        }
        Ok(())
    }

    /// Reports of the survivors, and those that ended without one, which only counts if they `may_end`.
    fn reports(
        &mut self,
        victim: u32,
        within: Duration,
        may_end: bool,
    ) -> Result<(Vec<Report>, Vec<u32>)> {
        let limit = Instant::now() + within;
        let mut missing: Vec<u32> = (0..self.children.len() as u32).collect();
        missing.retain(|&rank| rank != victim);
        let (mut reports, mut ended) = (Vec::new(), Vec::new());
        while !missing.is_empty() {
            let (rank, line) = self.line(limit).with_context(|| {
                format!(
                    "rank {victim} was killed; no report of ranks {missing:?} within {within:?}"
                )
            })?;
            // What the victim had still to say, and the end of those that have reported.
            if !missing.contains(&rank) {
                continue;
            }
            match line
                .as_deref()
                .map(|line| line.strip_prefix(REPORT).ok_or(line))
            {
                Some(Ok(report)) => reports.push(serde_json::from_str(report)?),
                Some(Err(line)) => {
                    eprintln!("rank {rank}: {line}");
                    continue;
                }
                None if may_end => ended.push(rank),
                None => bail!("rank {victim} was killed, and rank {rank} ended without a report"),
            }
            missing.retain(|&other| other != rank);
        }
        Ok((reports, ended))
    }

    fn wait_for_exits(&mut self, victim: u32, within: Duration) -> Result<Exits> {
        let start = Instant::now();
        let mut exits = Exits::default();
        for (rank, child) in (0..).zip(&mut self.children) {
            if rank == victim {
                continue;
            }
            match wait(child, start + within)? {
                Some(status) if status.success() => exits.own.push(rank),
                Some(status) => {
                    exits
                        .problems
                        .push(format!("rank {rank} ended with {status}"));
                    let is_own = status.code().is_none_or(|code| OWN_EXITS.contains(&code));
                    exits.own.extend(is_own.then_some(rank));
                }
                None => {
                    let problem = format!("rank {rank} has not ended {within:?} after its report");
                    exits.problems.push(problem);
                }
            }
        }
        exits.slowest = start.elapsed();
        Ok(exits)
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.children {
            // One that has ended already cannot be killed, and need not be.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Hands on what a process prints, line by line, until it ends.
fn listen(rank: u32, child: &mut Child, to: Sender<(u32, Option<String>)>) {
    let Some(printed) = child.stdout.take() else {
        return;
    };
    std::thread::spawn(move || {
        let lines = BufReader::new(printed).lines().map_while(Result::ok);
        for line in lines.map(Some).chain([None]) {
            if to.send((rank, line)).is_err() {
                return;
            }
        }
    });
}
