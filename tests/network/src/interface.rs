//! The interface of NVSHMEM's host library and a remote transport: `transport.h` of NVSHMEM 3.4.5, which has
//! version 3.0.0. Later versions order the same fields in another way.

use core::ffi::{c_char, c_int, c_void};
use core::mem::{offset_of, size_of};

/// Version of this interface. NVSHMEM passes its own to the transport.
pub const VERSION: c_int = 30000;

/// A put of bytes.
pub const PUT: c_int = 1;
/// A put of a value of up to 8 bytes.
pub const PUT_VALUE: c_int = 2;
/// A get of bytes.
pub const GET: c_int = 4;
/// A get of a value of up to 8 bytes.
pub const GET_VALUE: c_int = 5;

/// The peer's memory can be written by way of the CPU.
pub const CAN_WRITE: c_int = 1 << 4;
/// The peer's memory can be read by way of the CPU.
pub const CAN_READ: c_int = 1 << 5;
/// The peer's memory takes atomic operations by way of the CPU.
pub const CAN_DO_ATOMICS: c_int = 1 << 6;

/// The transport connects its endpoints before it is used.
pub const IS_CONNECTED: c_int = 1 << 1;

/// NVSHMEM's code for a failure inside.
pub const INTERNAL_ERROR: c_int = 7;

/// A PE's memory, as it tells the others.
#[repr(C)]
pub struct MemoryHandle(pub [u8; 512]);

/// A peer, as [`Operations::can_reach_peer`] is asked of it.
#[repr(C)]
pub struct PeerInfo {
    /// Domain, bus and device of its GPU.
    pub pcie: [c_int; 3],
    /// Its number.
    pub pe: c_int,
    /// Hash of its host's name.
    pub host_hash: u64,
    /// Its GPU.
    pub gpu_uuid: [u8; 16],
}

/// Kind of a put or get. NVSHMEM's proxy sets nothing but the first two fields.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RmaVerb {
    /// [`PUT`], [`PUT_VALUE`], [`GET`] or [`GET_VALUE`].
    pub operation: c_int,
    /// Whether it need not be complete on return.
    pub is_nbi: c_int,
    /// Whether it belongs to a stream.
    pub is_stream: c_int,
    /// The stream.
    pub stream: *mut c_void,
}

/// An end of a put or get.
#[repr(C)]
pub struct RmaMemory {
    /// Address in the process that has the memory.
    pub address: *mut c_void,
    /// Offset in the symmetric heap.
    pub offset: u64,
    /// Handle of the memory.
    pub handle: *mut MemoryHandle,
}

/// Extent of a put or get. NVSHMEM's proxy leaves the strides unset.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RmaBytes {
    /// Number of elements.
    pub elements: usize,
    /// Bytes of each.
    pub element_bytes: c_int,
    /// Elements from one to the next at the source.
    pub source_stride: isize,
    /// Elements from one to the next at the target.
    pub target_stride: isize,
}

/// Kind of an atomic operation.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AmoVerb {
    /// Its number, that of an `Atomic`.
    pub operation: c_int,
    /// Whether it returns the old value.
    pub is_fetch: c_int,
    /// Whether it has a value.
    pub has_value: c_int,
    /// Whether it compares.
    pub has_comparand: c_int,
}

/// Memory and values of an atomic operation.
#[repr(C)]
pub struct AmoMemory {
    /// The word.
    pub remote: RmaMemory,
    /// Flag that is set behind the old value.
    pub return_flag: u64,
    /// Place of the old value, then the flag.
    pub return_address: *mut c_void,
    /// Unused.
    pub value_address: *mut c_void,
    /// Unused.
    pub comparand_address: *mut c_void,
    /// The value.
    pub value: u64,
    /// The value that is compared.
    pub comparand: u64,
    /// Handle of the memory of the old value.
    pub return_handle: *mut MemoryHandle,
}

/// Extent of an atomic operation.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AmoBytes {
    /// Number of the type.
    pub type_number: c_int,
    /// Bytes of the word.
    pub element_bytes: c_int,
}

/// NVSHMEM's exchange between PEs.
#[repr(C)]
pub struct Bootstrap {
    /// Version of the bootstrap.
    pub version: c_int,
    /// Number of this process.
    pub rank: c_int,
    /// Number of processes.
    pub ranks: c_int,
    /// Number of this process on its node.
    pub rank_of_node: c_int,
    /// Processes of the node.
    pub ranks_of_node: c_int,
    /// Sends so many bytes to all and receives those of all, by rank.
    pub all_gather: Option<AllGather>,
    /// Unused.
    pub all_to_all: *const c_void,
    /// Unused.
    pub barrier: *const c_void,
    /// Unused.
    pub global_exit: *const c_void,
    /// Unused.
    pub finalize: *const c_void,
    /// Unused.
    pub show_info: *const c_void,
    /// Unused.
    pub pre_init_operations: *mut c_void,
    /// The bootstrap's own.
    pub state: *mut c_void,
}

/// Sends so many bytes to all and receives those of all, by rank.
pub type AllGather =
    unsafe extern "C" fn(*const c_void, *mut c_void, c_int, *mut Bootstrap) -> c_int;

/// The functions of a transport.
#[repr(C)]
pub struct Operations {
    /// Says how a peer can be reached.
    pub can_reach_peer: unsafe extern "C" fn(*mut c_int, *mut PeerInfo, *mut Transport) -> c_int,
    /// Connects to all PEs. Collective.
    pub connect_endpoints: unsafe extern "C" fn(*mut Transport, *mut c_int, c_int) -> c_int,
    /// Registers memory.
    pub get_mem_handle:
        unsafe extern "C" fn(*mut MemoryHandle, *mut c_void, usize, *mut Transport, bool) -> c_int,
    /// Forgets memory.
    pub release_mem_handle: unsafe extern "C" fn(*mut MemoryHandle, *mut Transport) -> c_int,
    /// Ends the transport and frees it.
    pub finalize: unsafe extern "C" fn(*mut Transport) -> c_int,
    /// Prints what there is.
    pub show_info: unsafe extern "C" fn(*mut Transport, c_int) -> c_int,
    /// Is called by the proxy all the time.
    pub progress: unsafe extern "C" fn(*mut Transport) -> c_int,
    /// Puts and gets.
    pub rma: unsafe extern "C" fn(
        *mut Transport,
        c_int,
        RmaVerb,
        *mut RmaMemory,
        *mut RmaMemory,
        RmaBytes,
        c_int,
    ) -> c_int,
    /// Atomic operations, signals among them.
    pub amo: unsafe extern "C" fn(
        *mut Transport,
        c_int,
        *mut c_void,
        AmoVerb,
        *mut AmoMemory,
        AmoBytes,
        c_int,
    ) -> c_int,
    /// Orders what was asked before it to a peer before what is asked after it.
    pub fence: unsafe extern "C" fn(*mut Transport, c_int, c_int) -> c_int,
    /// Waits until all is done that was asked of a peer.
    pub quiet: unsafe extern "C" fn(*mut Transport, c_int, c_int) -> c_int,
    /// Unused.
    pub enforce_consistency: *const c_void,
    /// Unused.
    pub enforce_consistency_at_target: *const c_void,
    /// Unused.
    pub add_device_remote_mem_handles: *const c_void,
}

/// A transport. NVSHMEM sets all but the first three fields and those that say that they are the transport's.
#[repr(C)]
pub struct Transport {
    /// Version of the interface that the transport has. The transport's.
    pub version: c_int,
    /// Kind of device code, 0 for none. The transport's.
    pub kind: c_int,
    /// Answers of [`Operations::can_reach_peer`] about each PE.
    pub capabilities: *mut c_int,
    /// Its functions. The transport's.
    pub operations: Operations,
    /// The exchange between PEs.
    pub bootstrap: *mut Bootstrap,
    /// The transport's.
    pub state: *mut c_void,
    /// Unused.
    pub shared_state: *mut c_void,
    /// NVSHMEM's registered buffers.
    pub cache: *mut c_void,
    /// Paths of devices.
    pub device_paths: *mut *mut c_char,
    /// [`IS_CONNECTED`]. The transport's.
    pub attributes: c_int,
    /// Number of devices that NVSHMEM chooses among. The transport's.
    pub devices: c_int,
    /// Whether an atomic operation's old value is there only after a quiet. The transport's.
    pub atomics_complete_on_quiet: bool,
    /// The transport's.
    pub is_initialized: bool,
    /// Whether device code needs no proxy. The transport's.
    pub has_no_proxy: bool,
    /// The symmetric heap.
    pub heap: *mut c_void,
    /// Granularity of its memory.
    pub log2_granularity: usize,
    /// Most bytes of an operation. The transport's.
    pub most_bytes: u64,
    /// The transport's.
    pub atomic_host_endian_min_size: u32,
    /// Number of the transport.
    pub index: c_int,
    /// Number of this PE.
    pub pe: c_int,
    /// Number of PEs.
    pub pes: c_int,
    /// Unused.
    pub aliases: *mut c_void,
    /// Unused.
    pub host_memory: *mut c_void,
}

/// Sizes and places, as a C++ compiler has them.
const _: () = {
    assert!(size_of::<MemoryHandle>() == 512);
    assert!(size_of::<PeerInfo>() == 40);
    assert!(size_of::<RmaVerb>() == 24 && offset_of!(RmaVerb, stream) == 16);
    assert!(size_of::<RmaMemory>() == 24 && size_of::<RmaBytes>() == 32);
    assert!(size_of::<AmoVerb>() == 16 && size_of::<AmoBytes>() == 8);
    assert!(size_of::<AmoMemory>() == 80 && offset_of!(AmoMemory, value) == 56);
    assert!(offset_of!(AmoMemory, return_flag) == 24);
    assert!(offset_of!(AmoMemory, return_handle) == 72);
    assert!(size_of::<Bootstrap>() == 88 && offset_of!(Bootstrap, all_gather) == 24);
    assert!(offset_of!(Bootstrap, barrier) == 40 && offset_of!(Bootstrap, state) == 80);
    assert!(size_of::<Operations>() == 112 && offset_of!(Operations, rma) == 56);
    assert!(offset_of!(Operations, quiet) == 80);
    assert!(offset_of!(Operations, enforce_consistency) == 88);
    assert!(size_of::<Transport>() == 240 && offset_of!(Transport, capabilities) == 8);
    assert!(offset_of!(Transport, operations) == 16 && offset_of!(Transport, bootstrap) == 128);
    assert!(offset_of!(Transport, state) == 136 && offset_of!(Transport, attributes) == 168);
    assert!(offset_of!(Transport, devices) == 172);
    assert!(offset_of!(Transport, atomics_complete_on_quiet) == 176);
    assert!(offset_of!(Transport, is_initialized) == 177);
    assert!(offset_of!(Transport, has_no_proxy) == 178 && offset_of!(Transport, heap) == 184);
    assert!(offset_of!(Transport, most_bytes) == 200);
    assert!(offset_of!(Transport, atomic_host_endian_min_size) == 208);
    assert!(offset_of!(Transport, pe) == 216 && offset_of!(Transport, pes) == 220);
    assert!(offset_of!(Transport, host_memory) == 232);
};
