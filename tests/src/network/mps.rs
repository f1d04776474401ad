//! A daemon of MPS: processes that share a GPU need one for NVSHMEM.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// The program that starts the daemon and speaks to it.
pub(crate) const PROGRAM: &str = "nvidia-cuda-mps-control";

/// The folder of the daemon's pipes.
pub(crate) const PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// The folder of its logs.
const LOGS: &str = "CUDA_MPS_LOG_DIRECTORY";
/// Folders of programs.
const FOLDERS: &str = "PATH";
/// The GPUs that a process sees.
pub(crate) const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// Longest start, and longest end.
const LONGEST: Duration = Duration::from_secs(30);

/// Whether a program is there: a path, or a name in one of the folders of programs.
pub(crate) fn is_installed(program: &OsStr) -> bool {
    let folders = env::var_os(FOLDERS).unwrap_or_default();
    env::split_paths(&folders).any(|folder| folder.join(program).is_file())
}

/// A daemon, which ends when this is dropped.
pub(crate) struct Mps {
    program: OsString,
    pipes: PathBuf,
    /// The folder of the program that waits for its turn.
    turns: PathBuf,
    gpus: usize,
    /// GPUs that the daemon sees, if not all.
    visible: Option<OsString>,
}

impl Mps {
    /// Starts a daemon with its files in a folder, of so many GPUs, which are the `visible` ones.
    pub(crate) fn start(
        program: &OsStr,
        folder: &Path,
        gpus: usize,
        visible: Option<OsString>,
    ) -> Result<Self> {
        let (pipes, logs) = (folder.join("pipes"), folder.join("logs"));
        fs::create_dir(&pipes).context("making the folder of MPS")?;
        fs::create_dir(&logs).context("making the folder of MPS")?;
        let mps = Self {
            program: program.into(),
            pipes,
            turns: take_turns(program, folder)?,
            gpus,
            visible,
        };
        let name = program.display();
        let started = mps.command().arg("-d").env(LOGS, logs).spawn();
        let started = started.with_context(|| {
            format!("starting {name}, which NVSHMEM needs if ranks share a GPU")
        })?;
        ensure!(has_ended(started, LONGEST), "{name} -d does not start");
        Ok(mps)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env(PIPES, &self.pipes).stdout(Stdio::null());
        command.envs(self.visible.iter().map(|gpus| (VISIBLE, gpus)));
        command
    }

    /// Variables of a process that uses it. The daemon numbers the GPUs that it sees from 0.
    pub(crate) fn variables(&self) -> Vec<(OsString, OsString)> {
        let folders = env::var_os(FOLDERS).unwrap_or_default();
        let mut variables = vec![
            (PIPES.into(), self.pipes.clone().into()),
            (
                FOLDERS.into(),
                super::joined(self.turns.as_os_str(), &folders, ":"),
            ),
        ];
        if self.visible.is_some() {
            let numbers: Vec<String> = (0..self.gpus).map(|gpu| gpu.to_string()).collect();
            variables.push((VISIBLE.into(), numbers.join(",").into()));
        }
        variables
    }

    /// Asks the daemon to end. Whether it did.
    fn quit(&self) -> bool {
        let Ok(mut child) = self.command().stdin(Stdio::piped()).spawn() else {
            return false;
        };
        let asked = child
            .stdin
            .take()
            .map(|mut stdin| writeln!(stdin, "quit -t 10"));
        matches!(asked, Some(Ok(()))) && has_ended(child, LONGEST)
    }
}

/// Makes a folder with a program of the same name, which waits until nobody else speaks to the daemon.
///
/// A PE of each host asks it whether it runs. The daemon hears one at a time, and whoever is refused takes it
/// that none runs: NVSHMEM's PEs then wait for each other in different calls, for ever.
fn take_turns(program: &OsStr, folder: &Path) -> Result<PathBuf> {
    let turns = folder.join("turns");
    let script = turns.join(PROGRAM);
    let folders = env::var_os(FOLDERS).unwrap_or_default();
    let [lock, program, folders] = [turns.join("lock").as_os_str(), program, &folders].map(quoted);
    let text = format!("#!/bin/sh\nPATH={folders} exec flock {lock} {program} \"$@\"\n");
    let make = || {
        fs::create_dir(&turns)?;
        fs::write(&script, text)?;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))
    };
    make().with_context(|| format!("making {}", script.display()))?;
    Ok(turns)
}

/// A text as a word of a shell.
fn quoted(text: &OsStr) -> String {
    format!("'{}'", text.to_string_lossy().replace('\'', "'\\''"))
}

/// Waits for a process; returns how it ended, if it did in time.
pub(crate) fn wait(child: &mut Child, limit: Instant) -> Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait().context("waiting for a process")? {
            return Ok(Some(status));
        }
        if Instant::now() >= limit {
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process ends well in time. It is killed if not.
fn has_ended(mut child: Child, within: Duration) -> bool {
    if let Ok(Some(end)) = wait(&mut child, Instant::now() + within) {
        return end.success();
    }
    // It may have ended meanwhile.
    let _ = child.kill();
    let _ = child.wait();
    false
}

impl Drop for Mps {
    fn drop(&mut self) {
        let file = self.pipes.join(format!("{PROGRAM}.pid"));
        let daemon = fs::read_to_string(file).unwrap_or_default();
        let daemon = daemon.trim();
        if self.quit() || daemon.is_empty() || !daemon.bytes().all(|byte| byte.is_ascii_digit()) {
            return;
        }
        // The daemon and its servers, which are no one else's.
        let servers = Command::new("pgrep").args(["-P", daemon]).output();
        let servers = servers.map(|output| output.stdout).unwrap_or_default();
        let servers = String::from_utf8_lossy(&servers).into_owned();
        let mut kill = Command::new("kill");
        kill.arg("-9").args(servers.split_whitespace()).arg(daemon);
        // Those that have ended cannot be killed.
        let _ = kill.status();
    }
}
