//! Windows after a rank was lost.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::*;
use crate::communicator::Communicator;
use crate::error::bootstrap::BootstrapError;
use crate::error::warnings_tests::Warnings;
use crate::group::Group;
use crate::plan::config::Config;
use crate::plan::receive::Receive;
use ferry_layout::{CombineMode, ReceiveLayout, Shape};

/// Simulated ranks of this process, or rank 0 of two processes, whose bootstrap fails after some calls.
struct Failing {
    inside: Group,
    ranks: u32,
    /// Calls of the bootstrap that are answered.
    answered: AtomicUsize,
    freed: AtomicUsize,
    short: Short,
    reaches_other_nodes: bool,
    /// A group to close at the next call of the bootstrap, and the result.
    group: Mutex<Option<Group>>,
    closed: Mutex<Option<Result<(), Error>>>,
}

/// Defect of the fabric's answers.
#[derive(Clone, Copy, Default)]
struct Short {
    windows: usize,
    window_bytes: u64,
    peers: usize,
    peer_bytes: u64,
}

/// `at` without its last `bytes` bytes.
fn shorter(at: DevicePtr, bytes: u64) -> DevicePtr {
    // SAFETY: these are bytes of `at`.
    unsafe { DevicePtr::new(at.address(), at.bytes() - bytes) }
}

impl Failing {
    /// Two ranks of this process, over a fabric that answers too little.
    fn short(short: Short) -> Arc<Self> {
        let whole = Arc::into_inner(Self::new(2, 1, usize::MAX)).unwrap();
        Arc::new(Self { short, ..whole })
    }

    fn new(ranks: u32, processes: u32, answered: usize) -> Arc<Self> {
        Arc::new(Self {
            inside: Group::simulated(ranks / processes, 1).unwrap(),
            ranks,
            answered: answered.into(),
            freed: 0.into(),
            short: Short::default(),
            reaches_other_nodes: true,
            group: Mutex::default(),
            closed: Mutex::default(),
        })
    }

    fn ask(&self) -> Result<(), Error> {
        if let Some(group) = self.group.lock().unwrap().take() {
            *self.closed.lock().unwrap() = Some(group.close());
        }
        let left = self.answered.load(Ordering::Relaxed).checked_sub(1);
        let left = left.ok_or_else(|| BootstrapError::Lost {
            rank: 1,
            reason: "killed".into(),
        })?;
        self.answered.store(left, Ordering::Relaxed);
        Ok(())
    }

    fn freed(&self) -> usize {
        self.freed.load(Ordering::Relaxed)
    }
}

// SAFETY: its devices and windows are the simulator's, which refuses accesses elsewhere, with no more bytes
// than those have.
unsafe impl Fabric for Arc<Failing> {
    fn name(&self) -> &'static str {
        "failing"
    }
    fn ranks(&self) -> u32 {
        self.ranks
    }
    fn local_ranks(&self) -> Vec<Rank> {
        self.inside.local_ranks()
    }
    fn device(&self, rank: Rank) -> Result<Arc<dyn Device>, Error> {
        self.inside.device(rank)
    }
    fn kernels_with_options(&self, _: Rank, shape: Option<&Shape>) -> Result<LoadedKernels, Error> {
        Ok(LoadedKernels::of(Arc::new(("options", shape.copied()))))
    }
    fn kernels_with_rows(&self, _: Rank, shape: Option<&Shape>) -> Result<LoadedKernels, Error> {
        Ok(LoadedKernels::of(Arc::new(("rows", shape.copied()))))
    }
    fn reaches_other_nodes(&self) -> bool {
        self.reaches_other_nodes
    }
    fn all_gather(&self, value: u64) -> Result<Vec<u64>, Error> {
        self.ask()?;
        Ok(vec![value; self.ranks as usize])
    }
    fn barrier(&self) -> Result<(), Error> {
        self.ask()
    }
    fn alloc_windows(&self, bytes: u64) -> Result<Vec<DevicePtr>, Error> {
        let mut windows = self.inside.fabric.alloc_windows(bytes)?;
        windows.truncate(windows.len() - self.short.windows);
        let short = windows
            .iter()
            .map(|&at| shorter(at, self.short.window_bytes));
        Ok(short.collect())
    }
    fn peer_windows(
        &self,
        _: Rank,
        windows: &[DevicePtr],
        _: &Shape,
    ) -> Result<Vec<DevicePtr>, Error> {
        let seen = shorter(windows[0], self.short.peer_bytes);
        Ok(vec![seen; self.ranks as usize - self.short.peers])
    }
    unsafe fn free_windows(&self, windows: &[DevicePtr]) -> Result<(), Error> {
        self.freed.fetch_add(windows.len(), Ordering::Relaxed);
        // SAFETY: documented on `Fabric::free_windows`, which this wraps.
        unsafe { self.inside.fabric.free_windows(windows) }
    }
}

fn config() -> Config {
    Config {
        combine: CombineMode::Exact,
        deadline: Duration::from_secs(1),
        ..Config::new(2, 1, 8, 4)
    }
}

fn begin(fabric: &Arc<Failing>) -> Result<Vec<Communicator>, Error> {
    let group = Group::with_fabric(Box::new(fabric.clone()))?;
    let plan = Plan::new(&group, config())?;
    Communicator::new(&group, &plan)
}

fn names_rank_1<T>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::Bootstrap(error)) if error.lost_rank() == Some(1))
}

#[test]
fn windows_are_freed_where_that_waits_for_nobody_when_setting_up_cannot_be_agreed() {
    // Shapes and memory are agreed, the third call fails.
    let fabric = Failing::new(2, 1, 2);
    assert!(names_rank_1(&begin(&fabric)));
    assert_eq!(fabric.freed(), 2);
}

#[test]
fn windows_are_leaked_with_a_warning_where_freeing_waits_for_other_processes() {
    let fabric = Failing::new(2, 2, 2);
    let (begun, warnings) = Warnings::of(|| begin(&fabric));
    assert!(names_rank_1(&begun));
    assert_eq!(fabric.freed(), 0);
    assert!(warnings.contains("leaked"), "warned of: {warnings}");
}

#[test]
fn a_rank_that_is_lost_before_close_is_named_and_the_windows_are_leaked_with_a_warning() {
    let fabric = Failing::new(2, 2, 3);
    let mut ranks = begin(&fabric).unwrap();
    let (closed, warnings) = Warnings::of(|| Ok(ranks.remove(0).close()?));
    assert!(names_rank_1(&closed));
    assert_eq!(fabric.freed(), 0);
    assert!(warnings.contains("leaked"), "warned of: {warnings}");
}

#[test]
fn a_fabric_that_answers_too_little_is_named_with_what_was_wanted_and_given() {
    let plan = Plan::new(&Group::simulated(2, 1).unwrap(), config()).unwrap();
    let bytes = plan.window_bytes();
    let none = Short::default();
    let cases = [
        (Short { windows: 1, ..none }, "alloc_windows", 2, 1),
        (
            Short {
                window_bytes: 1,
                ..none
            },
            "alloc_windows",
            bytes,
            bytes - 1,
        ),
        (Short { peers: 2, ..none }, "peer_windows", 2, 0),
        (
            Short {
                peer_bytes: 1,
                ..none
            },
            "peer_windows",
            bytes,
            bytes - 1,
        ),
    ];
    for (short, call, wanted, given) in cases {
        let fabric = Failing::short(short);
        let refused = begin(&fabric).map(|_| "accepted").unwrap_err().to_string();
        for part in [call, &wanted.to_string(), &given.to_string()] {
            assert!(refused.contains(part), "{refused}");
        }
        assert_eq!(fabric.freed(), 2 - short.windows);
    }
}

#[test]
fn a_plan_whose_ranks_span_nodes_is_refused_by_a_group_that_reaches_none() {
    let near = Arc::into_inner(Failing::new(2, 1, usize::MAX)).unwrap();
    let near = Group::with_fabric(Box::new(Arc::new(Failing {
        reaches_other_nodes: false,
        ..near
    })));
    let spans = Config {
        p2p_world_size: Some(1),
        ..config()
    };
    let plan = Plan::new(&Group::simulated(2, 1).unwrap(), spans).unwrap();
    let refused = Communicator::new(&near.unwrap(), &plan).map(|_| "accepted");
    let refused = refused.unwrap_err().to_string();
    for part in ["p2p_world_size", " 1", "failing"] {
        assert!(refused.contains(part), "{refused}");
    }
}

/// The name and the shape of kernels of `Failing`; `None` for the general ones.
fn kernels(loaded: &LoadedKernels) -> Option<(&'static str, Option<Shape>)> {
    loaded.held()?.downcast_ref().copied()
}

#[test]
fn a_plan_that_keeps_rows_has_one_set_of_kernels_for_all_calls() {
    let fabric = Failing::new(2, 1, usize::MAX);
    let loaded = |config: Config| {
        let plan = Plan::new(&fabric.inside, config).unwrap();
        let memory = Private::alloc(&fabric, Rank(0), &plan).unwrap();
        let with_options = memory.kernels_with_options.as_ref().map(kernels);
        (kernels(&memory.kernels), with_options, *plan.shape())
    };
    let reduced = Config::new(2, 1, 8, 4);
    for receive in ReceiveLayout::ALL {
        for (specialise, options) in [(false, false), (true, true)] {
            let config = Config {
                receive: Receive::of(receive),
                specialise,
                options,
                ..reduced
            };
            let (plain, with_options, shape) = loaded(config);
            let shape = specialise.then_some(shape);
            let wanted = if !receive.keeps_rows() {
                // Blocks are an option.
                let options = options || receive == ReceiveLayout::Padded;
                (None, options.then_some(Some(("options", shape))))
            } else {
                let rows = Some(("rows", shape));
                (rows, Some(rows))
            };
            assert_eq!((plain, with_options), wanted, "{config:?}");
        }
    }
}

#[test]
fn a_rank_that_fails_says_why_also_where_it_cannot_tell_the_others() {
    let fabric = Failing::new(2, 1, 0);
    let agreed = agree::<()>(&fabric, "testing", Err(Error::RankCount { ranks: 0 }));
    assert!(
        matches!(agreed, Err(Error::RankCount { ranks: 0 })),
        "{agreed:?}"
    );
}

#[test]
fn a_group_is_not_closed_while_a_communicator_begins() {
    let fabric = Failing::new(2, 1, usize::MAX);
    let group = Group::with_fabric(Box::new(fabric.clone())).unwrap();
    let plan = Plan::new(&group, config()).unwrap();
    *fabric.group.lock().unwrap() = Some(group.clone());
    let ranks = Communicator::new(&group, &plan).unwrap();
    let closed = fabric.closed.lock().unwrap().take();
    let refused = matches!(
        closed,
        Some(Err(Error::CommunicatorsOpen { communicators: 2 }))
    );
    assert!(refused, "{closed:?}");
    ranks.into_iter().for_each(|rank| rank.close().unwrap());
    group.close().unwrap();
}
