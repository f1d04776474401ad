//! Processes that are killed: the others learn which rank was lost, and meet again without it.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use ferry::bootstrap::{Bootstrap, TcpBootstrap};

/// Set for the processes that this test starts: rank and addresses.
const MEMBER: &str = "FERRY_TEST_MEMBER";
const RANKS: u32 = 4;
/// Timeout of every call. A survivor that had to wait for it would break [`BOUND`].
const TIMEOUT: Duration = Duration::from_secs(120);
/// Longest time from the kill until all survivors have met again and ended, on a busy machine.
const BOUND: Duration = Duration::from_secs(30);
const KILLS: u8 = 20;

/// Not a test of its own: a process that [`survivors_of_a_killed_process_name_it_and_meet_again`]
/// starts. Without its variable it does nothing.
#[test]
fn member() {
    let Ok(arguments) = std::env::var(MEMBER) else {
        return;
    };
    let mut arguments = arguments.split(' ');
    let rank: u32 = arguments.next().unwrap().parse().unwrap();
    let first: SocketAddr = arguments.next().unwrap().parse().unwrap();
    let second: SocketAddr = arguments.next().unwrap().parse().unwrap();
    let mut all = TcpBootstrap::connect(rank, RANKS, first, TIMEOUT).unwrap();
    say("met");
    let error = (0..)
        .find_map(|call| all.all_gather(&payload(call)).err())
        .unwrap();
    let lost = error.lost_rank();
    say(&format!("lost {lost:?}: {error}"));
    // The first bootstrap is dropped: a rank that has not polled by now must still learn which rank was lost.
    drop(all);
    let Some(lost) = lost.filter(|&lost| lost != rank) else {
        return;
    };
    let mut rest =
        TcpBootstrap::connect(rank - u32::from(rank > lost), RANKS - 1, second, TIMEOUT).unwrap();
    rest.barrier().unwrap();
    let ranks = rest.all_gather(&rank.to_le_bytes()).unwrap();
    let ranks: Vec<u8> = ranks.iter().map(|bytes| bytes[0]).collect();
    say(&format!("again {ranks:?}"));
}

/// Small messages, and some that a socket does not take at once.
fn payload(call: u32) -> Vec<u8> {
    vec![call as u8; if call.is_multiple_of(3) { 1 << 20 } else { 5 }]
}

/// A line to the test.
fn say(line: &str) {
    let mut out = std::io::stdout();
    out.write_all(format!("member: {line}\n").as_bytes())
        .and_then(|()| out.flush())
        .unwrap();
}

/// A process of the group.
struct Member {
    process: Child,
    lines: mpsc::Receiver<String>,
}

impl Member {
    fn start(rank: u32, first: SocketAddr, second: SocketAddr) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "killed::member",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(MEMBER, format!("{rank} {first} {second}"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = process.stdout.take().unwrap();
        let (tell, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if let Some((_, said)) = line.split_once("member: ") {
                    let _ = tell.send(said.to_owned());
                }
            }
        });
        Self { process, lines }
    }

    /// The next line, within `left`.
    fn hear(&self, left: Duration) -> String {
        self.lines
            .recv_timeout(left)
            .unwrap_or_else(|error| format!("nothing ({error})"))
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Addresses that nobody else gets: an address of the machine's own for every kill.
fn free_addresses(kill: u8) -> [SocketAddr; 2] {
    let [.., high, low] = std::process::id().to_be_bytes();
    let own = Ipv4Addr::new(127, high, low, kill + 1);
    let listeners = [(); 2].map(|()| TcpListener::bind((own, 0)).unwrap());
    listeners.map(|listener| listener.local_addr().unwrap())
}

#[test]
fn survivors_of_a_killed_process_name_it_and_meet_again() {
    for kill in 0..KILLS {
        let victim = usize::from(kill) % RANKS as usize;
        // Spread over a few calls of every kind.
        let after = Duration::from_micros(u64::from(kill) * 7_919 % 30_000);
        kill_one(free_addresses(kill), victim, after);
    }
}

fn kill_one([first, second]: [SocketAddr; 2], victim: usize, after: Duration) {
    let mut members: Vec<_> = (0..RANKS)
        .map(|rank| Member::start(rank, first, second))
        .collect();
    for member in &members {
        assert_eq!(member.hear(BOUND), "met");
    }
    thread::sleep(after);
    members[victim].process.kill().unwrap();
    let killed = Instant::now();
    let survivors = (0..RANKS as usize).filter(|&rank| rank != victim);
    let wanted: Vec<_> = survivors.clone().collect();
    for rank in survivors {
        let left = || BOUND.saturating_sub(killed.elapsed());
        let told = members[rank].hear(left());
        assert!(
            told.starts_with(&format!("lost Some({victim})")),
            "rank {victim} was killed after {after:?}, and rank {rank} says: {told}"
        );
        assert_eq!(members[rank].hear(left()), format!("again {wanted:?}"));
    }
}
