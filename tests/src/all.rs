//! `ferry-tests all`: every suite for GPUs, one after another, each in processes of this program.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::group;
use crate::network::mps::{self, Mps, VISIBLE};
use crate::network::{end_when_asked, folders_of_nvshmem, is_to_end, scratch};

/// The file beside the program that names its commit.
const COMMIT: &str = "commit";
/// Variables of all suites. NVLink multicast is off: some machines have it but do not let a process use it.
const VARIABLES: [(&str, &str); 2] = [("NVSHMEM_DISABLE_NVLS", "1"), ("NCCL_NVLS_ENABLE", "0")];

/// Run every suite for GPUs, one after another
///
/// Needs the driver, and for processes Open MPI, and NVSHMEM 3.4.5 in LD_LIBRARY_PATH or python3's packages.
/// If ranks share GPUs, NVSHMEM's suites, and some with killed processes, run under an MPS daemon each.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct AllArgs {
    /// GPUs, with a rank each [default: all that this program sees]
    #[arg(value_name = "N")]
    gpus: Option<usize>,
    /// Let this many ranks share the GPUs
    #[arg(long, value_name = "R")]
    ranks: Option<usize>,
    /// Only this suite; may be given several times
    #[arg(long, value_name = "SUITE")]
    only: Vec<String>,
    /// Only print the suites' names
    #[arg(long)]
    list: bool,
    /// Run small suites on one GPU under compute-sanitizer's memcheck, racecheck, synccheck and initcheck;
    /// with --ranks the quick suite under memcheck, and a round under racecheck
    #[arg(long)]
    sanitize: bool,
}

/// A call of this program.
struct Suite {
    name: String,
    /// Processes under mpirun.
    processes: Option<usize>,
    needs_mps: bool,
    arguments: Vec<String>,
}

/// A suite in a process, of a command whose words have spaces between them.
fn suite(name: impl Into<String>, arguments: &str) -> Suite {
    Suite {
        name: name.into(),
        processes: None,
        needs_mps: false,
        arguments: arguments.split(' ').map(String::from).collect(),
    }
}

impl Suite {
    fn with(mut self, flag: &str, value: String) -> Self {
        self.arguments.extend([flag.to_owned(), value]);
        self
    }

    const fn in_processes(mut self, processes: usize) -> Self {
        self.processes = Some(processes);
        self
    }

    const fn under_mps(mut self) -> Self {
        self.needs_mps = true;
        self
    }
}

/// Suites of a rank a GPU.
fn suites(gpus: usize) -> Vec<Suite> {
    let required = format!("--require-gpus {gpus}");
    let group = |kind| {
        let suite = suite(kind, &format!("gpu --group {kind} {required}"));
        suite.in_processes(gpus)
    };
    let mut suites = vec![
        suite("local", &format!("gpu {required}")),
        group("node"),
        group("nvshmem"),
    ];
    if gpus > 1 {
        suites.extend([
            suite("killed-node", &format!("killed --group node {required}")),
            suite("killed-nvshmem", &format!("killed {required}")),
        ]);
    }
    suites
}

/// Suites of ranks that share GPUs. Processes of a node group take turns without MPS.
fn suites_of_shared_gpus(gpus: usize, ranks: usize) -> Vec<Suite> {
    let shared = format!("--share-gpus --ranks {ranks} --require-gpus {gpus}");
    let smaller = [4, 2, 1].into_iter();
    let smaller = smaller.filter(|&size| size < ranks && ranks.is_multiple_of(size));
    let a_node = |size| format!(", {size} a node");
    let nvshmem = |size, arguments: &str| {
        let arguments = format!("gpu --group nvshmem {shared}{arguments}");
        let suite = suite(format!("nvshmem-{size}"), &arguments);
        suite.in_processes(ranks).under_mps()
    };
    let whole = nvshmem(ranks, "");
    let whole = smaller
        .clone()
        .fold(whole, |suite, size| suite.with("--skip", a_node(size)));
    let parts = smaller.map(|size| nvshmem(size, " --quick").with("--filter", a_node(size)));
    let mut suites = vec![suite("local", &format!("gpu {shared}")), whole];
    suites.extend(parts);
    let node = suite("node", &format!("gpu --group node {shared} --quick"));
    suites.push(node.in_processes(ranks));
    let demo = format!("demo --share-gpus --ranks {ranks}");
    suites.push(suite("demo", &demo));
    if ranks > 1 {
        let killed = format!("--deadline-ms 2000 {shared}");
        let of_node = format!("killed --group node {killed}");
        suites.extend([
            suite("killed-node", &of_node),
            suite("killed-node-mps", &of_node).under_mps(),
            suite("killed-nvshmem", &format!("killed {killed}")).under_mps(),
        ]);
    }
    suites
}

fn suites_of_sanitizer(ranks: Option<usize>) -> Vec<Suite> {
    let Some(ranks) = ranks else {
        return vec![suite("sanitize", "sanitize")];
    };
    let tool = |tool, seconds| {
        let arguments =
            format!("sanitize --tool {tool} --seconds {seconds} --share-gpus --ranks {ranks}");
        suite(tool, &arguments)
    };
    vec![tool("memcheck", 500), tool("racecheck", 120)]
}

impl AllArgs {
    /// The suites to run on so many GPUs.
    fn suites(&self, gpus: usize) -> Result<Vec<Suite>> {
        ensure!(gpus > 0, "no GPU was found");
        ensure!(self.ranks != Some(0), "--ranks 0: must be a number above 0");
        ensure!(
            !self.sanitize || gpus == 1,
            "--sanitize with {gpus} GPUs: the tools do not work with kernels that wait for other GPUs; give 1"
        );
        let mut suites = match self.ranks {
            ranks if self.sanitize => suites_of_sanitizer(ranks),
            Some(ranks) => suites_of_shared_gpus(gpus, ranks),
            None => suites(gpus),
        };
        let names: Vec<String> = suites.iter().map(|suite| suite.name.clone()).collect();
        if let Some(unknown) = self.only.iter().find(|name| !names.contains(name)) {
            bail!(
                "--only {unknown}: no such suite; there are {}",
                names.join(", ")
            );
        }
        suites.retain(|suite| self.only.is_empty() || self.only.contains(&suite.name));
        Ok(suites)
    }
}

/// Runs the suites, and ends with a line that counts them. An error if any failed.
pub fn run(args: &AllArgs) -> Result<()> {
    let gpus = args.gpus.unwrap_or_else(group::gpus);
    let suites = args.suites(gpus)?;
    if args.list {
        suites.iter().for_each(|suite| println!("{}", suite.name));
        return Ok(());
    }
    end_when_asked()?;
    let program = env::current_exe().context("finding this program")?;
    let commit = fs::read_to_string(program.with_file_name(COMMIT));
    let machine = Machine {
        program: program.into(),
        mpirun: "mpirun".into(),
        mps: mps::PROGRAM.into(),
        commit: commit.unwrap_or_else(|_| "unknown".into()),
        gpus,
        visible: args.ranks.map(|_| first(gpus, env::var_os(VISIBLE))),
    };
    machine.run_all(&suites)
}

/// The first `gpus` of those that are visible.
fn first(gpus: usize, visible: Option<OsString>) -> OsString {
    let all = || {
        (0..gpus)
            .map(|gpu| gpu.to_string())
            .collect::<Vec<_>>()
            .join(",")
    };
    let visible = visible.map_or_else(all, |visible| visible.to_string_lossy().into_owned());
    visible
        .split(',')
        .take(gpus)
        .collect::<Vec<_>>()
        .join(",")
        .into()
}

/// Programs, and GPUs.
struct Machine {
    /// This program.
    program: OsString,
    mpirun: OsString,
    mps: OsString,
    commit: String,
    gpus: usize,
    /// GPUs that suites see if ranks share them, which then have no MPS daemon but their own.
    visible: Option<OsString>,
}

impl Machine {
    fn run_all(&self, suites: &[Suite]) -> Result<()> {
        let [mut passed, mut failed, mut skipped] = [0; 3];
        for suite in suites {
            let name = &suite.name;
            println!("== {name}, commit {}", self.commit.trim());
            if suite.needs_mps && !mps::is_installed(&self.mps) {
                let missing = self.mps.display();
                println!(
                    "skip {name}: {missing} is missing, which NVSHMEM needs if processes share a GPU"
                );
                skipped += 1;
                continue;
            }
            match self.run(suite) {
                Ok(()) => passed += 1,
                Err(error) => {
                    println!("FAIL {name}: {error:#}");
                    failed += 1;
                }
            }
            ensure!(!is_to_end(), "ended by the user");
        }
        println!("ferry: {passed} passed, {failed} failed, {skipped} skipped");
        ensure!(failed == 0, "{failed} suites failed");
        Ok(())
    }

    /// Runs a suite to its end, and ends its daemon.
    fn run(&self, suite: &Suite) -> Result<()> {
        let folder = scratch()?;
        let mut command = match suite.processes {
            Some(processes) => {
                let mut mpirun = Command::new(&self.mpirun);
                mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n"]);
                mpirun.arg(processes.to_string()).arg(&self.program);
                mpirun
            }
            None => Command::new(&self.program),
        };
        command.args(&suite.arguments).envs(VARIABLES);
        command.env("LD_LIBRARY_PATH", folders_of_nvshmem());
        let mut daemon = None;
        if let Some(visible) = &self.visible {
            // An empty folder has no daemon.
            command.env(VISIBLE, visible).env(mps::PIPES, folder.path());
            if suite.needs_mps {
                let started =
                    Mps::start(&self.mps, folder.path(), self.gpus, Some(visible.clone()))?;
                command.envs(daemon.insert(started).variables());
            }
        }
        println!("+ {command:?}");
        let end = command
            .status()
            .with_context(|| format!("starting {command:?}"))?;
        // Before its folder.
        drop(daemon);
        ensure!(end.success(), "{end}");
        Ok(())
    }
}

#[cfg(test)]
mod tests;
