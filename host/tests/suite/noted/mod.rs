//! A fabric that only takes notes.

use std::any::Any;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferry::device::GpuRanks;
use ferry::device::{FaultPage, InGraph, Launch, SharedPage};
use ferry::layout::{Kernel, Region, Shape};
use ferry::*;

/// Past calls, in order, and settings for future ones.
#[derive(Default)]
pub struct Notes {
    /// Whether all ranks are local, or only the first.
    pub all_local: bool,
    /// Number of the future launch that fails: 0 for the next one.
    pub refused_launch: Mutex<Option<usize>>,
    /// Whether uploads fail.
    pub refuses_uploads: Mutex<bool>,
    pub calls: Mutex<Vec<String>>,
    pub launches: Mutex<Vec<Launch>>,
    pub page: Mutex<FaultPage>,
    /// Words after the page: as many as are asked for.
    pub counts: Mutex<Vec<u64>>,
    /// Answers of rank 1 to each `all_gather`; agreement if there are none left.
    pub rank_1_says: Mutex<Vec<u64>>,
    pub next: Mutex<u64>,
    pub refuse_alloc: bool,
    /// Bytes of memory that are free, if that is known.
    pub free_memory: Option<u64>,
    /// Communicators that a graph in the making holds, if there is one.
    pub graph: Mutex<Option<Held>>,
    /// Whether others capture the launches.
    pub others_capture: Mutex<bool>,
    /// Streams of green contexts, and their multiprocessors.
    pub green: Mutex<Vec<(Stream, u32)>>,
    /// Streams that were asked for theirs.
    pub asked: Mutex<Vec<Stream>>,
    /// The GPU of the ranks, if it is known.
    pub gpu: Option<GpuRanks>,
    /// A stream that is captured, and the capture's number.
    pub captured: Mutex<Option<(Stream, u64)>>,
    /// Another call, made by the next launch.
    pub during_launch: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Streams that were asked for their captures.
    pub captures_asked: Mutex<Vec<Stream>>,
}

pub type Held = Vec<Arc<dyn Any + Send + Sync>>;

impl Notes {
    fn note(&self, call: impl Into<String>) {
        self.calls.lock().unwrap().push(call.into());
    }

    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }

    fn address(&self) -> DevicePtr {
        let mut next = self.next.lock().unwrap();
        *next += 1 << 20;
        memory(*next)
    }
}

/// A MiB that nobody has.
pub fn memory(address: u64) -> DevicePtr {
    // SAFETY: `DevicePtr::new` is about accesses of a device, and none is made here.
    unsafe { DevicePtr::new(address, 1 << 20) }
}

pub struct NotedDevice(Arc<Notes>);

// SAFETY: nothing here runs kernels, or reads or writes device memory.
unsafe impl Device for NotedDevice {
    fn name(&self) -> String {
        "noted".into()
    }
    fn alloc(&self, _bytes: u64) -> Result<DevicePtr, Error> {
        self.0.note("alloc");
        if self.0.refuse_alloc {
            Err(Error::RankCount { ranks: 0 })
        } else {
            Ok(self.0.address())
        }
    }
    fn free_memory(&self) -> Result<Option<u64>, Error> {
        Ok(self.0.free_memory)
    }
    unsafe fn free(&self, _at: DevicePtr) -> Result<(), Error> {
        self.0.note("free");
        Ok(())
    }
    fn upload(&self, _to: DevicePtr, _bytes: &[u8]) -> Result<(), Error> {
        self.0.note("upload");
        if *self.0.refuses_uploads.lock().unwrap() {
            return Err(Error::GroupClosed);
        }
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
    fn stream_multiprocessors(&self, stream: Stream) -> Option<u32> {
        self.0.asked.lock().unwrap().push(stream);
        let green = self.0.green.lock().unwrap();
        let found = green.iter().find(|(of, _)| *of == stream);
        found.map(|&(_, multiprocessors)| multiprocessors)
    }
    fn capture(&self, stream: Stream) -> Option<u64> {
        self.0.captures_asked.lock().unwrap().push(stream);
        let captured = *self.0.captured.lock().unwrap();
        captured
            .filter(|&(of, _)| of == stream)
            .map(|(_, number)| number)
    }
    unsafe fn launch(&self, launch: &Launch) -> Result<(), Error> {
        let other = self.0.during_launch.lock().unwrap().take();
        other.into_iter().for_each(|call| call());
        let mut refused = self.0.refused_launch.lock().unwrap();
        if *refused == Some(0) {
            return Err(Error::GroupClosed);
        }
        *refused = refused.map(|others| others - 1);
        self.0.note(launch.kernel.name());
        self.0.launches.lock().unwrap().push(launch.clone());
        Ok(())
    }
    unsafe fn launch_held(
        &self,
        launch: &Launch,
        held: &Arc<dyn Any + Send + Sync>,
    ) -> Result<InGraph, Error> {
        // SAFETY: the rules of `launch_held` are those of `launch`.
        unsafe { self.launch(launch) }?;
        if *self.0.others_capture.lock().unwrap() {
            return Ok(InGraph::Foreign);
        }
        match &mut *self.0.graph.lock().unwrap() {
            None => return Ok(InGraph::No),
            Some(graph) if graph.is_empty() => graph.push(held.clone()),
            Some(_) => {}
        }
        Ok(InGraph::Held)
    }
    fn fault_page(&self, _: usize) -> Result<Box<dyn SharedPage>, Error> {
        Ok(Box::new(NotedPage(self.0.clone())))
    }
}

pub struct NotedPage(Arc<Notes>);

// SAFETY: no kernel runs that would write it.
unsafe impl SharedPage for NotedPage {
    fn address(&self) -> u64 {
        64
    }
    fn read(&self) -> Result<FaultPage, Error> {
        Ok(*self.0.page.lock().unwrap())
    }
    fn counts(&self, words: &mut [u64]) -> Result<(), Error> {
        let counts = self.0.counts.lock().unwrap();
        words
            .iter_mut()
            .zip(&*counts)
            .for_each(|(word, count)| *word = *count);
        Ok(())
    }
    fn acknowledge(&self, number: u64) {
        self.0.page.lock().unwrap().acknowledged = number;
    }
}

impl Drop for NotedPage {
    fn drop(&mut self) {
        self.0.note("drop page");
    }
}

/// Rank 0 of two, or all of one; all of two where the notes say so.
pub struct NotedFabric {
    pub notes: Arc<Notes>,
    pub ranks: u32,
}

// SAFETY: nothing here runs kernels, or reads or writes device memory.
unsafe impl Fabric for NotedFabric {
    fn name(&self) -> &'static str {
        "noted"
    }
    fn ranks(&self) -> u32 {
        self.ranks
    }
    fn local_ranks(&self) -> Vec<Rank> {
        let local = if self.notes.all_local { self.ranks } else { 1 };
        (0..local).map(Rank).collect()
    }
    fn device(&self, _rank: Rank) -> Result<Arc<dyn Device>, Error> {
        Ok(Arc::new(NotedDevice(self.notes.clone())))
    }
    fn gpu_ranks(&self, _rank: Rank) -> Option<&GpuRanks> {
        self.notes.gpu.as_ref()
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
        let local = self.local_ranks().into_iter();
        Ok(local.map(|_| self.notes.address()).collect())
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
    unsafe fn close(&self) -> Result<(), Error> {
        self.notes.note("close");
        Ok(())
    }
}

pub fn config() -> Config {
    Config {
        combine: CombineMode::Exact,
        deadline: Duration::from_millis(7),
        debug_checks: true,
        max_sms: Some(5),
        ..Config::new(2, 1, 8, 4)
    }
}

pub fn start(notes: &Arc<Notes>, ranks: u32, config: Config) -> Result<Communicator, Error> {
    let fabric = NotedFabric {
        notes: notes.clone(),
        ranks,
    };
    let group = Group::with_fabric(Box::new(fabric))?;
    let plan = Plan::new(&group, config)?;
    Ok(Communicator::new(&group, &plan)?.remove(0))
}

pub fn empty_tensors(rank: &Communicator) -> (DispatchInput, DispatchOutput) {
    let (at, out) = (memory(4096), memory(16384));
    let local = rank.plan().local_experts();
    let input = DispatchInput::new(
        Tensor::contiguous(at, DataType::Bf16, [2, 8]),
        Tensor::contiguous(at, DataType::I32, [2, 1]),
    );
    let output = DispatchOutput::by_expert(
        Tensor::contiguous(out, DataType::Bf16, [6, 8]),
        Tensor::contiguous(out.plus(128), DataType::U32, [local + 1]),
        Tensor::contiguous(out.plus(256), DataType::I32, [local]),
        Tensor::contiguous(out.plus(384), DataType::I32, [6, 2]),
    );
    (input, output)
}

pub fn timeout() -> Fault {
    Fault {
        kind: FaultKind::PeerTimeout,
        kernel: Kernel::Dispatch,
        rank: Rank(0),
        peer: Rank(1),
        culprit: Rank(1),
        region: Region::Counts,
        index: 0,
        wanted: 1,
        saw: 0,
        epoch: 1,
        patience_ms: None,
        gpu_ranks: None,
        is_culprit_behind: false,
    }
}

/// A group over `notes`.
pub fn group_of(notes: &Arc<Notes>) -> Group {
    let fabric = NotedFabric {
        notes: notes.clone(),
        ranks: 2,
    };
    Group::with_fabric(Box::new(fabric)).unwrap()
}

pub fn join(group: &Group, config: Config) -> Communicator {
    let plan = Plan::new(group, config).unwrap();
    Communicator::new(group, &plan).unwrap().remove(0)
}

/// Enqueues a round.
pub fn round(rank: &mut Communicator, stream: Stream) -> Result<(), Error> {
    let (input, output) = empty_tensors(rank);
    let combine = CombineInput::new(output.tokens.unwrap());
    let combined =
        CombineOutput::Apart(Tensor::contiguous(memory(8192), DataType::Bf16, [2, 1, 8]));
    rank.dispatch(stream, &input, &output)?;
    rank.combine(stream, &combine, &combined)
}
