//! A rendezvous of processes with an all-gather of their own.

use std::fmt;

use super::require_ranks;
use crate::error::bootstrap::BootstrapError;
use crate::group::bootstrap::Bootstrap;

/// A [`Bootstrap`] over an all-gather of your own: an engine's, `torch.distributed`'s, a file system's.
///
/// The function takes this rank's bytes and returns those of every rank, by rank, including this one.
/// Each rank passes at most a few hundred bytes, whose length differs between ranks and calls, and none
/// in a barrier; if your all-gather takes equal lengths only, gather the lengths first. It
/// returns once all ranks have called it, and bounds its wait: an error that names the
/// lost rank ([`BootstrapError::Lost`]) is passed on; any other reason fits
/// [`BootstrapError::Other`].
///
/// The function runs in the thread that calls Ferry, one call at a time, and never after that call
/// has returned. [`Bootstrap`] lists the calls that use it. The group waits for it, so it calls
/// nothing of the group itself.
///
/// ```
/// use ferry::bootstrap::{Bootstrap, FnBootstrap};
///
/// # fn main() -> Result<(), ferry::error::BootstrapError> {
/// // SAFETY: in a group of one, the only rank's bytes are the whole result.
/// let mut bootstrap = unsafe { FnBootstrap::new(0, 1, |bytes| Ok(vec![bytes.to_vec()])) }?;
/// assert_eq!(bootstrap.all_gather(&[7])?, [[7]]);
/// # Ok(())
/// # }
/// ```
pub struct FnBootstrap<F> {
    rank: u32,
    ranks: u32,
    all_gather: F,
    /// Reason why no call is made any more: the first error, and the rank that it named.
    failed: Option<(Option<u32>, String)>,
}

impl<F: FnMut(&[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> + Send> FnBootstrap<F> {
    /// Wraps `all_gather`, called as rank `rank` of `ranks`. Does not call it. Not collective.
    ///
    /// # Errors
    /// [`BootstrapError::NotAmong`], [`BootstrapError::TooManyRanks`].
    ///
    /// # Safety
    /// No other process of the group has this `rank`, and `all_gather` does what [`Bootstrap`]
    /// promises: it returns `Ok` only after all ranks have called theirs as often, and only with the
    /// bytes that each passed to this very call, unchanged and by rank.
    pub unsafe fn new(rank: u32, ranks: u32, all_gather: F) -> Result<Self, BootstrapError> {
        if rank >= ranks {
            return Err(BootstrapError::NotAmong { rank, ranks });
        }
        require_ranks(ranks)?;
        Ok(Self {
            rank,
            ranks,
            all_gather,
            failed: None,
        })
    }

    fn call(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let all = (self.all_gather)(bytes)?;
        let (rank, ranks, given) = (self.rank, self.ranks, all.len());
        if given != ranks as usize {
            return Err(BootstrapError::Gathered { given, ranks });
        }
        if all[rank as usize] != bytes {
            return Err(BootstrapError::OtherPlace { rank });
        }
        Ok(all)
    }
}

// SAFETY: neither number changes; that no other process has the rank, and that the function gathers all
// ranks' bytes of the same call, is documented on `FnBootstrap::new`.
unsafe impl<F> Bootstrap for FnBootstrap<F>
where
    F: FnMut(&[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> + Send,
{
    fn rank(&self) -> u32 {
        self.rank
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Calls the function; after an error or a panic of it, it is not called any more, and each
    /// call fails at once.
    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        match &self.failed {
            Some((Some(rank), reason)) => {
                let (rank, reason) = (*rank, reason.clone());
                return Err(BootstrapError::Lost { rank, reason });
            }
            Some((None, reason)) => {
                let (call, reason) = ("the bootstrap's all_gather", reason.clone());
                return Err(BootstrapError::Other { call, reason });
            }
            None => {}
        }
        // Remains if the function panics.
        self.failed = Some((None, "the function panicked in an earlier call".into()));
        let gathered = self.call(bytes);
        self.failed = gathered.as_ref().err().map(|error| {
            let reason = format!("an earlier call failed: {error}");
            (error.lost_rank(), reason)
        });
        gathered
    }
}

impl<F> fmt::Debug for FnBootstrap<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FnBootstrap")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bootstrap over a function for tests.
    fn over<F>(rank: u32, all_gather: F) -> Result<FnBootstrap<F>, BootstrapError>
    where
        F: FnMut(&[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> + Send,
    {
        // SAFETY: the tests share no memory by what it gathers.
        unsafe { FnBootstrap::new(rank, 2, all_gather) }
    }

    fn other(reason: &str) -> BootstrapError {
        BootstrapError::Other {
            call: "gather",
            reason: reason.into(),
        }
    }

    #[test]
    fn a_rank_outside_the_group_is_refused() {
        let outside = over(2, |_| Ok(Vec::new()));
        assert!(matches!(
            outside,
            Err(BootstrapError::NotAmong { rank: 2, ranks: 2 })
        ));
    }

    #[test]
    fn more_ranks_than_a_group_has_are_refused() {
        // SAFETY: it is never called.
        let many = unsafe { FnBootstrap::new(0, 65, |_| Ok(Vec::new())) };
        assert!(matches!(
            many,
            Err(BootstrapError::TooManyRanks { ranks: 65 })
        ));
    }

    #[test]
    fn an_all_gather_that_gives_too_few_or_other_bytes_is_refused() {
        let mut few = over(0, |bytes| Ok(vec![bytes.to_vec()])).unwrap();
        assert!(matches!(
            few.all_gather(&[1]),
            Err(BootstrapError::Gathered { given: 1, ranks: 2 })
        ));
        let mut swapped = over(1, |bytes| Ok(vec![bytes.to_vec(), vec![9]])).unwrap();
        assert!(matches!(
            swapped.all_gather(&[1]),
            Err(BootstrapError::OtherPlace { rank: 1 })
        ));
    }

    #[test]
    fn after_an_error_the_function_is_not_called_any_more() {
        let mut calls = 0;
        let mut bootstrap = over(0, |_| {
            calls += 1;
            Err(match calls {
                1 => BootstrapError::Lost {
                    rank: 1,
                    reason: "killed".into(),
                },
                _ => other("called again"),
            })
        })
        .unwrap();
        for _ in 0..2 {
            let error = bootstrap.barrier().unwrap_err();
            assert_eq!(error.lost_rank(), Some(1));
            assert!(error.to_string().contains("killed"), "{error}");
        }
    }

    #[test]
    fn an_error_that_names_nobody_stays() {
        let mut bootstrap = over(0, |_| Err(other("no network"))).unwrap();
        for _ in 0..2 {
            let error = bootstrap.barrier().unwrap_err();
            assert_eq!(error.lost_rank(), None);
            assert!(error.to_string().contains("no network"), "{error}");
        }
    }

    #[test]
    fn after_a_panic_the_function_is_not_called_any_more() {
        let mut calls = 0;
        let mut bootstrap = over(0, |_| {
            calls += 1;
            assert!(calls == 1, "called again");
            panic!("no network")
        })
        .unwrap();
        let call = std::panic::AssertUnwindSafe(|| bootstrap.barrier());
        assert!(std::panic::catch_unwind(call).is_err());
        for _ in 0..2 {
            let text = bootstrap.barrier().unwrap_err().to_string();
            assert!(text.contains("panicked"), "{text}");
        }
    }
}
