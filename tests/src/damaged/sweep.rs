//! Cases with damaged windows, one seed after another, on all processors.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;

use super::DamagedCase;

/// Longest that a case may take on a loaded machine: they take milliseconds.
const LONGEST: Duration = Duration::from_secs(120);

/// Arguments of `damaged`. The tests run the same with 2,000 windows.
#[derive(Args)]
pub struct DamagedArgs {
    /// How many windows are damaged at least
    #[arg(long, default_value_t = 100_000)]
    pub windows: u64,
    /// The first seed
    #[arg(long, default_value_t = 1_000_000)]
    pub seed: u64,
}

/// Runs cases until so many windows were damaged.
///
/// # Errors
/// The first case that failed, with its seed.
pub fn run(args: &DamagedArgs) -> Result<()> {
    let (next, windows) = (AtomicU64::new(args.seed), AtomicU64::new(0));
    let failed = Mutex::new(None);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while windows.load(Ordering::Relaxed) < args.windows {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    match windows_of(seed) {
                        Ok(damaged) => windows.fetch_add(damaged, Ordering::Relaxed),
                        Err(error) => {
                            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                            failed.get_or_insert(error);
                            // The others end, too.
                            windows.fetch_max(args.windows, Ordering::Relaxed)
                        }
                    };
                }
            });
        }
    });
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    println!(
        "{} windows damaged with seeds {}..{}",
        windows.into_inner(),
        args.seed,
        next.into_inner()
    );
    Ok(())
}

/// Runs the case of a seed; the windows that it damaged.
fn windows_of(seed: u64) -> Result<u64> {
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
        Ok(Ok(windows)) => Ok(windows),
        Ok(Err(error)) => bail!("seed {seed}: {error}"),
        Err(error) => bail!("seed {seed}: no end after {LONGEST:?}, or a panic: {error}"),
    }
}
