//! How a communicator begins and ends, over a fabric that only takes notes.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferry::device::{Args, FaultPage, Launch, SharedPage};
use ferry::*;

/// What happened, in order, and what is to happen.
#[derive(Default)]
struct Notes {
    calls: Mutex<Vec<String>>,
    launches: Mutex<Vec<Launch>>,
    page: Mutex<FaultPage>,
    /// Answers of rank 1 to each `all_gather`; its agreement where there are none left.
    rank_1_says: Mutex<Vec<u64>>,
    next: Mutex<u64>,
    refuse_alloc: bool,
}

impl Notes {
    fn note(&self, call: impl Into<String>) {
        self.calls.lock().unwrap().push(call.into());
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }

    fn address(&self) -> DevicePtr {
        let mut next = self.next.lock().unwrap();
        *next += 1 << 20;
        memory(*next)
    }
}

/// A MiB that nobody has.
fn memory(address: u64) -> DevicePtr {
    // SAFETY: nothing here reads or writes device memory.
    unsafe { DevicePtr::new(address, 1 << 20) }
}

struct NotedDevice(Arc<Notes>);

impl Device for NotedDevice {
    fn name(&self) -> String {
        "noted".into()
    }
    fn alloc(&self, _bytes: u64) -> Result<DevicePtr, Error> {
        self.0.note("alloc");
        if self.0.refuse_alloc {
            Err(Error::NoRanks)
        } else {
            Ok(self.0.address())
        }
    }
    unsafe fn free(&self, _at: DevicePtr) -> Result<(), Error> {
        self.0.note("free");
        Ok(())
    }
    fn upload(&self, _to: DevicePtr, _bytes: &[u8]) -> Result<(), Error> {
        self.0.note("upload");
        Ok(())
    }
    fn download(&self, _from: DevicePtr, _bytes: &mut [u8]) -> Result<(), Error> {
        self.0.note("download");
        Ok(())
    }
    fn fill(&self, _at: DevicePtr, value: u8, _bytes: u64) -> Result<(), Error> {
        self.0.note(format!("fill {value}"));
        Ok(())
    }
    fn stream(&self) -> Result<Stream, Error> {
        Ok(Stream::DEFAULT)
    }
    fn synchronize(&self, _stream: Stream) -> Result<(), Error> {
        self.0.note("synchronize");
        Ok(())
    }
    unsafe fn launch(&self, launch: &Launch) -> Result<(), Error> {
        self.0.note(launch.kernel.name());
        self.0.launches.lock().unwrap().push(launch.clone());
        Ok(())
    }
    fn fault_page(&self) -> Result<Box<dyn SharedPage>, Error> {
        Ok(Box::new(NotedPage(self.0.clone())))
    }
}

struct NotedPage(Arc<Notes>);

impl SharedPage for NotedPage {
    fn address(&self) -> u64 {
        64
    }
    fn read(&self) -> FaultPage {
        *self.0.page.lock().unwrap()
    }
    fn clear(&self) {
        *self.0.page.lock().unwrap() = FaultPage::default();
    }
}

impl Drop for NotedPage {
    fn drop(&mut self) {
        self.0.note("drop page");
    }
}

/// Rank 0 of two, or all of one.
struct NotedFabric {
    notes: Arc<Notes>,
    ranks: u32,
}

impl Fabric for NotedFabric {
    fn name(&self) -> &'static str {
        "noted"
    }
    fn ranks(&self) -> u32 {
        self.ranks
    }
    fn local_ranks(&self) -> Vec<Rank> {
        vec![Rank(0)]
    }
    fn device(&self, _rank: Rank) -> Result<Arc<dyn Device>, Error> {
        Ok(Arc::new(NotedDevice(self.notes.clone())))
    }
    fn reaches_other_nodes(&self) -> bool {
        true
    }
    fn all_gather(&self, value: u64) -> Result<Vec<u64>, Error> {
        self.notes.note("all_gather");
        let mut says = self.notes.rank_1_says.lock().unwrap();
        let theirs = if says.is_empty() {
            value
        } else {
            says.remove(0)
        };
        Ok([value, theirs][..self.ranks as usize].to_vec())
    }
    fn barrier(&self) -> Result<(), Error> {
        self.notes.note("barrier");
        Ok(())
    }
    fn alloc_windows(&self, _bytes: u64) -> Result<Vec<DevicePtr>, Error> {
        self.notes.note("alloc_windows");
        Ok(vec![self.notes.address()])
    }
    fn peer_windows(
        &self,
        _rank: Rank,
        windows: &[DevicePtr],
        _shape: &Shape,
    ) -> Result<Vec<DevicePtr>, Error> {
        Ok(vec![windows[0]; self.ranks as usize])
    }
    unsafe fn free_windows(&self, _windows: &[DevicePtr]) -> Result<(), Error> {
        self.notes.note("free_windows");
        Ok(())
    }
}

fn config() -> Config {
    Config {
        experts: 2,
        top_k: 1,
        hidden: 8,
        max_tokens_per_rank: 4,
        p2p_world_size: None,
        format: TokenFormat::Bf16,
        combine: CombineMode::Exact,
        deadline: Duration::from_millis(7),
        debug_checks: true,
        max_sms: Some(5),
        specialise: false,
    }
}

fn start(notes: &Arc<Notes>, ranks: u32, config: Config) -> Result<ExpertParallel, Error> {
    let fabric = NotedFabric {
        notes: notes.clone(),
        ranks,
    };
    let group = Group::with_fabric(Arc::new(fabric))?;
    let plan = Plan::new(&group, config)?;
    Ok(ExpertParallel::new(&group, &plan)?.remove(0))
}

fn empty_tensors(rank: &ExpertParallel) -> (DispatchInput, DispatchOutput) {
    let at = memory(4096);
    let local = rank.plan().local_experts();
    let input = DispatchInput {
        input_scale: None,
        x: Tensor::contiguous(at, [2, 8]),
        topk_ids: Tensor::contiguous(at, [2, 1]),
        topk_weights: None,
    };
    let output = DispatchOutput {
        row_scales: None,
        tokens: Tensor::contiguous(at, [6, 8]),
        scales: None,
        row_offsets: Tensor::contiguous(at, [local + 1]),
        expert_ids: Tensor::contiguous(at, [local]),
        src_info: Tensor::contiguous(at, [6, 2]),
    };
    (input, output)
}

fn timeout() -> Fault {
    Fault {
        kind: FaultKind::PeerTimeout,
        kernel: Kernel::Dispatch,
        rank: Rank(0),
        peer: Rank(1),
        region: Region::Counts,
        index: 0,
        wanted: 1,
        saw: 0,
        epoch: 1,
    }
}

#[test]
fn a_communicator_begins_and_ends_in_order() {
    let notes = Arc::default();
    let rank = start(&notes, 2, config()).unwrap();
    let begun = [
        "all_gather",
        "alloc",
        "alloc",
        "all_gather",
        "alloc_windows",
        "fill 0",
        "fill 0",
        "fill 255",
        "upload",
        "all_gather",
    ];
    assert_eq!(notes.take(), begun);
    rank.close().unwrap();
    assert_eq!(
        notes.take(),
        ["free", "free", "drop page", "barrier", "free_windows"]
    );
}

#[test]
fn a_round_does_nothing_but_launch() {
    let notes = Arc::default();
    let mut rank = start(
        &notes,
        2,
        Config {
            p2p_world_size: Some(1),
            ..config()
        },
    )
    .unwrap();
    let (input, output) = empty_tensors(&rank);
    notes.take();
    let combine = CombineInput {
        expert_rows: output.tokens,
        topk_weights: None,
    };
    let apart = Tensor::contiguous(memory(8192), [2, 1, 8]);
    let combined = CombineOutput {
        combined: CombineTensor::Apart(apart),
    };
    // SAFETY: nothing here enqueues.
    let stream = unsafe { Stream::new(9) };
    let dispatched = rank.dispatch(stream, &input, &output).unwrap();
    dispatched.combine(stream, &combine, &combined).unwrap();
    let sent = rank.dispatch_async(stream, &input).unwrap();
    let dispatched = sent.wait(stream, &output).unwrap();
    dispatched
        .combine_async(stream, &combine, &combined)
        .unwrap()
        .wait(stream)
        .unwrap();
    let kernels = [
        "dispatch",
        "combine",
        "dispatch_async",
        "dispatch_wait",
        "combine_async",
        "combine_wait",
    ];
    assert_eq!(notes.take(), kernels);

    let launches = notes.launches.lock().unwrap().clone();
    for launch in &launches {
        assert_eq!(
            (launch.shmem, launch.max_sms, launch.stream),
            (true, Some(5), stream)
        );
        let common = match launch.args {
            Args::Dispatch(args) => args.common,
            Args::Combine(args) => args.common,
            Args::Silu(_) => panic!("a kernel that nobody asked for"),
        };
        assert_eq!(
            (common.deadline_ns, common.debug_checks, common.rank),
            (7_000_000, 1, 0)
        );
        assert_eq!(
            (common.shape, common.fault_page),
            (*rank.plan().shape(), 64)
        );
    }
    let Args::Combine(args) = launches[5].args else {
        panic!("not a combine")
    };
    assert_eq!(
        (args.combined, args.common.tokens, args.row_capacity),
        (8192, 2, 6)
    );
    rank.close().unwrap();
}

#[test]
fn ranks_that_were_configured_differently_name_both_fingerprints() {
    let notes = Arc::new(Notes {
        rank_1_says: Mutex::new(vec![0xabc]),
        ..Notes::default()
    });
    let refused = start(&notes, 2, config()).unwrap_err();
    let Error::ShapeMismatch {
        rank: Rank(0),
        peer: Rank(1),
        ours,
        theirs: 0xabc,
    } = refused
    else {
        panic!("{refused}")
    };
    assert!(
        refused.to_string().contains("0x0000000000000abc"),
        "{refused}"
    );
    assert!(
        refused.to_string().contains(&format!("{ours:#018x}")),
        "{refused}"
    );
    assert_eq!(notes.take(), ["all_gather"]);
}

#[test]
fn a_rank_that_fails_to_begin_is_named_and_nothing_is_kept() {
    let says = |notes: &Notes, plan: &[u64]| *notes.rank_1_says.lock().unwrap() = plan.to_vec();
    let notes = Arc::<Notes>::default();
    let rank = start(&notes, 2, config()).unwrap();
    let same = rank.plan().shape().fingerprint();
    rank.close().unwrap();
    notes.take();

    says(&notes, &[same, 0]);
    let refused = start(&notes, 2, config()).unwrap_err();
    assert!(
        matches!(refused, Error::PeerFailed { rank: Rank(1), .. }),
        "{refused}"
    );
    let kept = [
        "all_gather",
        "alloc",
        "alloc",
        "all_gather",
        "free",
        "free",
        "drop page",
    ];
    assert_eq!(notes.take(), kept);

    says(&notes, &[same, 1, 0]);
    let refused = start(&notes, 2, config()).unwrap_err();
    assert!(
        matches!(refused, Error::PeerFailed { rank: Rank(1), .. }),
        "{refused}"
    );
    let calls = notes.take();
    assert_eq!(
        calls[calls.len() - 4..],
        ["free_windows", "free", "free", "drop page"]
    );
}

#[test]
fn a_rank_that_fails_itself_still_tells_the_others() {
    let notes = Arc::new(Notes {
        refuse_alloc: true,
        ..Notes::default()
    });
    assert!(matches!(start(&notes, 2, config()), Err(Error::NoRanks)));
    assert_eq!(
        notes.take(),
        ["all_gather", "alloc", "drop page", "all_gather"]
    );
}

#[test]
fn dropped_without_close_nothing_is_freed() {
    let notes = Arc::default();
    let rank = start(&notes, 1, config()).unwrap();
    notes.take();
    drop(rank);
    assert_eq!(notes.take(), [""; 0]);
}

#[test]
fn after_a_timeout_close_waits_for_nobody() {
    for (ranks, then) in [(1, &["barrier", "free_windows"][..]), (2, &[])] {
        let notes = Arc::default();
        let mut rank = start(&notes, ranks, config()).unwrap();
        let (input, output) = empty_tensors(&rank);
        notes.take();
        *notes.page.lock().unwrap() = FaultPage::of(&timeout());
        let refused = rank.dispatch(Stream::DEFAULT, &input, &output);
        assert!(matches!(refused, Err(Error::Poisoned(fault)) if fault == timeout()));
        assert!(matches!(rank.check(), Err(Error::Poisoned(_))));
        rank.close().unwrap();
        assert_eq!(
            notes.take(),
            [&["free", "free", "drop page"][..], then].concat()
        );
    }
}

#[test]
fn input_faults_do_not_stop_launches_and_are_told_once() {
    let notes = Arc::default();
    let mut rank = start(&notes, 2, config()).unwrap();
    let (input, output) = empty_tensors(&rank);
    let fault = Fault {
        kind: FaultKind::DuplicateExpert,
        ..timeout()
    };
    *notes.page.lock().unwrap() = FaultPage::of(&fault);
    assert!(rank.dispatch(Stream::DEFAULT, &input, &output).is_ok());
    assert!(matches!(rank.check(), Err(Error::Fault(told)) if told == fault));
    rank.check().unwrap();
    rank.close().unwrap();
}

#[test]
fn a_page_that_makes_no_sense_is_shown() {
    let notes = Arc::<Notes>::default();
    let rank = start(&notes, 2, config()).unwrap();
    *notes.page.lock().unwrap() = FaultPage {
        kind: 99,
        ..FaultPage::of(&timeout())
    };
    assert!(matches!(
        rank.check(),
        Err(Error::FaultPageDamaged { rank: Rank(0), .. })
    ));
    rank.close().unwrap();
}

#[test]
fn a_rank_can_move_to_another_thread() {
    fn send<T: Send>() {}
    send::<ExpertParallel>();
    send::<Dispatched<'_>>();
}
