//! A machine whose ranks are processes: in that of rank 0 are the machine, and a thread for each connection.

use std::io::{Error, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{iter, thread};

use crate::args::from_bytes;
use crate::error::SimulatorError;
use crate::lane::{MOST_BYTES, receive, refused, send, word};
use crate::options::Options;
use crate::remote::{MOST_OF_HELLO, MOST_OF_KEY, MOST_OF_PATH, PAUSE, Remote, VERSION, operation};
use crate::simulator::Simulator;
use crate::socket::{Socket, listen};

/// Longest wait for a newcomer's hello.
const HELLO: Duration = Duration::from_secs(2);

/// State that the connections share.
struct Host {
    simulator: Simulator,
    key: Vec<u8>,
    /// Reason why the last process was sent away.
    sent_away: Mutex<Option<String>>,
    /// Whether another rank 0 came before all had, of which ranks may be here instead of this one's.
    has_rival: AtomicBool,
    /// Longest wait for a rank that does not come.
    timeout: Duration,
    ranks: Mutex<Vec<Rank>>,
    changed: Condvar,
}

/// State of a rank's process.
#[derive(Clone, Default)]
struct Rank {
    /// Connections that have come, a bit each.
    lanes: u8,
    lost: Option<Instant>,
    /// Number that it brought to the collective under way.
    brought: Option<u64>,
    /// Result of the last collective, until its thread takes it.
    result: Option<Result<Vec<u64>, SimulatorError>>,
}

impl Simulator {
    /// Joins a machine whose ranks are processes, as `rank`. Rank 0's runs it, with its `options`, and all
    /// talk to it over a Unix socket at `path`, which other users cannot open. Collective. This and every
    /// later wait for a rank ends after `timeout`. The handle's calls are for `rank` alone. The socket's file
    /// is gone when this returns on rank 0; a file there that is no socket is an error, and stays. If another
    /// rank 0 comes to the path before all ranks have, and has the same key, it fails on all of them.
    ///
    /// A process that ends is a [lost](Self::lose) rank. If that of rank 0 ends, calls of others fail with
    /// [`SimulatorError::Remote`]. [`SimulatorError::NoSuchRank`] for numbers that cannot be.
    pub fn join(
        path: &Path,
        rank: u32,
        options: &Options,
        timeout: Duration,
    ) -> Result<Self, SimulatorError> {
        let ranks = options.ranks;
        if rank >= ranks || ranks > ferry_layout::MAX_RANKS {
            return Err(SimulatorError::NoSuchRank { rank, ranks });
        }
        let (bytes, key) = (path.as_os_str().len(), options.key.len());
        if bytes > MOST_OF_PATH {
            let path = path.display();
            return Err(refused(format!(
                "path is {path}, of {bytes} bytes, but that of a socket has at most {MOST_OF_PATH}"
            )));
        }
        if key > MOST_OF_KEY {
            return Err(refused(format!(
                "key has {key} bytes, but at most {MOST_OF_KEY}"
            )));
        }
        // Until all have joined, or this rank has not.
        let _socket = (rank == 0)
            .then(|| start(path, options.clone(), timeout))
            .transpose()?;
        Ok(Self::at(Remote::connect(path, rank, options, timeout)?))
    }
}

/// Makes the socket and the machine, and serves until all connections have ended.
fn start(path: &Path, options: Options, timeout: Duration) -> Result<Socket, SimulatorError> {
    let (listener, socket) = listen(path, &options)
        .map_err(|reason| refused(format!("cannot listen at {}: {reason}", path.display())))?;
    let host = Arc::new(Host {
        ranks: Mutex::new(vec![Rank::default(); options.ranks as usize]),
        key: options.key.clone(),
        sent_away: Mutex::default(),
        has_rival: AtomicBool::new(false),
        simulator: Simulator::start(options)?,
        timeout,
        changed: Condvar::new(),
    });
    thread::spawn(move || {
        let until = Instant::now() + timeout;
        while Instant::now() < until && host.is_incomplete() {
            let Ok((stream, _)) = listener.accept() else {
                thread::sleep(PAUSE);
                continue;
            };
            let host = Arc::clone(&host);
            thread::spawn(move || host.meet(stream));
        }
    });
    Ok(socket)
}

impl Host {
    fn ranks(&self) -> MutexGuard<'_, Vec<Rank>> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sent_away(&self) -> MutexGuard<'_, Option<String>> {
        self.sent_away
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a rank is missing, and rank 0 waits for it.
    fn is_incomplete(&self) -> bool {
        let ranks = self.ranks();
        ranks[0].lost.is_none() && ranks.iter().any(|rank| rank.lanes != 3)
    }

    /// Serves one connection to its end.
    fn meet(&self, mut stream: UnixStream) {
        // Neither fails on a connected socket.
        let _ = stream.set_nonblocking(false);
        let _ = stream.set_read_timeout(Some(HELLO));
        let hello = receive(&mut stream, MOST_OF_HELLO);
        let rank = match hello.and_then(|(words, names)| self.admit(words, &names)) {
            Ok(rank) => rank,
            Err(error) => {
                let reason = error.to_string();
                let _ = send(&stream, &[1], reason.as_bytes());
                if error.kind() == ErrorKind::InvalidData {
                    *self.sent_away() = Some(reason);
                }
                return;
            }
        };
        let _ = stream.set_read_timeout(None);
        let mut sent = send(&stream, &[0], &[]);
        while sent.is_ok() {
            sent = receive(&mut stream, MOST_BYTES).and_then(|(words, payload)| {
                match self.obey(rank as u32, words, &payload) {
                    Ok(answer) => send(&stream, &[0], &answer),
                    Err(error) => send(&stream, &[1], error.to_string().as_bytes()),
                }
            });
        }
        self.ranks()[rank].lost.get_or_insert_with(Instant::now);
        self.changed.notify_all();
        // Fails only if the simulation has ended.
        let _ = self.simulator.lose(rank as u32);
    }

    /// Checks a hello, and returns the rank.
    fn admit(&self, [operation, version]: [u64; 2], names: &[u8]) -> std::io::Result<usize> {
        let refused = |text| Err(Error::new(ErrorKind::InvalidData, text));
        let ([rank, ranks, lane, key @ ..], operation::HELLO, VERSION) =
            (names, operation, version)
        else {
            return refused(format!("version {version:#x}, and rank 0 has {VERSION:#x}"));
        };
        if key != self.key {
            return refused(format!(
                "rank {rank} has another key than rank 0: it is of another job"
            ));
        }
        let mut all = self.ranks();
        if usize::from(*ranks) != all.len() {
            let ours = all.len();
            return refused(format!(
                "rank {rank} expects {ranks} ranks, and rank 0 {ours}"
            ));
        }
        if *rank == 0 && *lane < 2 && all[0].lanes >> lane & 1 != 0 {
            self.has_rival.store(true, Ordering::Relaxed);
            self.changed.notify_all();
        }
        match all.get_mut(usize::from(*rank)) {
            Some(of) if *lane < 2 && of.lanes >> lane & 1 == 0 => of.lanes |= 1 << lane,
            _ => return refused(format!("rank {rank} has come already, or does not exist")),
        }
        Ok(usize::from(*rank))
    }

    fn obey(
        &self,
        rank: u32,
        [operation, argument]: [u64; 2],
        payload: &[u8],
    ) -> Result<Vec<u8>, SimulatorError> {
        let simulator = &self.simulator;
        let done = |()| Vec::new();
        match operation {
            operation::ALLOC => Ok(simulator.alloc(rank, argument)?.to_le_bytes().into()),
            operation::FREE => simulator.free(argument).map(done),
            operation::WRITE => simulator.write(argument, payload).map(done),
            operation::READ if word(payload) <= MOST_BYTES => {
                let mut bytes = vec![0; word(payload) as usize];
                simulator.read(argument, &mut bytes).map(|()| bytes)
            }
            operation::LAUNCH => match from_bytes(argument & 0xffff_ffff, payload) {
                Some((kernel, args)) => {
                    let most = Some((argument >> 32) as u32).filter(|most| *most > 0);
                    simulator.launch(rank, kernel, args, most).map(done)
                }
                None => Err(refused(format!(
                    "kernel {argument}, {} bytes",
                    payload.len()
                ))),
            },
            operation::SYNCHRONIZE => simulator.synchronize(rank).map(done),
            operation::GATHER => self.gather(rank as usize, argument, Ok),
            operation::WINDOWS => self.gather(rank as usize, argument, |bytes| {
                simulator.alloc_symmetric(bytes.into_iter().max().unwrap_or(0))
            }),
            _ => Err(refused(format!("operation {operation} of {argument:#x}"))),
        }
    }

    /// Waits until all ranks have brought a value; the last one makes the result of them.
    fn gather(
        &self,
        rank: usize,
        value: u64,
        make: impl FnOnce(Vec<u64>) -> Result<Vec<u64>, SimulatorError>,
    ) -> Result<Vec<u8>, SimulatorError> {
        let (mut ranks, until) = (self.ranks(), Instant::now() + self.timeout);
        ranks[rank].brought = Some(value);
        let values: Option<Vec<u64>> = ranks.iter().map(|rank| rank.brought).collect();
        if let Some(values) = values {
            let results = iter::repeat(make(values));
            for (rank, result) in ranks.iter_mut().zip(results) {
                (rank.brought, rank.result) = (None, Some(result));
            }
            self.changed.notify_all();
        }
        loop {
            if let Some(result) = ranks[rank].result.take() {
                return Ok(result?.into_iter().flat_map(u64::to_le_bytes).collect());
            }
            if self.has_rival.load(Ordering::Relaxed) {
                return Err(refused(
                    "another rank 0 came to the path of this job before all ranks had: give each job a path \
                     or a key of its own"
                        .into(),
                ));
            }
            let lost = ranks
                .iter()
                .zip(0_u32..)
                .filter_map(|(rank, at)| Some((rank.lost?, at)));
            if let Some((_, lost)) = lost.min() {
                return Err(refused(format!("rank {lost} was lost: its process ended")));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = ranks.iter().position(|rank| rank.brought.is_none());
                let (missing, seconds) = (missing.unwrap_or(0), self.timeout.as_secs_f64());
                let sent_away = self.sent_away().clone();
                let sent_away = sent_away.map(|reason| format!("; sent away: {reason}"));
                return Err(refused(format!(
                    "rank {missing} did not come within {seconds} s{}",
                    sent_away.unwrap_or_default()
                )));
            }
            let waited = self.changed.wait_timeout(ranks, left);
            ranks = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
