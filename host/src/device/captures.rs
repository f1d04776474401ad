//! Captures of streams to graphs, and the communicators that the graphs hold.
//!
//! A launch into a stream that is captured becomes a part of the graph, whichever thread makes it. A
//! capture may begin and end while another thread launches, so a look before the launch does not suffice.
//! Each launch notes how many captures have ended, launches, and only then looks: the capture that its
//! stream is in holds its communicator, and so do those that have ended meanwhile. No lock is held
//! while the driver is called: a launch may wait there for room in its queue.
//!
//! Captures that others began are not listed here. A launch that finds its stream in one says so.

use std::any::Any;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::device::InGraph;
use crate::error::Error;

/// A value that a graph keeps alive.
pub(crate) type Held = Arc<dyn Any + Send + Sync>;

/// Values that a graph holds. A launch that was captured may add to the list after the capture has ended.
#[derive(Default)]
pub(crate) struct HeldList(Mutex<Vec<Held>>);

impl HeldList {
    fn add(&self, held: &Held) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !list.iter().any(|other| Arc::ptr_eq(other, held)) {
            list.push(held.clone());
        }
    }
}

/// Number of captures that had ended when a launch began.
#[derive(Clone, Copy)]
pub(crate) struct Mark(u64);

/// Captures in progress, and those whose graphs live.
pub(crate) struct Captures {
    /// Number of captures in progress. If there are none, a launch looks only at the two numbers.
    open: AtomicUsize,
    ended: AtomicU64,
    all: Mutex<Vec<Capture>>,
}

struct Capture {
    /// The driver's number, once it is known.
    number: Option<u64>,
    state: State,
    held: Weak<HeldList>,
}

/// State of a capture.
#[derive(Clone, Copy)]
enum State {
    /// Its number is not known yet.
    Beginning,
    /// The capture is in progress, and its number is known.
    Numbered,
    /// The driver is being asked to end it.
    Ending,
    /// Over. Its number among the captures that ended, from 1 on.
    Ended(u64),
}

impl Captures {
    pub(crate) const fn new() -> Self {
        Self {
            open: AtomicUsize::new(0),
            ended: AtomicU64::new(0),
            all: Mutex::new(Vec::new()),
        }
    }

    /// Returns the list of a new graph. To be called before the driver is asked to begin its capture.
    pub(crate) fn begin(&self) -> Arc<HeldList> {
        let list = Arc::<HeldList>::default();
        let mut all = self.all();
        all.retain(|capture| capture.held.strong_count() > 0);
        all.push(Capture {
            number: None,
            state: State::Beginning,
            held: Arc::downgrade(&list),
        });
        self.open.fetch_add(1, Ordering::AcqRel);
        list
    }

    /// Notes that the driver has begun the capture with this number.
    pub(crate) fn begun(&self, list: &Arc<HeldList>, number: u64) {
        self.change(list, |capture| {
            capture.number = Some(number);
            capture.state = State::Numbered;
        });
    }

    /// Notes that the driver is about to be asked to end the capture.
    pub(crate) fn ending(&self, list: &Arc<HeldList>) {
        self.change(list, |capture| capture.state = State::Ending);
    }

    /// Notes that the driver has ended the capture, or could not begin it.
    pub(crate) fn end(&self, list: &Arc<HeldList>) {
        let mut all = self.all();
        let ended = self.ended.load(Ordering::Acquire) + 1;
        if let Some(capture) = all.iter_mut().find(|capture| capture.is(list)) {
            capture.state = State::Ended(ended);
        }
        // In this order: a thread that sees no open capture also sees that one has ended.
        self.ended.store(ended, Ordering::Release);
        self.open.fetch_sub(1, Ordering::AcqRel);
    }

    /// Returns the mark for `hold`. To be called before a launch.
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.ended.load(Ordering::Acquire))
    }

    /// Lets each graph that a launch may be a part of hold `held`, and returns whether there
    /// is one, or was. To be called after the launch. `number`: the driver's number of the capture that the
    /// stream is in by now, if any; with an error, every capture in progress holds it.
    pub(crate) fn hold(
        &self,
        since: Mark,
        held: &Held,
        number: Result<Option<u64>, Error>,
    ) -> InGraph {
        // In this order, see `end`.
        let none_is_open = self.open.load(Ordering::Acquire) == 0;
        let has_ended = self.mark().0 != since.0;
        if none_is_open && !has_ended {
            return match number {
                Ok(None) => InGraph::No,
                _ => InGraph::Foreign,
            };
        }
        let all = self.all();
        // An unknown capture, or one that is not ours, may be others', or one of ours that begins.
        let is_foreign = match number {
            Ok(None) => false,
            Ok(number) => !all.iter().any(|capture| capture.number == number),
            Err(_) => true,
        };
        let takes_part = |capture: &&Capture| match (capture.state, &number) {
            (State::Beginning, _) => is_foreign,
            (State::Numbered, Err(_)) | (State::Ending, _) => true,
            (State::Numbered, Ok(number)) => *number == capture.number,
            (State::Ended(ended), _) => ended > since.0,
        };
        let mut is_held = has_ended;
        for capture in all.iter().filter(takes_part) {
            is_held = true;
            if let Some(list) = capture.held.upgrade() {
                list.add(held);
            }
        }
        match (is_foreign, is_held) {
            (true, _) => InGraph::Foreign,
            (false, true) => InGraph::Held,
            (false, false) => InGraph::No,
        }
    }

    fn change(&self, list: &Arc<HeldList>, change: impl FnOnce(&mut Capture)) {
        if let Some(capture) = self.all().iter_mut().find(|capture| capture.is(list)) {
            change(capture);
        }
    }

    fn all(&self) -> MutexGuard<'_, Vec<Capture>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Capture {
    fn is(&self, list: &Arc<HeldList>) -> bool {
        std::ptr::eq(self.held.as_ptr(), Arc::as_ptr(list))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of graphs that hold it.
    fn holders(held: &Held) -> usize {
        Arc::strong_count(held) - 1
    }

    const IN_NONE: Result<Option<u64>, Error> = Ok(None);

    #[test]
    fn a_graph_holds_what_was_launched_into_its_own_capture_once() {
        let captures = Captures::new();
        let [one, two]: [Held; 2] = [Arc::new(1), Arc::new(2)];
        let lists = [7, 8].map(|number| {
            let list = captures.begin();
            captures.begun(&list, number);
            list
        });
        for (number, held) in [(7, &one), (7, &one), (8, &two), (9, &two)] {
            let in_graph = captures.hold(captures.mark(), held, Ok(Some(number)));
            // The last one is of a capture that others began.
            let wanted = match number {
                9 => InGraph::Foreign,
                _ => InGraph::Held,
            };
            assert_eq!(in_graph, wanted);
        }
        assert_eq!(captures.hold(captures.mark(), &one, IN_NONE), InGraph::No);
        assert_eq!((holders(&one), holders(&two)), (1, 1));
        for list in &lists {
            captures.ending(list);
            captures.end(list);
        }
        let [first, second] = lists;
        drop(first);
        assert_eq!((holders(&one), holders(&two)), (0, 1));
        drop(second);
        assert_eq!(holders(&two), 0);
    }

    #[test]
    fn a_launch_in_a_capture_of_others_is_told_also_where_we_have_none() {
        let captures = Captures::new();
        let held: Held = Arc::new(1);
        for _ in 0..2 {
            for (number, wanted) in [
                (IN_NONE, InGraph::No),
                (Ok(Some(7)), InGraph::Foreign),
                (Err(Error::RankCount { ranks: 0 }), InGraph::Foreign),
            ] {
                assert_eq!(captures.hold(captures.mark(), &held, number), wanted);
            }
            captures.end(&captures.begin());
        }
        assert_eq!(holders(&held), 0);
    }

    #[test]
    fn a_launch_into_a_capture_of_ours_that_ended_meanwhile_is_not_others() {
        let captures = Captures::new();
        let held: Held = Arc::new(1);
        let list = captures.begin();
        captures.begun(&list, 7);
        let mark = captures.mark();
        captures.ending(&list);
        assert_eq!(captures.hold(mark, &held, Ok(Some(7))), InGraph::Held);
        captures.end(&list);
        assert_eq!(captures.hold(mark, &held, Ok(Some(7))), InGraph::Held);
        assert_eq!(holders(&held), 1);
    }

    #[test]
    fn a_launch_during_which_a_capture_begins_is_held() {
        let captures = Captures::new();
        let held: Held = Arc::new(1);
        let mark = captures.mark();
        // The driver has begun it, and the other thread does not know the number yet.
        let list = captures.begin();
        // So the capture may also be others'.
        assert_eq!(captures.hold(mark, &held, Ok(Some(7))), InGraph::Foreign);
        assert_eq!(holders(&held), 1);
        drop(list);
        assert_eq!(holders(&held), 0);
    }

    #[test]
    fn a_launch_during_which_a_capture_begins_and_ends_is_held() {
        let captures = Captures::new();
        let earlier: Held = Arc::new(0);
        let before = captures.begin();
        captures.begun(&before, 6);
        captures.end(&before);
        let held: Held = Arc::new(1);
        let mark = captures.mark();
        let list = captures.begin();
        captures.begun(&list, 7);
        captures.ending(&list);
        assert_eq!(captures.hold(mark, &earlier, IN_NONE), InGraph::Held);
        captures.end(&list);
        for _ in 0..2 {
            assert_eq!(captures.hold(mark, &held, IN_NONE), InGraph::Held);
        }
        // Not the graph that was whole before the launch.
        assert_eq!((holders(&earlier), holders(&held)), (1, 1));
        drop(list);
        assert_eq!((holders(&earlier), holders(&held)), (0, 0));
        drop(before);
    }

    #[test]
    fn where_the_driver_does_not_tell_every_graph_in_the_making_holds() {
        let captures = Captures::new();
        let held: Held = Arc::new(1);
        let (whole, listed, begun) = (captures.begin(), captures.begin(), captures.begin());
        captures.end(&whole);
        captures.begun(&listed, 7);
        let in_graph = captures.hold(captures.mark(), &held, Err(Error::RankCount { ranks: 0 }));
        assert_eq!(in_graph, InGraph::Foreign);
        assert_eq!(holders(&held), 2);
        drop((listed, begun));
        assert_eq!(holders(&held), 0);
        drop(whole);
    }
}
