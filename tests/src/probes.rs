//! The probes on a GPU: kernels that measure the machine, for the benchmark, and some that convert numbers
//! and write tensors, for the tests. Their PTX is the tests' own.

use std::mem::offset_of;
use std::sync::Arc;

use anyhow::{Context, Result};
use ferry::cuda::{CudaDevice, CudaKernel, Grid};
use ferry::device::{FaultPage, SharedPage};
use ferry::error::KernelsError;
use ferry::{Device, DevicePtr, Error, Kernels, Stream};
use ferry_probes::{ClearArgs, ConvertArgs, ProbeArgs, WriteArgs};

mod memory;

pub use memory::ProbeMemory;

/// PTX that `build.rs` made of the probes, the most special first.
const EMBEDDED: [&str; 3] = [
    include_str!(env!("FERRY_PTX_SM_100A")),
    include_str!(env!("FERRY_PTX_SM_90A")),
    include_str!(env!("FERRY_PTX_SM_80")),
];

/// A kernel that measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Does nothing.
    Empty,
    /// Waits for the start flag, then for all ranks. One block of 32 threads.
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

    /// Its entry in the PTX.
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

/// The kernel that converts numbers, and how it is launched.
const CONVERT: (&str, Grid) = ("ferry_probe_convert", Grid::new(256, 256));
/// The kernel that writes tensors: few blocks, so that the next kernel finds multiprocessors to begin on.
const WRITE: (&str, Grid) = ("ferry_probe_write", Grid::new(16, 256));
/// The kernel that writes zeros.
const CLEAR: (&str, Grid) = ("ferry_probe_clear", Grid::new(1024, 256));

/// PTX of the probes: the embedded one, or another. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct ProbePtx(Option<Arc<str>>);

impl ProbePtx {
    /// The probes in a text for one architecture, which devices compare with their own. Only the bulk copy
    /// may be missing.
    ///
    /// # Errors
    /// All of [`KernelsError`].
    ///
    /// # Safety
    /// The kernels touch no other memory than the probes of the same names and arguments would, and end as
    /// those do.
    pub unsafe fn from_ptx(text: String) -> Result<Self, KernelsError> {
        let measuring = Probe::ALL
            .into_iter()
            .filter(|&probe| probe != Probe::BulkCopy)
            .map(|probe| (probe.entry(), size_of::<ProbeArgs>()));
        let others = [
            (CONVERT.0, size_of::<ConvertArgs>()),
            (WRITE.0, size_of::<WriteArgs>()),
            (CLEAR.0, size_of::<ClearArgs>()),
        ];
        let wanted: Vec<_> = measuring.chain(others).collect();
        Kernels::check_others(&text, &wanted)?;
        Ok(Self(Some(text.into())))
    }

    /// The most special first.
    fn texts(&self) -> Vec<&str> {
        match &self.0 {
            Some(text) => vec![text],
            None => EMBEDDED.to_vec(),
        }
    }
}

/// The probes of a device.
pub struct Probes {
    probes: [Option<CudaKernel>; Probe::ALL.len()],
    convert: CudaKernel,
    write: CudaKernel,
    clear: CudaKernel,
}

impl Probes {
    /// Loads the probes. Synchronises.
    pub fn new(device: &CudaDevice, ptx: &ProbePtx) -> Result<Self, Error> {
        let module = device.load_ptx(&ptx.texts())?;
        let mut probes = [const { None }; Probe::ALL.len()];
        for probe in Probe::ALL {
            if probe != Probe::BulkCopy || module.has(probe.entry()) {
                probes[probe as usize] = Some(module.kernel(probe.entry())?);
            }
        }
        Ok(Self {
            probes,
            convert: module.kernel(CONVERT.0)?,
            write: module.kernel(WRITE.0)?,
            clear: module.kernel(CLEAR.0)?,
        })
    }

    /// Whether the device has the probe.
    pub const fn has(&self, probe: Probe) -> bool {
        self.probes[probe as usize].is_some()
    }

    /// Enqueues a probe, which the device must have. Does not synchronise.
    ///
    /// # Safety
    /// The addresses in `args` are live allocations of the sizes that its fields imply, mapped
    /// on this device, and `self` is kept, until `stream` has passed the kernel.
    pub unsafe fn launch(
        &self,
        stream: Stream,
        probe: Probe,
        grid: Grid,
        args: &ProbeArgs,
    ) -> Result<()> {
        let kernel = self.probes[probe as usize].as_ref();
        let kernel = kernel.with_context(|| format!("this device has no {}", probe.entry()))?;
        // SAFETY: the kernel takes one `ProbeArgs`; its addresses are as documented on this function.
        Ok(unsafe { kernel.launch(stream, grid, &[bytemuck::bytes_of(args)]) }?)
    }

    /// Enqueues the kernel that converts numbers. Does not synchronise.
    ///
    /// # Safety
    /// The addresses in `args` are live allocations of `count` pairs and words, and `self` is kept, until
    /// `stream` has passed the kernel.
    pub unsafe fn convert(&self, stream: Stream, args: &ConvertArgs) -> Result<(), Error> {
        // SAFETY: the kernel takes one `ConvertArgs`; its addresses are as documented on this function.
        unsafe { (self.convert).launch(stream, CONVERT.1, &[bytemuck::bytes_of(args)]) }
    }

    /// Enqueues the kernel that writes tensors and lets the next one in the stream begin before it has. Does
    /// not synchronise.
    ///
    /// # Safety
    /// Both addresses of each piece in `args` are live allocations of its words, which nothing else writes,
    /// and `self` is kept, until `stream` has passed the kernel.
    pub unsafe fn write(&self, stream: Stream, args: &WriteArgs) -> Result<(), Error> {
        // SAFETY: the kernel takes one `WriteArgs`; its addresses are as documented on this function.
        unsafe { (self.write).launch(stream, WRITE.1, &[bytemuck::bytes_of(args)]) }
    }

    /// Enqueues writing zeros to all of `memory`, a multiple of 16 bytes: enough of them push everything else
    /// out of the cache. Does not synchronise.
    ///
    /// # Safety
    /// Nothing else uses the memory, and `self` is kept, until `stream` has passed the kernel.
    pub unsafe fn clear(&self, stream: Stream, memory: DevicePtr) -> Result<(), Error> {
        let args = ClearArgs {
            at: memory.address(),
            vectors: memory.bytes() / 16,
        };
        // SAFETY: the kernel takes one `ClearArgs`, of memory that [`DevicePtr::new`] or a device promised;
        // who uses it is the caller's promise.
        unsafe { (self.clear).launch(stream, CLEAR.1, &[bytemuck::bytes_of(&args)]) }
    }
}

/// A word in host memory that the kernels of all devices can wait for: [`ProbeArgs::start_flag`]. It is the
/// word of a fault page that the host alone writes.
pub struct Gate(Box<dyn SharedPage>);

impl Gate {
    /// Allocates it, at 0. Synchronises.
    pub fn new(device: &CudaDevice) -> Result<Self, Error> {
        device.fault_page(0).map(Self)
    }

    /// Address at which kernels find it.
    pub fn address(&self) -> u64 {
        self.0.address() + offset_of!(FaultPage, acknowledged) as u64
    }

    /// Lets everybody on who waits for `value` or less.
    pub fn open(&self, value: u64) {
        self.0.acknowledge(value);
    }
}
