//! Captures in progress, and what their graphs will hold.

use std::any::Any;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::error::check;
use super::sys::{self, CUstream};
use crate::Error;

/// Something that a graph needs.
pub(super) type Held = Arc<dyn Any + Send + Sync>;

/// The captures of this process that [`CudaDevice::capture`](super::CudaDevice::capture) began. Not
/// of a device: the driver numbers captures throughout the process, and the stream of one may be
/// launched into by way of another `CudaDevice` of the same GPU. A capture that others began is not
/// among them: its graph holds nothing, and what it needs is the promise of
/// [`Stream::new`](crate::Stream::new).
pub(super) static CAPTURES: Captures = Captures::new();

/// Captures in progress, by the driver's number, and what their graphs will hold.
pub(super) struct Captures {
    /// How many: launches look at this alone while there are none.
    count: AtomicUsize,
    held: Mutex<Vec<(u64, Vec<Held>)>>,
}

impl Captures {
    const fn new() -> Self {
        Self {
            count: AtomicUsize::new(0),
            held: Mutex::new(Vec::new()),
        }
    }

    /// Whether no capture is in progress.
    pub(super) fn are_none(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// A capture begins.
    pub(super) fn one_more(&self) {
        self.count.fetch_add(1, Ordering::AcqRel);
    }

    /// A capture has ended.
    pub(super) fn one_less(&self) {
        self.count.fetch_sub(1, Ordering::AcqRel);
    }

    /// Gives `held` to the graph that `stream` is being captured to, if it is. The context is current.
    pub(super) fn hold(&self, stream: CUstream, held: &Held) -> Result<(), Error> {
        let Some(id) = capture_id(stream)? else {
            return Ok(());
        };
        self.add(id, held);
        Ok(())
    }

    fn add(&self, id: u64, held: &Held) {
        let mut all = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let capture = all.iter_mut().find(|(of, _)| *of == id);
        if let Some((_, list)) = capture
            && !list.iter().any(|other| Arc::ptr_eq(other, held))
        {
            list.push(held.clone());
        }
    }

    /// Keeps a list for the capture with this number.
    pub(super) fn begin(&self, id: u64) {
        let mut all = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        all.push((id, Vec::new()));
    }

    /// What the graph holds.
    pub(super) fn end(&self, id: u64) -> Vec<Held> {
        let mut all = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let at = all.iter().position(|(of, _)| *of == id);
        at.map(|at| all.swap_remove(at).1).unwrap_or_default()
    }
}

/// The driver's number of the capture that `stream` is in. The context is current.
pub(super) fn capture_id(stream: CUstream) -> Result<Option<u64>, Error> {
    if stream.is_null() {
        // The default stream cannot be captured, and must not be asked while others are.
        return Ok(None);
    }
    let (mut status, mut id) = (0, 0);
    // SAFETY: the stream lives ([`Stream::new`]); both numbers are live, and the driver takes null
    // for what is not wanted.
    let code = unsafe {
        sys::cuStreamGetCaptureInfo_v2(
            stream,
            &mut status,
            &mut id,
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
        )
    };
    check("cuStreamGetCaptureInfo", code)?;
    Ok((status == sys::CAPTURE_ACTIVE).then_some(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_that_others_began_holds_nothing() {
        let captures = Captures::new();
        let held: Held = Arc::new(1);
        captures.one_more();
        captures.begin(7);
        captures.add(8, &held);
        assert_eq!(Arc::strong_count(&held), 1);
        assert!(captures.end(8).is_empty() && captures.end(7).is_empty());
        captures.one_less();
        assert!(captures.are_none());
    }

    #[test]
    fn a_graph_holds_what_its_own_capture_launched_once() {
        let captures = Captures::new();
        let [one, two]: [Held; 2] = [Arc::new(1), Arc::new(2)];
        captures.begin(7);
        captures.begin(8);
        for (id, held) in [(7, &one), (7, &one), (8, &two), (9, &two)] {
            captures.add(id, held);
        }
        let graph = captures.end(7);
        assert_eq!((graph.len(), Arc::strong_count(&one)), (1, 2));
        assert!(Arc::ptr_eq(&graph[0], &one));
        drop((graph, captures.end(8), captures.end(9)));
        assert_eq!((Arc::strong_count(&one), Arc::strong_count(&two)), (1, 1));
    }
}
