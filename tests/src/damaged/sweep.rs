//! Cases with damaged windows, one seed after another, on all processors.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;

use super::DamagedCase;

/// Longest time of a case on a loaded machine: cases take milliseconds.
const LONGEST: Duration = Duration::from_secs(120);

/// Damage windows of simulated ranks: each must end and touch no memory that is not its own
///
/// What failed is printed with its seed; --seed S --windows 1 runs it again. `cargo xtask test` runs the same
/// with 2,000 windows.
#[derive(Args)]
#[command(verbatim_doc_comment)]
pub struct DamagedArgs {
    /// Fewest windows to damage
    #[arg(long, default_value_t = 100_000)]
    pub windows: u64,
    /// First seed
    #[arg(long, default_value_t = 1_000_000)]
    pub seed: u64,
}

/// Runs cases until as many windows are damaged as `args` asks for.
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
                            // Ends the other threads, too.
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

/// Runs the case of a seed, and returns the number of windows that it damaged.
fn windows_of(seed: u64) -> Result<u64> {
    let (done, is_done) = channel();
    std::thread::spawn(move || {
        let damaged = DamagedCase::of(seed, None);
        let outcome = damaged
            .simulate()
            .map_err(|error| format!("{error:#}: {:?}", damaged.case));
        // The receiver is gone if the case took too long.
        let _ = done.send(outcome);
    });
    match is_done.recv_timeout(LONGEST) {
        Ok(Ok(windows)) => Ok(windows),
        Ok(Err(error)) => bail!("seed {seed}: {error}"),
        Err(error) => bail!("seed {seed}: no end within {LONGEST:?}, or a panic: {error}"),
    }
}
