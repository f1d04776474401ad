//! The functions that NVSHMEM calls.

use core::ffi::{c_int, c_void};
use core::ptr;
use std::env;
use std::sync::{Arc, OnceLock};

use crate::cuda::Context;
use crate::endpoint::{Endpoint, Verdict};
use crate::error::NetworkError;
use crate::frame::{Atomic, AtomicRequest, MOST_BYTES};
use crate::interface::{
    AmoBytes, AmoMemory, AmoVerb, Bootstrap, CAN_DO_ATOMICS, CAN_READ, CAN_WRITE, GET, GET_VALUE,
    INTERNAL_ERROR, IS_CONNECTED, MemoryHandle, Operations, PUT, PUT_VALUE, PeerInfo, RmaBytes,
    RmaMemory, RmaVerb, Transport, VERSION,
};
use crate::memory::{Memory, Place, Region};
use crate::settings::{Settings, VARIABLE};

/// First word of a memory handle.
const HANDLE: u64 = 0x6e79_7266;

/// A transport's own state.
struct State {
    settings: Settings,
    context: Option<Context>,
    memory: Arc<Memory>,
    endpoint: OnceLock<Endpoint>,
}

impl State {
    fn new(version: c_int) -> Result<Self, NetworkError> {
        if version != VERSION {
            return Err(NetworkError::Interface(version, VERSION));
        }
        let text = env::var(VARIABLE).map_err(|_| NetworkError::NoSettings(VARIABLE))?;
        let settings: Settings = text.parse().map_err(|error| NetworkError::Settings {
            variable: VARIABLE,
            error,
        })?;
        let context = match settings.without_gpu {
            true => None,
            false => Some(Context::current()?),
        };
        Ok(Self {
            settings,
            context,
            memory: Arc::default(),
            endpoint: OnceLock::new(),
        })
    }

    fn place(&self, at: u64) -> Place {
        match &self.context {
            Some(context) if context.is_of_gpu(at) => Place::Gpu,
            _ => Place::Host,
        }
    }
}

/// Makes a transport.
///
/// # Safety
/// `out` is where it goes. The thread has the context of the GPU that NVSHMEM uses.
pub unsafe fn init(out: *mut *mut Transport, version: c_int) -> c_int {
    let state = match State::new(version) {
        Ok(state) => state,
        Err(error) => {
            eprintln!("ferry-network: {error}");
            return INTERNAL_ERROR;
        }
    };
    if state.settings.log {
        eprintln!("ferry-network: {:?}", state.settings);
    }
    let transport = Transport {
        version: VERSION,
        kind: 0,
        capabilities: ptr::null_mut(),
        operations: OPERATIONS,
        bootstrap: ptr::null_mut(),
        state: Box::into_raw(Box::new(state)).cast(),
        shared_state: ptr::null_mut(),
        cache: ptr::null_mut(),
        device_paths: ptr::null_mut(),
        attributes: IS_CONNECTED,
        devices: 0,
        atomics_complete_on_quiet: false,
        is_initialized: true,
        has_no_proxy: false,
        heap: ptr::null_mut(),
        log2_granularity: 0,
        most_bytes: MOST_BYTES as u64,
        atomic_host_endian_min_size: 0,
        index: 0,
        pe: 0,
        pes: 0,
        aliases: ptr::null_mut(),
        host_memory: ptr::null_mut(),
    };
    // SAFETY: as the caller promises.
    unsafe { *out = Box::into_raw(Box::new(transport)) };
    0
}

const OPERATIONS: Operations = Operations {
    can_reach_peer,
    connect_endpoints,
    get_mem_handle,
    release_mem_handle,
    finalize,
    show_info,
    progress,
    rma,
    amo,
    fence,
    quiet,
    enforce_consistency: ptr::null(),
    enforce_consistency_at_target: ptr::null(),
    add_device_remote_mem_handles: ptr::null(),
};

/// The transport's state.
///
/// # Safety
/// [`init`] made the transport, and [`finalize`] has not freed it.
unsafe fn state<'a>(transport: *mut Transport) -> &'a State {
    // SAFETY: as the caller promises; the state is only shared.
    unsafe { &*(*transport).state.cast::<State>() }
}

/// The endpoint and a peer's index, if it is connected and there is such a peer.
///
/// # Safety
/// As of [`state`].
unsafe fn endpoint<'a>(transport: *mut Transport, pe: c_int) -> Option<(&'a Endpoint, usize)> {
    // SAFETY: as the caller promises.
    let endpoint = unsafe { state(transport) }.endpoint.get()?;
    let pe = usize::try_from(pe).ok()?;
    endpoint.has(pe).then_some((endpoint, pe))
}

const fn code(verdict: Verdict) -> c_int {
    match verdict {
        Verdict::Fine => 0,
        Verdict::Failed => INTERNAL_ERROR,
    }
}

unsafe extern "C" fn can_reach_peer(
    access: *mut c_int,
    _peer: *mut PeerInfo,
    _transport: *mut Transport,
) -> c_int {
    // SAFETY: NVSHMEM's variable.
    unsafe { *access = CAN_WRITE | CAN_READ | CAN_DO_ATOMICS };
    0
}

unsafe extern "C" fn show_info(_transport: *mut Transport, _style: c_int) -> c_int {
    0
}

unsafe extern "C" fn progress(transport: *mut Transport) -> c_int {
    // SAFETY: NVSHMEM's transport is the one that `init` made.
    let endpoint = unsafe { state(transport) }.endpoint.get();
    endpoint.map_or(0, |endpoint| code(endpoint.progress()))
}

unsafe extern "C" fn connect_endpoints(
    transport: *mut Transport,
    _devices: *mut c_int,
    _count: c_int,
) -> c_int {
    // SAFETY: NVSHMEM's transport is the one that `init` made.
    let (transport, state) = unsafe { (&*transport, state(transport)) };
    if state.endpoint.get().is_some() {
        return 0;
    }
    let numbers = [transport.pe, transport.pes].map(|number| usize::try_from(number).unwrap_or(0));
    let bootstrap = transport.bootstrap;
    let connected = Endpoint::connect(
        state.settings.clone(),
        state.context,
        state.memory.clone(),
        numbers,
        // SAFETY: NVSHMEM's bootstrap.
        |bytes, pes| unsafe { all_gather(bootstrap, bytes, pes) },
    );
    match connected {
        Ok(endpoint) => {
            // Only the thread that initializes NVSHMEM is here.
            let _ = state.endpoint.set(endpoint);
            0
        }
        Err(error) => {
            eprintln!("ferry-network: PE {}: {error}", transport.pe);
            INTERNAL_ERROR
        }
    }
}

/// # Safety
/// It is NVSHMEM's bootstrap, of so many PEs.
unsafe fn all_gather(
    bootstrap: *mut Bootstrap,
    bytes: &[u8],
    pes: usize,
) -> Result<Vec<u8>, NetworkError> {
    let mut all = vec![0; bytes.len() * pes];
    // SAFETY: as the caller promises.
    let function = unsafe { (*bootstrap).all_gather };
    let Some(function) = function else {
        return Err(NetworkError::AllGather(INTERNAL_ERROR));
    };
    let (send, receive) = (bytes.as_ptr().cast(), all.as_mut_ptr().cast());
    // SAFETY: there is room for so many bytes of each PE.
    match unsafe { function(send, receive, bytes.len() as c_int, bootstrap) } {
        0 => Ok(all),
        code => Err(NetworkError::AllGather(code)),
    }
}

unsafe extern "C" fn get_mem_handle(
    handle: *mut MemoryHandle,
    at: *mut c_void,
    bytes: usize,
    transport: *mut Transport,
    is_local: bool,
) -> c_int {
    // SAFETY: NVSHMEM's transport is the one that `init` made.
    let state = unsafe { state(transport) };
    let region = Region {
        base: at as u64,
        bytes: bytes as u64,
        place: state.place(at as u64),
        is_local,
    };
    // SAFETY: NVSHMEM's variable.
    let (words, _) = unsafe { (*handle).0.as_chunks_mut::<8>() };
    words.fill([0; 8]);
    for (word, value) in words.iter_mut().zip([HANDLE, region.base, region.bytes]) {
        *word = value.to_le_bytes();
    }
    state.memory.register(region);
    if let Some(endpoint) = state.endpoint.get() {
        endpoint.log(&format!("registers {region:x?}"));
    }
    0
}

unsafe extern "C" fn release_mem_handle(
    handle: *mut MemoryHandle,
    transport: *mut Transport,
) -> c_int {
    // SAFETY: NVSHMEM's transport is the one that `init` made, and the handle is one of `get_mem_handle`.
    let (state, words) = unsafe { (state(transport), (*handle).0.as_chunks::<8>().0) };
    let [magic, base, bytes] = std::array::from_fn(|index| u64::from_le_bytes(words[index]));
    // Nothing is registered for another handle.
    if magic == HANDLE {
        state.memory.release(base, bytes);
    }
    0
}

/// Says what was asked for that there is not.
fn refuse(text: &str) -> c_int {
    eprintln!("ferry-network: {text}");
    INTERNAL_ERROR
}

unsafe extern "C" fn rma(
    transport: *mut Transport,
    pe: c_int,
    verb: RmaVerb,
    remote: *mut RmaMemory,
    local: *mut RmaMemory,
    bytes: RmaBytes,
    by_proxy: c_int,
) -> c_int {
    // SAFETY: NVSHMEM's transport is the one that `init` made.
    let Some((endpoint, pe)) = (unsafe { endpoint(transport, pe) }) else {
        return refuse(&format!("there is no PE {pe}, or none is connected"));
    };
    // SAFETY: NVSHMEM's variables.
    let (remote, local) = unsafe { ((*remote).address as u64, (*local).address as u64) };
    let element = usize::try_from(bytes.element_bytes).ok();
    let Some(length) = element.and_then(|element| element.checked_mul(bytes.elements)) else {
        let RmaBytes {
            elements,
            element_bytes,
            ..
        } = bytes;
        return refuse(&format!("{elements} elements of {element_bytes} bytes"));
    };
    let by_proxy = by_proxy != 0;
    let verdict = match verb.operation {
        // SAFETY: NVSHMEM's caller keeps the bytes until a quiet.
        PUT => unsafe { endpoint.put(pe, [remote, local], length, by_proxy) },
        PUT_VALUE if matches!(length, 1 | 2 | 4 | 8) => {
            let mut value = [0; 8];
            // SAFETY: so many bytes of host memory are there during the call.
            unsafe { ptr::copy_nonoverlapping(local as *const u8, value.as_mut_ptr(), length) };
            let value = u64::from_le_bytes(value);
            endpoint.put_value(pe, remote, [value, length as u64], by_proxy)
        }
        PUT_VALUE => return refuse(&format!("a value has {length} bytes")),
        // SAFETY: NVSHMEM's caller keeps the room until a quiet.
        GET | GET_VALUE => unsafe { endpoint.get(pe, [local, remote], length, by_proxy) },
        other => return refuse(&format!("there is no operation {other}")),
    };
    code(verdict)
}

unsafe extern "C" fn amo(
    transport: *mut Transport,
    pe: c_int,
    _back: *mut c_void,
    verb: AmoVerb,
    target: *mut AmoMemory,
    bytes: AmoBytes,
    by_proxy: c_int,
) -> c_int {
    // SAFETY: NVSHMEM's transport is the one that `init` made.
    let Some((endpoint, pe)) = (unsafe { endpoint(transport, pe) }) else {
        return refuse(&format!("there is no PE {pe}, or none is connected"));
    };
    let Some((operation, fetches)) = Atomic::of_nvshmem(verb.operation) else {
        return refuse(&format!("there is no atomic operation {}", verb.operation));
    };
    // SAFETY: NVSHMEM's variable.
    let target = unsafe { &*target };
    let at = target.remote.address as u64;
    let size = match bytes.element_bytes {
        4 => 4,
        8 => 8,
        other => return refuse(&format!("an atomic operation on {other} bytes")),
    };
    if !at.is_multiple_of(u64::from(size)) {
        return refuse(&format!("an atomic operation on {size} bytes at {at:#x}"));
    }
    let atomic = AtomicRequest {
        at,
        size,
        operation,
        value: target.value,
        comparand: target.comparand,
        fetch: None,
    };
    let back = fetches.then_some((target.return_address as u64, target.return_flag));
    // SAFETY: NVSHMEM has room for the old value and the flag there.
    code(unsafe { endpoint.change(pe, atomic, back, by_proxy != 0) })
}

unsafe extern "C" fn fence(transport: *mut Transport, pe: c_int, _by_proxy: c_int) -> c_int {
    // SAFETY: NVSHMEM's transport is the one that `init` made.
    let endpoint = unsafe { endpoint(transport, pe) };
    endpoint.map_or(0, |(endpoint, pe)| code(endpoint.fence(pe)))
}

unsafe extern "C" fn quiet(transport: *mut Transport, pe: c_int, _by_proxy: c_int) -> c_int {
    // SAFETY: NVSHMEM's transport is the one that `init` made.
    let endpoint = unsafe { endpoint(transport, pe) };
    endpoint.map_or(0, |(endpoint, pe)| code(endpoint.quiet(pe)))
}

unsafe extern "C" fn finalize(transport: *mut Transport) -> c_int {
    // SAFETY: `init` made both, and NVSHMEM does not use them any more.
    unsafe {
        let transport = Box::from_raw(transport);
        drop(Box::from_raw(transport.state.cast::<State>()));
    }
    0
}
