//! A process that does as NVSHMEM does with its transport.

use core::ffi::{c_int, c_void};
use std::env;
use std::io::{Write, stdin, stdout};
use std::mem::zeroed;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use ferry_network::entry;
use ferry_network::interface::{
    AmoBytes, AmoMemory, AmoVerb, Bootstrap, GET, MemoryHandle, PUT, PUT_VALUE, RmaBytes,
    RmaMemory, RmaVerb, Transport,
};

/// The task of a process.
pub struct Job {
    pub role: String,
    pub pe: usize,
    pub pes: usize,
}

impl Job {
    pub fn of_this_process() -> Option<Self> {
        let number = |name: &str| env::var(name).ok()?.parse().ok();
        Some(Self {
            role: env::var("ROLE").ok()?,
            pe: number("PE")?,
            pes: number("PES")?,
        })
    }
}

/// Says something to the test.
pub fn say(name: &str, value: impl std::fmt::Display) {
    // What the harness prints has no end of the line.
    println!("\n={name} {value}");
}

/// Sends bytes to all processes, by way of the test.
fn exchange(bytes: &[u8]) -> Vec<u8> {
    let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("\n@{text}");
    stdout().flush().unwrap();
    let mut line = String::new();
    stdin().read_line(&mut line).unwrap();
    let digits = line.trim().as_bytes();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

unsafe extern "C" fn all_gather(
    send: *const c_void,
    receive: *mut c_void,
    bytes: c_int,
    _bootstrap: *mut Bootstrap,
) -> c_int {
    // SAFETY: the transport has so many bytes.
    let own = unsafe { std::slice::from_raw_parts(send.cast::<u8>(), bytes as usize) };
    let all = exchange(own);
    // SAFETY: and room for those of all PEs.
    unsafe { ptr::copy_nonoverlapping(all.as_ptr(), receive.cast(), all.len()) };
    0
}

/// A PE whose memory is words of its own.
pub struct Pe {
    pub pe: usize,
    pub pes: usize,
    transport: *mut Transport,
    heap: &'static [AtomicU64],
    /// Address of each PE's heap.
    bases: Vec<u64>,
}

/// Makes a transport. Says what it answered.
fn init(version: c_int) -> Option<*mut Transport> {
    let mut transport = ptr::null_mut();
    // SAFETY: the pointer is to a local variable.
    let code = unsafe { entry::init(&raw mut transport, version) };
    say("init", code);
    (code == 0).then_some(transport)
}

impl Pe {
    /// A PE with so many words, connected to all. `None` if it was refused.
    pub fn connect(job: &Job, words: usize) -> Option<Self> {
        let version = env::var("VERSION").ok().and_then(|text| text.parse().ok());
        let transport = init(version.unwrap_or(30_000))?;
        let heap: &'static [AtomicU64] = Vec::leak((0..words).map(|_| AtomicU64::new(0)).collect());
        // SAFETY: all fields are numbers and pointers.
        let mut bootstrap: Bootstrap = unsafe { zeroed() };
        bootstrap.all_gather = Some(all_gather);
        let base = heap.as_ptr() as u64;
        // SAFETY: the transport is the one that was made, and the heap lives as long as the process.
        let code = unsafe {
            (*transport).bootstrap = Box::into_raw(Box::new(bootstrap));
            (*transport).pe = job.pe as c_int;
            (*transport).pes = job.pes as c_int;
            let mut handle = MemoryHandle([0; 512]);
            let register = (*transport).operations.get_mem_handle;
            let code = register(
                &raw mut handle,
                base as *mut c_void,
                8 * words,
                transport,
                false,
            );
            assert_eq!(code, 0);
            ((*transport).operations.connect_endpoints)(transport, ptr::null_mut(), 0)
        };
        say("connect", code);
        if code != 0 {
            return None;
        }
        let bases = exchange(&base.to_le_bytes());
        let bases = bases
            .as_chunks::<8>()
            .0
            .iter()
            .map(|bytes| u64::from_le_bytes(*bytes));
        Some(Self {
            pe: job.pe,
            pes: job.pes,
            transport,
            heap,
            bases: bases.collect(),
        })
    }

    pub fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (pe, pes) = (self.pe, self.pes);
        (1..pes).map(move |step| (pe + step) % pes)
    }

    /// A word of this PE.
    pub fn word(&self, index: usize) -> &AtomicU64 {
        &self.heap[index]
    }

    /// A word once it is at least a number, or `None` after so many milliseconds.
    pub fn wait(&self, index: usize, least: u64, ms: u64) -> Option<u64> {
        let begin = std::time::Instant::now();
        loop {
            let value = self.word(index).load(Ordering::Acquire);
            if value >= least {
                return Some(value);
            }
            if begin.elapsed().as_millis() as u64 > ms {
                return None;
            }
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
    }

    /// All PEs come here.
    pub fn barrier(&self) {
        exchange(&[0]);
    }

    fn place(&self, pe: usize, index: usize) -> RmaMemory {
        RmaMemory {
            address: (self.bases[pe] + 8 * index as u64) as *mut c_void,
            offset: 0,
            handle: ptr::null_mut(),
        }
    }

    fn rma(
        &self,
        pe: usize,
        operation: c_int,
        [remote, local]: [RmaMemory; 2],
        bytes: usize,
    ) -> c_int {
        let verb = RmaVerb {
            operation,
            is_nbi: 1,
            is_stream: 0,
            stream: ptr::null_mut(),
        };
        let bytes = RmaBytes {
            elements: bytes,
            element_bytes: 1,
            source_stride: 77,
            target_stride: 77,
        };
        let [mut remote, mut local] = [remote, local];
        // SAFETY: both places are in heaps that live as long as their processes.
        unsafe {
            let call = (*self.transport).operations.rma;
            let (remote, local) = (&raw mut remote, &raw mut local);
            call(self.transport, pe as c_int, verb, remote, local, bytes, 1)
        }
    }

    /// Puts words.
    pub fn put(&self, pe: usize, to: usize, from: usize, words: usize) -> c_int {
        let places = [self.place(pe, to), self.place(self.pe, from)];
        self.rma(pe, PUT, places, 8 * words)
    }

    /// Puts a value that is gone when the call returns.
    pub fn put_value(&self, pe: usize, to: usize, mut value: u64) -> c_int {
        let local = RmaMemory {
            address: (&raw mut value).cast(),
            offset: 0,
            handle: ptr::null_mut(),
        };
        self.rma(pe, PUT_VALUE, [self.place(pe, to), local], 8)
    }

    /// Gets words.
    pub fn get(&self, pe: usize, to: usize, from: usize, words: usize) -> c_int {
        let places = [self.place(pe, from), self.place(self.pe, to)];
        self.rma(pe, GET, places, 8 * words)
    }

    fn amo(
        &self,
        pe: usize,
        operation: c_int,
        index: usize,
        [value, flag]: [u64; 2],
        back: usize,
    ) -> c_int {
        let verb = AmoVerb {
            operation,
            is_fetch: 0,
            has_value: 0,
            has_comparand: 0,
        };
        let mut target = AmoMemory {
            remote: self.place(pe, index),
            return_flag: flag,
            return_address: self.place(self.pe, back).address,
            value_address: ptr::null_mut(),
            comparand_address: ptr::null_mut(),
            value,
            comparand: 0,
            return_handle: ptr::null_mut(),
        };
        let bytes = AmoBytes {
            type_number: 0,
            element_bytes: 8,
        };
        // SAFETY: both places are in heaps that live as long as their processes.
        unsafe {
            let call = (*self.transport).operations.amo;
            let target = &raw mut target;
            call(
                self.transport,
                pe as c_int,
                ptr::null_mut(),
                verb,
                target,
                bytes,
                1,
            )
        }
    }

    /// Sets a word as a signal.
    pub fn signal(&self, pe: usize, index: usize, value: u64) -> c_int {
        self.amo(pe, 9, index, [value, 0], 0)
    }

    /// Adds to a word.
    pub fn add(&self, pe: usize, index: usize, value: u64) -> c_int {
        self.amo(pe, 4, index, [value, 0], 0)
    }

    /// Adds to a word; its old value and then a flag come to this PE.
    pub fn fetch_add(
        &self,
        pe: usize,
        index: usize,
        [value, flag]: [u64; 2],
        back: usize,
    ) -> c_int {
        self.amo(pe, 14, index, [value, flag], back)
    }

    pub fn fence(&self, pe: usize) -> c_int {
        // SAFETY: the transport was made.
        unsafe { ((*self.transport).operations.fence)(self.transport, pe as c_int, 1) }
    }

    pub fn quiet(&self, pe: usize) -> c_int {
        // SAFETY: the transport was made.
        unsafe { ((*self.transport).operations.quiet)(self.transport, pe as c_int, 1) }
    }

    pub fn progress(&self) -> c_int {
        // SAFETY: the transport was made.
        unsafe { ((*self.transport).operations.progress)(self.transport) }
    }

    pub fn finalize(self) {
        // SAFETY: nobody uses it any more.
        let code = unsafe { ((*self.transport).operations.finalize)(self.transport) };
        say("finalize", code);
    }
}
