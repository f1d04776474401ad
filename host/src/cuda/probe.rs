//! Kernels that measure the machine, for the benchmark, and two that convert numbers and write
//! tensors, for the tests: see [`Probes`].

use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub use ferry_layout::{Conversion, ConvertArgs, ProbeArgs, WriteArgs, WritePiece};

use super::CudaDevice;
use super::device::{Core, raw};

use super::error::{check, check_about, error};
use super::sys::{self, CUfunction, CUmodule, LaunchConfig};
use crate::group::Member;
use crate::memory::agree;
use crate::{CombineMode, Config, DevicePtr, Error, Fabric, Group, Plan, Stream, TokenFormat};

/// Most threads of a block in the launches of a round.
pub const CALL_THREADS: u32 = ferry_layout::Kernel::Dispatch.threads_per_block();

/// A kernel that measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Does nothing.
    Empty,
    /// Waits for the gate, then for all ranks. One block of 32 threads.
    Barrier,
    /// Copies rows to peers with stores.
    Copy,
    /// Copies rows to peers with bulk copies through shared memory. Blocks of 32 threads. Only
    /// on devices of compute capability 9.0 and 10.0.
    BulkCopy,
    /// A word goes back and forth between ranks 0 and 1. One block of 32 threads.
    Ping,
}

impl Probe {
    const ALL: [Self; 5] = [
        Self::Empty,
        Self::Barrier,
        Self::Copy,
        Self::BulkCopy,
        Self::Ping,
    ];

    /// Its entry in the PTX module.
    const fn entry(self) -> &'static str {
        match self {
            Self::Empty => "ferry_probe_empty",
            Self::Barrier => "ferry_probe_barrier",
            Self::Copy => "ferry_probe_copy",
            Self::BulkCopy => "ferry_probe_bulk_copy",
            Self::Ping => "ferry_probe_ping",
        }
    }
}

/// The probes of a device.
pub struct Probes {
    core: Arc<Core>,
    functions: [CUfunction; Probe::ALL.len()],
    convert: CUfunction,
    write: CUfunction,
}

/// The entry of the kernel that converts numbers.
const CONVERT: &str = "ferry_probe_convert";
/// Blocks and threads of each that it is launched with.
const CONVERT_GRID: (u32, u32) = (256, 256);
/// The entry of the kernel that writes tensors.
const WRITE: &str = "ferry_probe_write";
/// Blocks and threads of each that it is launched with: few, so that the next kernel finds multiprocessors to begin on.
const WRITE_GRID: (u32, u32) = (16, 256);

// SAFETY: the driver's function handles may be used from any thread.
unsafe impl Send for Probes {}
// SAFETY: as above; nothing here changes.
unsafe impl Sync for Probes {}

impl Probes {
    /// Looks the probes up in the module of the device's kernels. Synchronises.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn new(device: &CudaDevice) -> Result<Self, Error> {
        let _current = device.enter()?;
        let mut functions = [ptr::null_mut(); Probe::ALL.len()];
        for probe in Probe::ALL {
            match function(device.module().cast(), probe.entry()) {
                Ok(function) => functions[probe as usize] = function,
                Err(_) if probe == Probe::BulkCopy => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self {
            core: device.core().clone(),
            functions,
            convert: function(device.module().cast(), CONVERT)?,
            write: function(device.module().cast(), WRITE)?,
        })
    }

    /// Whether the device has the probe.
    pub const fn has(&self, probe: Probe) -> bool {
        !self.functions[probe as usize].is_null()
    }

    /// Enqueues a probe with `blocks` blocks of `threads` threads. Does not synchronise.
    ///
    /// # Errors
    /// [`Error::Cuda`], also for a probe that the device does not have.
    ///
    /// # Safety
    /// The addresses in `args` are live allocations of the sizes that its fields imply, mapped
    /// on this device, until `stream` has passed the kernel.
    pub unsafe fn launch(
        &self,
        stream: Stream,
        probe: Probe,
        grid: (u32, u32),
        args: &ProbeArgs,
    ) -> Result<(), Error> {
        if !self.has(probe) {
            let detail = format!("this device has no {}", probe.entry());
            return Err(error("cuLaunchKernelEx", sys::INVALID_VALUE, detail));
        }
        let kernel = (self.functions[probe as usize], probe.entry());
        // SAFETY: the kernel takes one `ProbeArgs`; what it holds is the caller's promise.
        unsafe { self.enqueue(stream, kernel, grid, ptr::from_ref(args).cast()) }
    }

    /// Enqueues the kernel that converts numbers. Does not synchronise.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// The addresses in `args` are live allocations of `count` pairs and words until `stream` has
    /// passed the kernel.
    pub unsafe fn convert(&self, stream: Stream, args: &ConvertArgs) -> Result<(), Error> {
        let kernel = (self.convert, CONVERT);
        // SAFETY: the kernel takes one `ConvertArgs`; what it holds is the caller's promise.
        unsafe { self.enqueue(stream, kernel, CONVERT_GRID, ptr::from_ref(args).cast()) }
    }

    /// Enqueues the kernel that writes tensors and lets the next one in the stream begin before it has. Does not
    /// synchronise.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// Both addresses of each piece in `args` are live allocations of its words, which nothing else writes, until
    /// `stream` has passed the kernel.
    pub unsafe fn write(&self, stream: Stream, args: &WriteArgs) -> Result<(), Error> {
        let kernel = (self.write, WRITE);
        // SAFETY: the kernel takes one `WriteArgs`; what it holds is the caller's promise.
        unsafe { self.enqueue(stream, kernel, WRITE_GRID, ptr::from_ref(args).cast()) }
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// `parameter` is live and of the type of the kernel's only parameter, whose addresses are as
    /// it wants them until `stream` has passed the kernel.
    unsafe fn enqueue(
        &self,
        stream: Stream,
        (kernel, entry): (CUfunction, &'static str),
        (blocks, threads): (u32, u32),
        parameter: *const c_void,
    ) -> Result<(), Error> {
        let _current = self.core.context.enter()?;
        let config = LaunchConfig {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
            stream: raw(stream),
            attributes: ptr::null(),
            attribute_count: 0,
        };
        // SAFETY: the caller's promise; the driver copies the parameter before it returns.
        let code = unsafe {
            sys::cuLaunchKernelEx(
                &config,
                kernel,
                [parameter.cast_mut()].as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check_about("cuLaunchKernelEx", code, || entry.to_owned())
    }

    /// Enqueues writing `bytes` zeros at `at`: enough of them push everything else out of the
    /// cache. Does not synchronise.
    ///
    /// # Errors
    /// [`Error::Cuda`], [`Error::MemoryTooShort`].
    pub fn clear(&self, stream: Stream, at: DevicePtr, bytes: u64) -> Result<(), Error> {
        let _current = self.core.context.enter()?;
        at.require("clear", bytes)?;
        // SAFETY: `at` has so many bytes.
        check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(at.address(), 0, bytes as usize, raw(stream))
        })
    }
}

/// Looks a probe up. Asking for its occupancy loads it, so that no launch has to while other
/// kernels wait for it.
fn function(module: CUmodule, entry: &'static str) -> Result<CUfunction, Error> {
    let name = CString::new(entry).unwrap_or_default();
    let mut function = ptr::null_mut();
    // SAFETY: the module is loaded in the current context, and `name` ends with a zero byte.
    let code = unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) };
    check_about("cuModuleGetFunction", code, || entry.to_owned())?;
    let mut blocks: c_int = 0;
    // SAFETY: the function was found in a module of the current context; `blocks` is live.
    check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
        sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, function, 32, 0)
    })?;
    Ok(function)
}

/// Every rank's probe memory, from where the group's windows come, so that a rank addresses
/// another's in whichever process that is. Dropped, it is leaked.
pub struct ProbeMemory {
    /// The group is not closed before.
    _member: Member,
    fabric: Arc<dyn Fabric>,
    own: Vec<DevicePtr>,
    peers: Vec<Vec<DevicePtr>>,
}

impl ProbeMemory {
    /// Allocates `bytes` for each rank, all of one node, and clears the words. Collective.
    /// Synchronises.
    ///
    /// # Errors
    /// [`Error::PeerNotMapped`], [`Error::NvshmemHeap`], [`Error::PeerFailed`], and what the
    /// group's devices report.
    pub fn alloc(group: &Group, bytes: u64) -> Result<Self, Error> {
        let (plan, fabric) = (one_node(group)?, group.fabric.clone());
        let member = group.enter();
        let own = fabric.alloc_windows(bytes.max(ProbeArgs::WORDS_BYTES))?;
        let ranks = fabric.local_ranks();
        let set_up = ranks.iter().zip(&own).map(|(&rank, &at)| {
            fabric.device(rank)?.fill(at, 0, ProbeArgs::WORDS_BYTES)?;
            fabric.peer_windows(rank, &own, plan.shape())
        });
        let set_up: Result<Vec<_>, Error> = set_up.collect();
        // Also the barrier: no probe signals before all words are clear.
        match agree(&*fabric, "setting up probe memory", set_up)? {
            Ok(peers) => Ok(Self {
                _member: member,
                fabric,
                own,
                peers,
            }),
            Err(error) => {
                // SAFETY: they are those of a moment ago, and no rank knows them.
                if let Err(error) = unsafe { fabric.free_windows(&own) } {
                    tracing::warn!(%error, "cannot free probe memory");
                }
                Err(error)
            }
        }
    }

    /// Of the ranks of this process, ascending: its memory, and every rank's as it addresses it.
    pub fn local(&self) -> impl Iterator<Item = (DevicePtr, &[DevicePtr])> {
        let peers = self.peers.iter().map(Vec::as_slice);
        self.own.iter().copied().zip(peers)
    }

    /// Gives it back, after a barrier with the other processes. Collective. Synchronises.
    ///
    /// # Errors
    /// What the group reports.
    ///
    /// # Safety
    /// No probe of any rank is at work, and the addresses are not used any more.
    pub unsafe fn free(self) -> Result<(), Error> {
        self.fabric.barrier()?;
        // SAFETY: the fabric gave them; that nobody uses them is the caller's promise.
        unsafe { self.fabric.free_windows(&self.own) }
    }
}

/// The smallest plan of a group whose ranks share a node: what says who is addressed how.
fn one_node(group: &Group) -> Result<Plan, Error> {
    let config = Config {
        experts: group.ranks() as usize,
        top_k: 1,
        hidden: 8,
        max_tokens_per_rank: 1,
        p2p_world_size: None,
        format: TokenFormat::Bf16,
        combine: CombineMode::Reduced,
        deadline: Duration::from_secs(1),
        debug_checks: false,
        max_sms: None,
        specialise: false,
    };
    Plan::new(group, config)
}

/// A word in host memory that the kernels of all devices can wait for:
/// [`ProbeArgs::gate`].
pub struct Gate {
    core: Arc<Core>,
    word: NonNull<AtomicU64>,
    address: u64,
}

// SAFETY: the word is atomic, and pinned memory belongs to no thread.
unsafe impl Send for Gate {}
// SAFETY: as above.
unsafe impl Sync for Gate {}

impl Gate {
    /// Allocates it, at 0. Synchronises.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn new(device: &CudaDevice) -> Result<Self, Error> {
        let _current = device.enter()?;
        let mut memory = ptr::null_mut();
        let flags: c_uint = sys::MEMHOSTALLOC_PORTABLE | sys::MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: `memory` is a live pointer to write to, and a context is current.
        check("cuMemHostAlloc", unsafe {
            sys::cuMemHostAlloc(&mut memory, size_of::<AtomicU64>(), flags)
        })?;
        let word = NonNull::new(memory.cast::<AtomicU64>()).ok_or_else(|| {
            let detail = "no memory was given".to_owned();
            error("cuMemHostAlloc", sys::INVALID_VALUE, detail)
        })?;
        // SAFETY: the driver gave the memory, aligned to a page, and nobody else knows it yet.
        unsafe { word.write(AtomicU64::new(0)) };
        let mut gate = Self {
            core: device.core().clone(),
            word,
            address: 0,
        };
        // SAFETY: the memory was allocated for devices to address; `address` is live.
        check("cuMemHostGetDevicePointer", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut gate.address, memory, 0)
        })?;
        Ok(gate)
    }

    /// Where kernels find it.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Lets everybody on who waits for `value` or less.
    pub fn open(&self, value: u64) {
        // SAFETY: the memory is there until `self` is dropped, and is accessed as one word.
        unsafe { self.word.as_ref() }.store(value, Ordering::Release);
    }
}

impl Drop for Gate {
    /// No kernel may wait for it any more.
    fn drop(&mut self) {
        let Ok(_current) = self.core.context.enter() else {
            return;
        };
        // SAFETY: `new` got the memory from the driver, and nobody frees it but this.
        let freed = unsafe { sys::cuMemFreeHost(self.word.as_ptr().cast()) };
        if let Err(error) = check("cuMemFreeHost", freed) {
            tracing::warn!(%error, "cannot free a gate");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probe_memory_is_every_ranks_and_its_words_are_clear() {
        let group = Group::simulated(3, 1).unwrap();
        let memory = ProbeMemory::alloc(&group, 0).unwrap();
        let own: Vec<DevicePtr> = memory.local().map(|(own, _)| own).collect();
        for (rank, (at, peers)) in group.local_ranks().into_iter().zip(memory.local()) {
            assert_eq!(peers, own);
            let mut words = [1; ProbeArgs::WORDS_BYTES as usize];
            group
                .device(rank)
                .unwrap()
                .download(at, &mut words)
                .unwrap();
            assert!(words.iter().all(|&byte| byte == 0));
        }
        // SAFETY: no probe was launched.
        unsafe { memory.free() }.unwrap();
    }
}
