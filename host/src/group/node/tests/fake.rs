//! A machine whose processes are threads, and whose windows are the simulator's memory.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Barrier, Mutex, MutexGuard};

use super::*;
use crate::device::Device;
use crate::device::sharing::own_gpu::{Gpu, Terms};
use crate::error::CudaError;
use crate::group::bootstrap::Bootstrap;
use crate::tensor::handles::DevicePtr;

pub const HIDDEN: usize = 8;
pub const LONG: Duration = Duration::from_secs(20);
pub const SHORT: Duration = Duration::from_secs(3);

/// One token per rank, for one of as many experts.
pub fn config(ranks: u32) -> Config {
    Config {
        deadline: LONG,
        ..Config::new(ranks as usize, 1, HIDDEN, 1)
    }
}

/// A step of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Open,
    Access,
    Alloc,
    Export,
    Map,
    /// Maps other memory.
    Confuse,
    Unmap,
}

impl Step {
    /// A part of its error's text.
    pub fn text(self) -> &'static str {
        match self {
            Self::Open => "there is no device 9",
            Self::Access => "peer access",
            Self::Alloc => "cuMemAlloc",
            Self::Export => "cannot share its window",
            Self::Map => "cannot map the window of rank",
            Self::Confuse => "rank 1 mapped as the window of rank 2 is not that window",
            Self::Unmap => "cuIpcCloseMemHandle",
        }
    }
}

/// The rank that fails, the step, and the number of the window: the first one is that of the group.
#[derive(Clone, Copy, Debug)]
pub struct Failure {
    of: Option<(u32, Step, u64)>,
}

impl Failure {
    pub fn none() -> Self {
        Self { of: None }
    }

    pub fn of(rank: u32, step: Step, window: u64) -> Self {
        Self {
            of: Some((rank, step, window)),
        }
    }
}

/// Windows and maps on the machine.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    pub windows: BTreeSet<u64>,
    /// Ranks, and the windows that they have mapped.
    pub maps: BTreeSet<(u32, u64)>,
    pub drained: usize,
}

impl Ledger {
    pub fn is_clean(&self) -> bool {
        self.windows.is_empty() && self.maps.is_empty()
    }
}

/// A machine with several GPUs.
pub struct Node {
    /// The simulator, of which each process uses a rank.
    inside: Group,
    ledger: Arc<Mutex<Ledger>>,
    address: SocketAddr,
    timeout: Duration,
    barrier: Barrier,
}

impl Node {
    pub fn new(ranks: u32) -> Self {
        Self::with_timeout(ranks, LONG)
    }

    /// A machine whose bootstraps have this timeout.
    pub fn with_timeout(ranks: u32, timeout: Duration) -> Self {
        Self {
            inside: Group::simulated(ranks, 1).unwrap(),
            ledger: Arc::default(),
            address: free_address(),
            timeout,
            barrier: Barrier::new(ranks as usize),
        }
    }

    pub fn process(&self, rank: u32) -> Process<'_> {
        Process { node: self, rank }
    }

    /// Runs `run` in each process, and returns the results by rank.
    pub fn each<T: Send>(
        &self,
        run: impl Fn(Process<'_>) -> Result<T, Error> + Sync,
    ) -> Vec<Result<T, Error>> {
        let run = &run;
        thread::scope(|scope| {
            let start = |rank| scope.spawn(move || run(self.process(rank)));
            let threads: Vec<_> = (0..self.inside.ranks()).map(start).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        })
    }

    pub fn ledger(&self) -> Ledger {
        self.ledger.lock().unwrap().clone()
    }
}

/// An address that nobody else gets: every call has one of the machine's own for itself.
fn free_address() -> SocketAddr {
    static CALLS: AtomicU8 = AtomicU8::new(0);
    let [.., high, low] = std::process::id().to_be_bytes();
    let last = 254 - CALLS.fetch_add(1, Ordering::Relaxed);
    let listener = TcpListener::bind((Ipv4Addr::new(127, high, low, last), 0));
    listener.and_then(|listener| listener.local_addr()).unwrap()
}

/// A process, with a GPU of its own.
#[derive(Clone, Copy)]
pub struct Process<'a> {
    node: &'a Node,
    pub rank: u32,
}

impl Process<'_> {
    pub fn place(self) -> Place {
        let gpu = Gpu {
            uuid: [self.rank as u8; 16],
            machine: "boot 1".into(),
        };
        let process = super::super::introduction::Process {
            id: 1 + self.rank,
            ..Default::default()
        };
        let host = "host".into();
        let terms = Terms {
            multiprocessors: 132,
            shares: false,
            runs_beside_others: false,
        };
        Place {
            gpu,
            terms,
            host,
            process,
        }
    }

    pub fn bootstrap(self) -> TcpBootstrap {
        let (
            ranks,
            Node {
                address, timeout, ..
            },
        ) = (self.node.inside.ranks(), self.node);
        TcpBootstrap::connect(self.rank, ranks, *address, *timeout).unwrap()
    }

    pub fn join(self, failure: Failure) -> Result<Group, Error> {
        self.join_with(Box::new(self.bootstrap()), failure)
    }

    pub fn join_at(self, place: Place) -> Result<Group, Error> {
        self.join_over(Box::new(self.bootstrap()), place, Failure::none())
    }

    pub fn join_with(
        self,
        bootstrap: Box<dyn Bootstrap>,
        failure: Failure,
    ) -> Result<Group, Error> {
        self.join_over(bootstrap, self.place(), failure)
    }

    pub fn join_over(
        self,
        bootstrap: Box<dyn Bootstrap>,
        place: Place,
        failure: Failure,
    ) -> Result<Group, Error> {
        let fake = Fake {
            rank: Rank(self.rank),
            device: self.node.inside.device(Rank(self.rank))?,
            place,
            failure,
            allocated: Mutex::default(),
            ledger: self.node.ledger.clone(),
        };
        let open = || {
            if fake.fails(Step::Open) {
                return Err(Error::NoSuchDevice {
                    device: 9,
                    devices: 1,
                });
            }
            Ok(fake)
        };
        Group::with_fabric(Box::new(NodeFabric::join(bootstrap, open)?))
    }

    /// Returns once the other processes have called it.
    pub fn wait_for_the_others(self) {
        self.node.barrier.wait();
    }
}

struct Fake {
    rank: Rank,
    device: Arc<dyn Device>,
    place: Place,
    failure: Failure,
    allocated: Mutex<u64>,
    ledger: Arc<Mutex<Ledger>>,
}

impl Fake {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap()
    }

    fn fails(&self, step: Step) -> bool {
        let Some((rank, at, window)) = self.failure.of else {
            return false;
        };
        let before_windows = matches!(step, Step::Open | Step::Access);
        let is_window = before_windows || window == *self.allocated.lock().unwrap();
        Rank(rank) == self.rank && at == step && is_window
    }

    fn refused(call: &'static str) -> CudaError {
        CudaError {
            call,
            code: 217,
            name: "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED".into(),
            detail: String::new(),
        }
    }
}

impl Share for Fake {
    fn device(&self) -> Arc<dyn Device> {
        self.device.clone()
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self) -> Option<Arc<crate::cuda::CudaDevice>> {
        None
    }

    fn place(&self) -> Result<Place, Error> {
        Ok(self.place.clone())
    }

    fn require_access(&self, rank: Rank, peer: Rank, gpu: &Gpu) -> Result<(), Error> {
        if !self.fails(Step::Access) {
            return Ok(());
        }
        Err(Error::Node(NodeError::NoPeerAccess {
            rank,
            peer,
            device: self.place.gpu.name(),
            peer_device: gpu.name(),
        }))
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error> {
        *self.allocated.lock().unwrap() += 1;
        if self.fails(Step::Alloc) {
            return Err(Self::refused("cuMemAlloc").into());
        }
        let window = self.device.alloc(bytes)?;
        self.ledger().windows.insert(window.address());
        Ok(window)
    }

    unsafe fn free(&self, window: DevicePtr) -> Result<(), Error> {
        let mut ledger = self.ledger();
        let at = window.address();
        assert!(ledger.windows.remove(&at), "{at:#x} is freed twice");
        let mapped = ledger.maps.iter().find(|map| map.1 == at);
        assert!(mapped.is_none(), "{at:#x} is freed, and mapped: {mapped:?}");
        // SAFETY: `alloc` got it from the device, and nothing uses it any more: documented on `Share::free`.
        unsafe { self.device.free(window) }
    }

    fn export(&self, rank: Rank, window: DevicePtr) -> Result<Vec<u8>, Error> {
        assert_eq!(rank, self.rank);
        if self.fails(Step::Export) {
            let source = Self::refused("cuIpcGetMemHandle");
            return Err(Error::Node(NodeError::NotShared { rank, source }));
        }
        Ok(window.address().to_le_bytes().to_vec())
    }

    unsafe fn map(
        &self,
        rank: Rank,
        peer: Rank,
        handle: &[u8],
        bytes: u64,
    ) -> Result<DevicePtr, Error> {
        let mut at = u64::from_le_bytes(handle.try_into().unwrap());
        let mut ledger = self.ledger();
        if self.fails(Step::Confuse) && peer == Rank(2) {
            let is_other =
                |&&window: &&u64| window != at && !ledger.maps.contains(&(rank.0, window));
            at = *ledger.windows.iter().find(is_other).unwrap();
        }
        assert!(
            ledger.windows.contains(&at),
            "{at:#x} is mapped, and not there"
        );
        // The last one, so that some are mapped already.
        if self.fails(Step::Map) && peer == Rank(2) {
            let source = Self::refused("cuIpcOpenMemHandle");
            return Err(Error::Node(NodeError::NotMapped { rank, peer, source }));
        }
        assert!(ledger.maps.insert((rank.0, at)), "{at:#x} is mapped twice");
        // SAFETY: the simulator's ranks address each other's memory, and it refuses freed addresses.
        Ok(unsafe { DevicePtr::new(at, bytes) })
    }

    unsafe fn unmap(&self, mapped: DevicePtr) -> Result<(), Error> {
        if self.fails(Step::Unmap) {
            return Err(Self::refused("cuIpcCloseMemHandle").into());
        }
        let map = (self.rank.0, mapped.address());
        assert!(self.ledger().maps.remove(&map), "{map:?} is not mapped");
        Ok(())
    }

    fn drain(&self) -> Result<(), Error> {
        self.ledger().drained += 1;
        Ok(())
    }
}
