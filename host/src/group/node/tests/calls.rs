//! Number, threads and bytes of a group's calls of its bootstrap: the table of
//! [`Bootstrap`](crate::bootstrap::Bootstrap).

use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use super::*;
use crate::group::bootstrap::Bootstrap;

/// Longest names that a process sends of its machine.
const NAME_BYTES: usize = 255;
/// Bytes by which a CUDA IPC handle is longer than one of these processes'.
const MORE_HANDLE_BYTES: usize = 56;

/// The bytes of each call, and its thread.
#[derive(Clone, Default)]
struct Calls(Arc<Mutex<Vec<(usize, ThreadId)>>>);

impl Calls {
    /// The bootstrap of `process`, with each call noted.
    fn over(&self, process: Process<'_>) -> Box<dyn Bootstrap> {
        let (noted, mut inner) = (self.0.clone(), process.bootstrap());
        let gather = move |bytes: &[u8]| {
            let call = (bytes.len(), thread::current().id());
            noted.lock().unwrap().push(call);
            inner.all_gather(bytes)
        };
        // SAFETY: rank and gathered bytes are those of the wrapped bootstrap.
        Box::new(unsafe { FnBootstrap::new(process.rank, RANKS, gather) }.unwrap())
    }

    /// Checks the calls since the last check: as many as `wanted`, from this thread, none longer than `most`.
    /// Returns the number of those without bytes, such as barriers.
    fn take(&self, wanted: usize, most: usize) -> usize {
        let calls = std::mem::take(&mut *self.0.lock().unwrap());
        let bytes: Vec<usize> = calls.iter().map(|call| call.0).collect();
        assert_eq!(bytes.len(), wanted, "{bytes:?}");
        assert!(
            bytes.iter().all(|&bytes| bytes <= most),
            "{bytes:?}, at most {most}"
        );
        let here = thread::current().id();
        assert!(calls.iter().all(|call| call.1 == here));
        bytes.iter().filter(|&&bytes| bytes == 0).count()
    }
}

const RANKS: u32 = 3;

#[test]
fn a_node_group_calls_its_bootstrap_as_its_documentation_says() {
    let node = Node::new(RANKS);
    let outcomes = node.each(|process| {
        let calls = Calls::default();
        let mut place = process.place();
        (place.host, place.gpu.machine) = ("h".repeat(NAME_BYTES), "m".repeat(NAME_BYTES));
        let group = process.join_over(calls.over(process), place, Failure::none())?;
        assert_eq!(calls.take(7, 600), 0);
        let (mut rank, other) = (begin(&group)?, begin(&group)?);
        assert_eq!(calls.take(10, 128 - MORE_HANDLE_BYTES), 0);
        round(&mut rank)?;
        assert_eq!(calls.take(0, 0), 0);
        // Not the thread that made it.
        thread::scope(|scope| {
            let close = || {
                rank.close()?;
                assert_eq!(calls.take(2, 128), 0);
                Ok(())
            };
            scope.spawn(close).join().unwrap()
        })
        .map_err(|error: CloseError| error.error)?;
        drop(other);
        assert_eq!(calls.take(0, 0), 0);
        group.close()?;
        assert_eq!(calls.take(1, 64 + 8), 0);
        drop(group);
        assert_eq!(calls.take(0, 0), 0);
        Ok(())
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn closing_a_communicator_that_gave_up_calls_no_bootstrap() {
    let node = Node::new(RANKS);
    let outcomes = node.each(|process| {
        let calls = Calls::default();
        let group = process.join_with(calls.over(process), Failure::none())?;
        let mut rank = begin_with(&group, recovery::config())?;
        calls.take(12, 600);
        // Nobody else comes to this one.
        if process.rank == 0 {
            assert!(matches!(round(&mut rank), Err(Error::Fault(_))));
            rank.close()?;
            assert_eq!(calls.take(0, 0), 0);
        }
        Ok(())
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}
