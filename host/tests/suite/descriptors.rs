//! A rendezvous in a process that has no file descriptors left for a while.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ferry::bootstrap::TcpBootstrap;
use ferry::error::BootstrapError;

/// Set for the process that this test starts.
const MEMBER: &str = "FERRY_TEST_DESCRIPTORS";
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(500);

/// Rank 0 of two, at an address of its own, as soon as it listens.
fn rank_zero(own: u8, timeout: Duration) -> (SocketAddr, Joining) {
    let [.., high, low] = std::process::id().to_be_bytes();
    let listener = TcpListener::bind((Ipv4Addr::new(127, high, low, own), 0)).unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let rank = thread::spawn(move || TcpBootstrap::connect(0, 2, address, timeout));
    let start = Instant::now();
    while TcpStream::connect(address).is_err() {
        assert!(start.elapsed() < LONG);
        thread::sleep(Duration::from_millis(1));
    }
    (address, rank)
}

type Joining = thread::JoinHandle<Result<TcpBootstrap, BootstrapError>>;

/// Not a test of its own: the process that [`a_rendezvous_outlasts_a_lack_of_descriptors`] starts.
/// Without its variable it does nothing.
#[test]
fn member() {
    if std::env::var(MEMBER).is_err() {
        return;
    }
    let ((address, zero), (_, impatient)) = (rank_zero(1, LONG), rank_zero(2, 2 * SHORT));
    let mut files = Vec::new();
    // Again and again: the ranks still close the connections that came to look for them.
    for _ in 0..5 {
        files.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
        thread::sleep(SHORT / 25);
    }
    let one = thread::spawn(move || TcpBootstrap::connect(1, 2, address, LONG));
    thread::sleep(SHORT);
    assert!(!zero.is_finished());
    let error = impatient.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("(accepting)"), "{error}");
    drop(files);
    assert!(zero.join().unwrap().is_ok() && one.join().unwrap().is_ok());
}

#[test]
fn a_rendezvous_outlasts_a_lack_of_descriptors() {
    let member = Command::new("sh")
        .args([
            "-c",
            "ulimit -n 40 && exec \"$0\" --exact descriptors::member",
        ])
        .arg(std::env::current_exe().unwrap())
        .env(MEMBER, "yes")
        .output()
        .unwrap();
    let [out, error] = [member.stdout, member.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(
        member.status.success() && out.contains("1 passed"),
        "{out}{error}"
    );
}
