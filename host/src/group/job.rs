//! The calls of NVSHMEM that wait for every rank, each after a wait that ends.
//!
//! Nothing bounds a wait inside NVSHMEM: if a rank is gone, such a call never returns on the
//! others. So all ranks first tell each other through the bootstrap that they are about to make it,
//! and none makes it if that fails. The remaining risk is a rank that is lost between the two, or just
//! when the bootstrap lets all go on ([`TcpBootstrap`](crate::bootstrap::TcpBootstrap) documents that case).

use crate::error::Error;
use crate::error::bootstrap::BootstrapError;
use crate::group::bootstrap::Bootstrap;
#[cfg(any(feature = "nvshmem", test))]
use crate::tensor::handles::DevicePtr;
use ferry_layout::Rank;

/// The calls of NVSHMEM.
#[cfg(any(feature = "nvshmem", test))]
pub(crate) trait Calls {
    /// Guard that is held during a call.
    type Entered;

    /// Makes this rank's device the current one. Not collective.
    fn enter(&self) -> Result<Self::Entered, Error>;

    /// `nvshmem_malloc`. Collective, without bounds.
    ///
    /// # Safety
    /// This process is in the job, nobody else calls NVSHMEM meanwhile, and the device is entered.
    unsafe fn malloc(&self, bytes: u64) -> Option<DevicePtr>;

    /// `nvshmem_free`. Collective, without bounds.
    ///
    /// # Safety
    /// As [`malloc`](Self::malloc), which returned the window; nothing uses it any more.
    unsafe fn free(&self, window: DevicePtr);

    /// Unregisters the kernels if they are `registered`, and leaves the job. Collective, without bounds.
    ///
    /// # Safety
    /// As [`malloc`](Self::malloc), once; nothing uses windows any more.
    unsafe fn leave(&self, registered: bool) -> Result<(), Error>;
}

/// This process's membership, and the way to the other ranks.
#[cfg(any(feature = "nvshmem", test))]
pub(crate) struct Job<C> {
    pub(crate) bootstrap: Box<dyn Bootstrap>,
    pub(crate) calls: C,
    open: bool,
}

#[cfg(any(feature = "nvshmem", test))]
impl<C: Calls> Job<C> {
    /// A job that this process has joined.
    pub(crate) fn new(bootstrap: Box<dyn Bootstrap>, calls: C) -> Self {
        Self {
            bootstrap,
            calls,
            open: true,
        }
    }

    /// Whether it has not been left.
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Allocates a window. Collective.
    pub(crate) fn alloc(&mut self, bytes: u64) -> Result<DevicePtr, Error> {
        let _entered = self.all_at("about to allocate windows")?;
        // SAFETY: the job is open, `&mut self` is the only way to it, and the device is entered.
        let window = unsafe { self.calls.malloc(bytes) }
            .ok_or(crate::error::NvshmemError::Heap { bytes }.into());
        // The heap is symmetric: it is exhausted on all ranks or on none. If they disagree
        // nevertheless, the memory is leaked, because freeing it waits for every rank.
        let is_there = window.is_ok();
        let agreed = agree(&mut *self.bootstrap, "allocating windows", window, |_| {
            Vec::new()
        });
        let (window, _) = agreed.inspect_err(|error| {
            if is_there {
                tracing::warn!(%error, bytes, "a window is leaked: other ranks may have none");
            }
        })?;
        Ok(window)
    }

    /// Frees windows, or leaks them if a rank does not take part. Collective.
    ///
    /// # Safety
    /// [`alloc`](Self::alloc) returned them, and nothing uses them any more.
    pub(crate) unsafe fn free(&mut self, windows: &[DevicePtr]) -> Result<(), Error> {
        let _entered = self.all_at("freeing windows").inspect_err(|error| {
            tracing::warn!(
                %error,
                windows = windows.len(),
                "windows are leaked: freeing them waits for every rank"
            );
        })?;
        for &window in windows {
            // SAFETY: the job is open, `&mut self` is the only way to it, and the device is entered;
            // `alloc` returned the window and nothing uses it (documented on this function).
            unsafe { self.calls.free(window) };
        }
        Ok(())
    }

    /// Leaves the job, once; if a rank does not take part, this process stays in it until it ends.
    /// Collective.
    ///
    /// # Safety
    /// Nothing uses windows any more, and no kernel runs.
    pub(crate) unsafe fn leave(&mut self, registered: bool) -> Result<(), Error> {
        if !self.open {
            return Ok(());
        }
        let entered = self.all_at("leaving the NVSHMEM job");
        self.open = false;
        let _entered = entered.inspect_err(|error| {
            tracing::warn!(%error, "the NVSHMEM job is not left: leaving waits for every rank");
        })?;
        // SAFETY: the job was open until now, `&mut self` is the only way to it, and the device is
        // entered; nothing uses windows any more (documented on this function).
        unsafe { self.calls.leave(registered) }
    }

    /// Enters the device, and waits, as long as the bootstrap does, until all ranks have come to `step`.
    fn all_at(&mut self, step: &'static str) -> Result<C::Entered, Error> {
        if !self.open {
            return Err(Error::GroupClosed);
        }
        let entered = self.calls.enter();
        let (entered, _) = agree(&mut *self.bootstrap, step, entered, |_| Vec::new())?;
        Ok(entered)
    }
}

/// First byte of a rank whose step succeeded; the step's name and a zero follow.
const WELL: u8 = 1;

/// Tells all ranks whether `step` succeeded on this one, with a few bytes if it did, and
/// returns every rank's bytes. Collective.
pub(crate) fn agree<T>(
    bootstrap: &mut dyn Bootstrap,
    step: &'static str,
    result: Result<T, Error>,
    attached: impl FnOnce(&T) -> Vec<u8>,
) -> Result<(T, Vec<Vec<u8>>), Error> {
    let well = [&[WELL], step.as_bytes(), &[0]].concat();
    let message = match &result {
        Ok(value) => [&well[..], &attached(value)].concat(),
        Err(_) => vec![0],
    };
    let gathered = gather(bootstrap, &message);
    // This rank's own error says more than that of the exchange.
    let value = result?;
    let mut attached = Vec::new();
    for (rank, message) in (0..).map(Rank).zip(gathered?) {
        match message.strip_prefix(&well[..]) {
            Some(rest) => attached.push(rest.to_vec()),
            None if message == [0] => return Err(Error::PeerFailed { rank, step }),
            None => return Err(elsewhere(rank, step, &message)),
        }
    }
    Ok((value, attached))
}

/// The error of a rank whose message is not one of `step`: ranks that do not make the same calls would wait
/// for each other in different calls.
fn elsewhere(rank: Rank, step: &'static str, message: &[u8]) -> Error {
    let name = message.strip_prefix(&[WELL]).unwrap_or_default();
    let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
    let is_text = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ';
    let theirs = if !name.is_empty() && name.iter().all(is_text) {
        format!(" ({})", String::from_utf8_lossy(name))
    } else {
        String::new()
    };
    Error::Bootstrap(BootstrapError::Other {
        call: "the bootstrap's all_gather",
        reason: format!(
            "rank {} is at another step{theirs} than this one ({step}); do all make the same calls?",
            rank.0
        ),
    })
}

/// Returns every rank's `value`, by rank. Collective.
pub(crate) fn gather_numbers(bootstrap: &mut dyn Bootstrap, value: u64) -> Result<Vec<u64>, Error> {
    let all = gather(bootstrap, &value.to_le_bytes())?;
    let number = |(rank, bytes): (usize, Vec<u8>)| {
        let bytes = <[u8; 8]>::try_from(bytes)
            .map_err(|bytes| wrong_length(rank, bytes.len(), size_of::<u64>()))?;
        Ok(u64::from_le_bytes(bytes))
    };
    all.into_iter().enumerate().map(number).collect()
}

/// Gathers the `bytes` of every rank; an error unless there is one entry for each. Collective.
fn gather(bootstrap: &mut dyn Bootstrap, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
    let all = bootstrap.all_gather(bytes)?;
    let (given, ranks) = (all.len(), bootstrap.ranks());
    if given != ranks as usize {
        return Err(Error::Bootstrap(BootstrapError::Gathered { given, ranks }));
    }
    Ok(all)
}

/// The error of a message that does not have the length of all ranks' messages.
pub(crate) fn wrong_length(rank: usize, found: usize, wanted: usize) -> Error {
    Error::Bootstrap(BootstrapError::Other {
        call: "the bootstrap's all_gather",
        reason: format!(
            "rank {rank} sent {found} bytes, not {wanted}; do all make the same calls?"
        ),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// A bootstrap of rank 0, whose other ranks send the same as this one, except those that fail.
    #[derive(Clone, Default)]
    struct Others {
        /// Calls until rank 1 is lost; `None` for never.
        left: Arc<Mutex<Option<u32>>>,
        /// Bytes of rank 1 instead.
        instead: Option<Vec<u8>>,
    }

    // SAFETY: the tests share no memory by what it gathers.
    unsafe impl Bootstrap for Others {
        fn rank(&self) -> u32 {
            0
        }

        fn ranks(&self) -> u32 {
            2
        }

        fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
            let mut left = self.left.lock().unwrap();
            match &mut *left {
                Some(0) => Err(BootstrapError::Lost {
                    rank: 1,
                    reason: "killed".into(),
                }),
                left => {
                    *left = left.map(|left| left - 1);
                    let theirs = self.instead.clone().unwrap_or_else(|| bytes.to_vec());
                    Ok(vec![bytes.to_vec(), theirs])
                }
            }
        }
    }

    /// An NVSHMEM that only takes notes.
    #[derive(Clone, Default)]
    struct Noted(Arc<Mutex<Vec<&'static str>>>);

    impl Noted {
        fn note(&self, call: &'static str) {
            self.0.lock().unwrap().push(call);
        }

        fn take(&self) -> Vec<&'static str> {
            std::mem::take(&mut self.0.lock().unwrap())
        }
    }

    impl Calls for Noted {
        type Entered = ();

        fn enter(&self) -> Result<(), Error> {
            Ok(())
        }

        unsafe fn malloc(&self, _: u64) -> Option<DevicePtr> {
            self.note("malloc");
            Some(DevicePtr::NULL.plus(64))
        }

        unsafe fn free(&self, _: DevicePtr) {
            self.note("free");
        }

        unsafe fn leave(&self, _: bool) -> Result<(), Error> {
            self.note("leave");
            Ok(())
        }
    }

    /// A job whose rank 1 is lost after so many calls of the bootstrap.
    fn job(left: Option<u32>) -> (Job<Noted>, Noted) {
        let (noted, others) = (Noted::default(), Others::default());
        *others.left.lock().unwrap() = left;
        (Job::new(Box::new(others), noted.clone()), noted)
    }

    fn names_rank_1<T>(result: Result<T, Error>) -> bool {
        matches!(result, Err(Error::Bootstrap(error)) if error.lost_rank() == Some(1))
    }

    #[test]
    fn where_all_take_part_each_call_is_made_once() {
        let (mut job, noted) = job(None);
        let window = job.alloc(8).unwrap();
        // SAFETY: `alloc` returned it, and nothing uses it.
        unsafe { job.free(&[window]) }.unwrap();
        // SAFETY: nothing uses windows.
        unsafe { job.leave(true) }.unwrap();
        // SAFETY: as above.
        unsafe { job.leave(true) }.unwrap();
        assert_eq!(noted.take(), ["malloc", "free", "leave"]);
        assert!(matches!(job.alloc(8), Err(Error::GroupClosed)));
    }

    #[test]
    fn no_call_that_waits_inside_nvshmem_is_made_after_a_rank_was_lost() {
        let (mut lost, noted) = job(Some(0));
        assert!(names_rank_1(lost.alloc(8)));
        // SAFETY: nothing is made of it.
        assert!(names_rank_1(unsafe { lost.free(&[DevicePtr::NULL]) }));
        assert_eq!(noted.take(), [""; 0]);
        // SAFETY: there are no windows.
        assert!(names_rank_1(unsafe { lost.leave(true) }));
        // The job is over for this process.
        assert!(!lost.is_open());
        // SAFETY: as above.
        unsafe { lost.leave(true) }.unwrap();
        assert_eq!(noted.take(), [""; 0]);
    }

    #[test]
    fn a_rank_lost_after_the_allocation_is_named_and_nothing_is_freed() {
        let (mut job, noted) = job(Some(1));
        assert!(names_rank_1(job.alloc(8)));
        assert_eq!(noted.take(), ["malloc"]);
    }

    #[test]
    fn ranks_at_different_steps_do_not_go_on() {
        for theirs in [vec![], b"\x01leaving the NVSHMEM job\0".to_vec()] {
            let others = Others {
                instead: Some(theirs),
                ..Others::default()
            };
            let noted = Noted::default();
            let mut job = Job::new(Box::new(others), noted.clone());
            // SAFETY: nothing is made of it.
            let refused = unsafe { job.free(&[DevicePtr::NULL]) }.unwrap_err();
            assert!(refused.to_string().contains("rank 1"), "{refused}");
            assert_eq!(noted.take(), [""; 0]);
        }
    }

    #[test]
    fn a_rank_that_fails_is_named_to_the_others() {
        let mut others = Others {
            instead: Some(vec![0]),
            ..Others::default()
        };
        let Err(error) = agree(&mut others, "testing", Ok(()), |()| vec![5]) else {
            panic!("rank 1 failed");
        };
        let text = error.to_string();
        assert!(
            text.contains("rank 1") && text.contains("testing"),
            "{text}"
        );
    }

    #[test]
    fn what_ranks_attach_comes_by_rank() {
        let mut others = Others {
            instead: Some(b"\x01testing\0\x07".to_vec()),
            ..Others::default()
        };
        let agreed = agree(&mut others, "testing", Ok(3), |_| vec![5, 6]);
        assert!(matches!(agreed, Ok((3, bytes)) if bytes == [vec![5, 6], vec![7]]));
    }
}
