//! The processes of a test, from outside.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Processes to be started.
pub struct Job {
    pes: usize,
    folder: TempDir,
    variables: Vec<(String, String)>,
}

/// A process that has ended, and what it said.
pub struct Ended {
    pub text: String,
    pub success: bool,
    counts: String,
}

impl Ended {
    /// The value that it said by a name.
    pub fn said(&self, name: &str) -> &str {
        let line = self.text.lines().find_map(|line| {
            let (found, value) = line.strip_prefix('=')?.split_once(' ')?;
            (found == name).then_some(value)
        });
        line.unwrap_or_else(|| panic!("no {name} in {}", self.text))
    }

    pub fn number(&self, name: &str) -> u64 {
        self.said(name).parse().unwrap()
    }

    /// A count of the transport's.
    pub fn count(&self, name: &str) -> u64 {
        let (_, behind) = self
            .counts
            .split_once(&format!("\"{name}\":"))
            .unwrap_or_else(|| panic!("no {name} in {:?}: {}", self.counts, self.text));
        let digits = behind.split(|c: char| !c.is_ascii_digit()).next();
        digits.unwrap_or_default().parse().unwrap()
    }
}

impl Job {
    pub fn new(settings: &str, pes: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let settings = format!("{settings},memory=host,counts={}", folder.path().display());
        Self {
            pes,
            folder,
            variables: vec![("FERRY_NETWORK".into(), settings)],
        }
    }

    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// Starts the processes, and waits for all.
    pub fn run(&self, role: &str) -> Vec<Ended> {
        let mut children: Vec<Child> = (0..self.pes).map(|pe| self.start(role, pe)).collect();
        let lines = children.iter_mut().map(listen).collect::<Vec<_>>();
        let limit = Instant::now() + super::LONGEST;
        let mut texts = vec![String::new(); self.pes];
        let mut gathered: Vec<Option<String>> = vec![None; self.pes];
        let mut open = vec![true; self.pes];
        while open.contains(&true) {
            for (pe, lines) in lines.iter().enumerate() {
                match lines.recv_timeout(Duration::from_millis(1)) {
                    Ok(line) => match line.strip_prefix('@') {
                        Some(bytes) => gathered[pe] = Some(bytes.into()),
                        None => texts[pe] += &(line + "\n"),
                    },
                    Err(error) => {
                        open[pe] &= error != std::sync::mpsc::RecvTimeoutError::Disconnected
                    }
                }
            }
            if gathered.iter().all(Option::is_some) {
                let all: String = gathered.iter_mut().filter_map(Option::take).collect();
                for child in &mut children {
                    // One that has ended since does not read it.
                    let _ = writeln!(child.stdin.as_mut().unwrap(), "{all}");
                }
            }
            if Instant::now() > limit {
                children.iter_mut().for_each(|child| child.kill().unwrap());
                let all = texts.join("\n---\n");
                panic!("{role} takes longer than {:?}: {all}", super::LONGEST);
            }
        }
        let mut ended = Vec::new();
        for (pe, (mut child, text)) in children.into_iter().zip(texts).enumerate() {
            let success = child.wait().unwrap().success();
            let file = self.folder.path().join(format!("{pe}.json"));
            let counts = fs::read_to_string(file).unwrap_or_default();
            ended.push(Ended {
                text,
                success,
                counts,
            });
        }
        ended
    }

    fn start(&self, role: &str, pe: usize) -> Child {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["--exact", "process", "--nocapture"])
            .env("ROLE", role)
            .env("PE", pe.to_string())
            .env("PES", self.pes.to_string())
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().unwrap()
    }
}

/// All lines of a process.
fn listen(child: &mut Child) -> Receiver<String> {
    let (sender, lines) = channel();
    let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let errors = sender.clone();
    thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    thread::spawn(move || {
        for line in BufReader::new(err).lines().map_while(Result::ok) {
            let _ = errors.send(line);
        }
    });
    lines
}
