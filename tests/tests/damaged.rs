//! Simulated ranks whose windows a peer has damaged touch nothing that is not theirs, and end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use ferry_tests::damaged::DamagedCase;

/// Longest that a case may take on a loaded machine: they take milliseconds.
const LONGEST: Duration = Duration::from_secs(120);

/// Runs cases from seed `first` on, on all processors, until so many windows were damaged.
fn damage(first: u64, wanted: u64) {
    let (next, windows) = (AtomicU64::new(first), AtomicU64::new(0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while windows.load(Ordering::Relaxed) < wanted {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    windows.fetch_add(windows_of(seed), Ordering::Relaxed);
                }
            });
        }
    });
    let (seeds, windows) = (next.into_inner() - first, windows.into_inner());
    println!(
        "{windows} windows damaged with seeds {first}..{}",
        first + seeds
    );
}

/// Runs the case of a seed; the windows that it damaged.
fn windows_of(seed: u64) -> u64 {
    let (done, is_done) = channel();
    std::thread::spawn(move || {
        let damaged = DamagedCase::of(seed, None);
        let outcome = damaged
            .simulate()
            .map_err(|error| format!("{error:#}: {:?}", damaged.case));
        // Nobody listens to one that took too long.
        let _ = done.send(outcome);
    });
    match is_done.recv_timeout(LONGEST) {
        Ok(Ok(windows)) => windows,
        Ok(Err(error)) => panic!("seed {seed}: {error}"),
        Err(error) => panic!("seed {seed}: no end after {LONGEST:?}, or a panic: {error}"),
    }
}

#[test]
fn damaged_windows_harm_nobody_else() {
    damage(20_000, 2_000);
}

/// `cargo test --release --package ferry-tests --test damaged -- --ignored --nocapture`
#[test]
#[ignore = "takes minutes"]
fn a_hundred_thousand_damaged_windows() {
    damage(1_000_000, 100_000);
}
