//! The processes of a run, each with some of its ranks.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail};

use crate::group::Gather;

/// First byte of a message whose other bytes are shared.
const WELL: u8 = 0;
/// First byte of a message with the reason of a failure.
const FAILED: u8 = 1;

/// Messages between the processes, which all end if one fails. A failure is sent once, in place of the next
/// message; up to then, all processes make the same calls.
pub struct Processes {
    gather: Mutex<Gather>,
    is_first: bool,
}

/// A failure that every process knows of.
#[derive(Debug)]
struct Told(String);

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Told {}

impl Processes {
    /// Exchanges messages by `gather`; the first process prints and writes.
    pub fn new(gather: Gather, is_first: bool) -> Self {
        let gather = Mutex::new(gather);
        Self { gather, is_first }
    }

    /// Whether this process prints and writes.
    pub const fn is_first(&self) -> bool {
        self.is_first
    }

    /// Returns every process's bytes if none has failed. Collective, unless `own` is a failure that all
    /// processes know of.
    ///
    /// # Errors
    /// This process's failure, else the first failure of the others.
    pub fn share(&self, own: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        if own.as_ref().is_err_and(|error| error.is::<Told>()) {
            return own.map(|_| Vec::new());
        }
        let message = match &own {
            Ok(bytes) => [&[WELL][..], bytes].concat(),
            Err(error) => [&[FAILED][..], format!("{error:#}").as_bytes()].concat(),
        };
        let mut gather = self.gather.lock().unwrap_or_else(PoisonError::into_inner);
        let all = gather(&message)?;
        if let Err(error) = own {
            bail!(Told(format!("{error:#}")));
        }
        let shared = |(process, message): (usize, &Vec<u8>)| match message.split_first() {
            Some((&WELL, bytes)) => Ok(bytes.to_vec()),
            Some((&FAILED, text)) => {
                let text = String::from_utf8_lossy(text);
                bail!(Told(format!("process {process}: {text}")))
            }
            _ => bail!("process {process} sent an unknown message; do all have the same flags?"),
        };
        all.iter().enumerate().map(shared).collect()
    }

    /// Returns `own`'s value if no process has failed. Collective like [`share`](Self::share).
    ///
    /// # Errors
    /// As [`share`](Self::share).
    pub fn agree<T>(&self, own: Result<T>) -> Result<T> {
        let (value, outcome) = match own {
            Ok(value) => (Some(value), Ok(Vec::new())),
            Err(error) => (None, Err(error)),
        };
        self.share(outcome)?;
        Ok(value.expect("its own failure was returned above"))
    }

    /// Waits for all processes. Collective.
    ///
    /// # Errors
    /// As [`share`](Self::share).
    pub fn meet(&self) -> Result<()> {
        self.share(Ok(Vec::new())).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier};

    use anyhow::{Context, anyhow};

    use super::*;

    /// Results of `run` on three processes, which are threads here.
    fn on_three<T: Send>(run: impl Fn(usize, &Processes) -> T + Sync) -> Vec<T> {
        let table = Arc::new((Barrier::new(3), Mutex::new(vec![Vec::new(); 3])));
        std::thread::scope(|scope| {
            let thread = |process: usize| {
                let (table, run) = (table.clone(), &run);
                let gather: Gather = Box::new(move |bytes| {
                    let (barrier, messages) = &*table;
                    messages.lock().unwrap()[process] = bytes.to_vec();
                    barrier.wait();
                    let all = messages.lock().unwrap().clone();
                    barrier.wait();
                    Ok(all)
                });
                scope.spawn(move || run(process, &Processes::new(gather, process == 0)))
            };
            let threads: Vec<_> = (0..3).map(thread).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        })
    }

    #[test]
    fn everybody_gets_what_all_share() {
        let all = on_three(|process, processes| processes.share(Ok(vec![process as u8])).unwrap());
        assert_eq!(all, vec![vec![vec![0], vec![1], vec![2]]; 3]);
    }

    #[test]
    fn a_failure_is_told_once_wherever_the_others_are() {
        let texts = on_three(|process, processes| {
            let work = || -> Result<()> {
                processes.meet()?;
                if process == 1 {
                    return Err(anyhow!("out of paper")).context("printing");
                }
                (0..5).try_for_each(|_| processes.meet())
            };
            // A second gather of one process alone would wait for ever.
            let told = processes.agree(work()).context("at last");
            format!("{:#}", processes.agree(told).unwrap_err())
        });
        let told = "at last: process 1: printing: out of paper";
        assert_eq!(texts, [told, "at last: printing: out of paper", told]);
    }

    #[test]
    fn who_succeeded_hears_of_the_failure_too() {
        let texts = on_three(|process, processes| {
            let own = match process {
                2 => Err(anyhow!("no memory")),
                _ => Ok(process),
            };
            processes.agree(own).unwrap_err().to_string()
        });
        assert!(
            texts.iter().all(|text| text.ends_with("no memory")),
            "{texts:?}"
        );
    }
}
