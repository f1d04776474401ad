//! Kernels that measure the machine: the cost of a copy over the wire, a signal and a launch without a
//! protocol. The benchmark compares Ferry's times with theirs.
//!
//! Every wait ends at a deadline, and then sets [`ProbeArgs::TIMED_OUT`].
//!
//! Three kernels measure nothing: [`ferry_probe_convert`] computes the arithmetic of the other kernels number
//! by number, for comparison with the portable one, [`ferry_probe_write`] writes tensors that a round in the
//! same stream reads, and [`ferry_probe_clear`] empties the cache of everything else.

use ferry_gpu::protocol::Bits;
use ferry_gpu::ptx::memory::{self, Vector};
use ferry_gpu::ptx::number::Instructions;
use ferry_gpu::ptx::{number, thread};
use ferry_gpu::{encode, kernel};
use ferry_layout::fp8::Divisor;
use ferry_layout::sigmoids::GateRange;
use ferry_layout::silu::Activation;

use crate::args::{ClearArgs, Conversion, ConvertArgs, ProbeArgs, TensorCopy, WriteArgs};

/// Lanes of a warp.
const LANES: u32 = 32;
/// Bytes that a warp moves with one instruction.
const WARP_BYTES: u32 = LANES * size_of::<Vector>() as u32;
/// Vectors that a lane has in flight.
const DEPTH: usize = 8;
/// Polls between two reads of the clock.
const POLLS: u32 = 64;

/// A kernel's arguments and its start time.
struct Probe<'a> {
    args: &'a ProbeArgs,
    started_ns: u64,
}

/// A part of a row to be copied.
struct RowPart {
    from: u64,
    to: u64,
    bytes: u32,
}

impl<'a> Probe<'a> {
    fn start(args: &'a ProbeArgs) -> Self {
        Self {
            args,
            started_ns: thread::global_timer_ns(),
        }
    }

    /// A rank's probe memory.
    #[inline(always)]
    fn memory(&self, rank: u32) -> u64 {
        // SAFETY: the table has an entry for every rank and stays as it is.
        unsafe { memory::load_constant_u64(self.args.peers + 8 * rank as u64) }
    }

    #[inline(always)]
    fn own(&self) -> u64 {
        self.memory(self.args.rank)
    }

    /// Polls `done` until it holds; `false` if the deadline comes first.
    #[inline(always)]
    fn wait(&self, done: impl Fn() -> bool) -> bool {
        let mut polls = 0;
        while !done() {
            polls += 1;
            if polls % POLLS == 0
                && thread::global_timer_ns() - self.started_ns > self.args.deadline_ns
            {
                // SAFETY: the word lies in the own probe memory.
                unsafe { memory::store_relaxed_sys(self.own() + ProbeArgs::TIMED_OUT, 1) };
                return false;
            }
        }
        true
    }

    /// Waits until the word at `address` has reached `value`.
    #[inline(always)]
    fn wait_for(&self, address: u64, value: u64) -> bool {
        // SAFETY: the callers name words of the own probe memory, or the start flag.
        self.wait(|| unsafe { memory::load_acquire_sys(address) } >= value)
    }

    /// Number of parts to copy.
    #[inline(always)]
    fn part_count(&self) -> u32 {
        self.args.rows * self.args.peer_count * self.args.parts
    }

    /// Part `index`: neighbours go to different peers.
    #[inline(always)]
    fn row_part(&self, index: u32) -> RowPart {
        let args = self.args;
        let (part, row) = (
            index / args.peer_count % args.parts,
            index / args.peer_count / args.parts,
        );
        let to = (args.rank + args.first_peer + index % args.peer_count) % args.ranks;
        let start = (part * args.part_bytes()).min(args.row_bytes);
        let bytes = args.part_bytes().min(args.row_bytes - start);
        let place = (args.rank * args.rows + row) as u64;
        let row_bytes = args.row_bytes as u64;
        RowPart {
            from: args.source + row as u64 * row_bytes + start as u64,
            to: self.memory(to) + args.offset + place * row_bytes + start as u64,
            bytes,
        }
    }
}

/// Declares a kernel that runs a function.
macro_rules! probe {
    ($name:ident, $args:ident, $run:ident) => {
        kernel! {
            #[doc = concat!("See the function `", stringify!($run), "`.\n\n# Safety\nAs there.")]
            $name(args: $args) {
                // SAFETY: `args` are as the function's `# Safety` section requires, which is also the
                // kernel's.
                unsafe { $run(&args) }
            }
        }
    };
}

kernel! {
    /// Does nothing: measures the cost of a launch.
    ///
    /// # Safety
    /// No requirements.
    ferry_probe_empty(_args: ProbeArgs) {}
}

/// Waits for the start flag, then for all ranks, so that the next kernels in every rank's stream start at the
/// same time. One warp.
///
/// # Safety
/// The host built `args` for this rank, and launches it on every rank.
#[inline(always)]
unsafe fn barrier(args: &ProbeArgs) {
    let probe = Probe::start(args);
    let (lane, own) = (thread::lane(), probe.own());
    if args.start_flag != 0 {
        probe.wait_for(args.start_flag, args.start_value);
    }
    // SAFETY: the word lies in the own probe memory.
    let epoch = unsafe { memory::load_relaxed_sys(own + ProbeArgs::COUNT) } + 1;
    thread::converge();
    if lane == 0 {
        // SAFETY: as above; the next launch in the stream sees it.
        unsafe { memory::store_relaxed_sys(own + ProbeArgs::COUNT, epoch) };
    }
    let mut peer = lane;
    while peer < args.ranks {
        let arrival = probe.memory(peer) + ProbeArgs::arrival(args.rank);
        // SAFETY: the word lies in the peer's probe memory.
        unsafe { memory::store_relaxed_sys(arrival, epoch) };
        peer += LANES;
    }
    let mut peer = lane;
    while peer < args.ranks {
        probe.wait_for(own + ProbeArgs::arrival(peer), epoch);
        peer += LANES;
    }
}

probe!(ferry_probe_barrier, ProbeArgs, barrier);

/// Copies every row to every peer with stores. Any number of warps.
///
/// # Safety
/// The host built `args` for this rank; source and targets hold the rows.
#[inline(always)]
unsafe fn copy(args: &ProbeArgs) {
    let probe = Probe::start(args);
    let warps = thread::threads() / LANES * thread::blocks();
    let mut index = thread::thread() / LANES * thread::blocks() + thread::block();
    while index < probe.part_count() {
        let RowPart { from, to, bytes } = probe.row_part(index);
        let mut start = thread::lane() * size_of::<Vector>() as u32;
        while start < bytes {
            let at = |i: usize| start + i as u32 * WARP_BYTES;
            // SAFETY: active only inside the part, which lies in its row; nobody writes it.
            let tile: [Vector; DEPTH] = core::array::from_fn(|i| unsafe {
                memory::load_constant_vector(from + at(i) as u64, at(i) < bytes)
            });
            for (i, &vector) in tile.iter().enumerate() {
                // SAFETY: active only inside the part; nobody else writes it.
                unsafe { memory::store_vector(to + at(i) as u64, vector, at(i) < bytes) };
            }
            start += DEPTH as u32 * WARP_BYTES;
        }
        index += warps;
    }
}

probe!(ferry_probe_copy, ProbeArgs, copy);

/// Copies every row to every peer with bulk copies. Any number of blocks; one thread works.
///
/// # Safety
/// See [`copy`]; a part has at most [`ProbeArgs::BULK_BYTES`].
#[cfg(ferry_sm = "90")]
#[inline(always)]
unsafe fn bulk_copy(args: &ProbeArgs) {
    use ferry_gpu::ptx::bulk::{STAGES, Stages, wait_all_but_last_read, wait_all_stored};
    const _: () = assert!(ferry_gpu::ptx::bulk::STAGE_BYTES == ProbeArgs::BULK_BYTES);
    if thread::thread() != 0 {
        return;
    }
    let probe = Probe::start(args);
    let (parts, step) = (probe.part_count(), thread::blocks());
    let stages = Stages::set_up();
    let load = |turn: u32| {
        let index = thread::block() + turn * step;
        if index < parts {
            let RowPart { from, bytes, .. } = probe.row_part(index);
            // SAFETY: the part lies in its row and fits; the stage's last store has read it.
            unsafe { stages.load(turn % STAGES, from, bytes) };
        }
    };
    (0..STAGES - 1).for_each(load);
    let (mut turn, mut index) = (0, thread::block());
    while index < parts {
        let stage = turn % STAGES;
        if !probe.wait(|| stages.has_landed(stage, turn / STAGES)) {
            return;
        }
        let RowPart { to, bytes, .. } = probe.row_part(index);
        // SAFETY: the load has landed; the target has the row, and nobody else writes it.
        unsafe { stages.store(stage, to, bytes) };
        wait_all_but_last_read();
        load(turn + STAGES - 1);
        turn += 1;
        index += step;
    }
    wait_all_stored();
}

#[cfg(ferry_sm = "90")]
probe!(ferry_probe_bulk_copy, ProbeArgs, bulk_copy);

/// Ranks 0 and 1 send a word back and forth, `repeats` times: release, then acquire. One warp.
///
/// # Safety
/// The host built `args` for this rank, and launches it on ranks 0 and 1.
#[inline(always)]
unsafe fn ping(args: &ProbeArgs) {
    if thread::thread() != 0 {
        return;
    }
    let probe = Probe::start(args);
    let (own, peer) = (probe.own(), probe.memory(1 - args.rank));
    // SAFETY: the word lies in the own probe memory.
    let before = unsafe { memory::load_relaxed_sys(own + ProbeArgs::PINGS) };
    let send = |value| {
        memory::fence_acq_rel_sys();
        // SAFETY: the word lies in the peer's probe memory.
        unsafe { memory::store_relaxed_sys(peer + ProbeArgs::PING, value) };
    };
    for value in before + 1..=before + args.repeats as u64 {
        if args.rank == 0 {
            send(value);
        }
        if !probe.wait_for(own + ProbeArgs::PING, value) {
            return;
        }
        if args.rank == 1 {
            send(value);
        }
    }
    // SAFETY: as above; the next launch in the stream sees it.
    unsafe { memory::store_relaxed_sys(own + ProbeArgs::PINGS, before + args.repeats as u64) };
}

probe!(ferry_probe_ping, ProbeArgs, ping);

/// Converts pairs of numbers with the functions that the other kernels use. Any number of blocks
/// of any number of threads.
///
/// # Safety
/// The host built `args`: its tensors are live allocations of `count` pairs and words, and nobody
/// writes the input.
#[inline(always)]
unsafe fn convert(args: &ConvertArgs) {
    let step = thread::threads() * thread::blocks();
    let mut index = thread::block() * thread::threads() + thread::thread();
    while index < args.count {
        let from = args.input + 8 * index as u64;
        // SAFETY: the pair and the word are inside the host's tensors: documented above.
        unsafe {
            let a = f32::from_bits(memory::load_constant_u32(from));
            let b = f32::from_bits(memory::load_constant_u32(from + 4));
            memory::store_u32(args.output + 4 * index as u64, converted(args, a, b));
        }
        index += step;
    }
}

probe!(ferry_probe_convert, ConvertArgs, convert);

/// The 64-bit word of a pair.
#[inline(always)]
fn word_of(low: f32, high: f32) -> u64 {
    u64::from(high.to_bits()) << u32::BITS | u64::from(low.to_bits())
}

/// See [`Conversion`].
#[inline(always)]
fn converted(args: &ConvertArgs, a: f32, b: f32) -> u32 {
    let activate = |activation: Activation| activation.apply(a, b, Instructions).to_bits();
    match Conversion::of_number(args.conversion) {
        Conversion::Bf16 => number::bf16_pair(a, b),
        Conversion::E4m3 => number::e4m3_quad(a, b, b, a),
        Conversion::E2m1 => number::e2m1_eight([a, b, a, b, b, a, b, a], 1.0),
        Conversion::ScaledE2m1 => number::e2m1_eight_scaled([a, b, a, b, b, a, b, a], 1.0),
        Conversion::Larger => number::larger(a.abs(), b).to_bits(),
        Conversion::Quotient => Divisor::new(b).divide(a, number::Instructions).to_bits(),
        Conversion::Reciprocal => number::reciprocal(a).to_bits(),
        Conversion::Multiplier => encode::multiplier(a.to_bits() as u8, b).to_bits(),
        Conversion::Silu => activate(Activation::Silu),
        Conversion::ClampedSilu => activate(args.clamped()),
        Conversion::Sigmoids => {
            GateRange::of(args.clamped()).offsets(a.to_bits(), number::distances)
        }
        Conversion::CountedBits => word_of(a, b).count(),
        Conversion::LowestBit => word_of(a, b).lowest(),
    }
}

/// Copies tensors word by word, after it has let the next kernel of its stream begin: one that reads them
/// before it waits for this kernel's end reads their old contents. Any number of blocks of any number of
/// threads.
///
/// # Safety
/// The host built `args`: source and target of each copy are live allocations of its words, and
/// nobody else writes them.
#[inline(always)]
unsafe fn write(args: &WriteArgs) {
    thread::allow_later_kernels();
    let step = u64::from(thread::threads() * thread::blocks());
    let first = u64::from(thread::block() * thread::threads() + thread::thread());
    let write = |copy: TensorCopy| {
        let mut index = first;
        while index < copy.words {
            // SAFETY: the word is inside both of the host's tensors: documented above.
            unsafe {
                memory::store_u32(copy.to + 4 * index, memory::load_u32(copy.from + 4 * index))
            };
            index += step;
        }
    };
    // Each by its name: an array that is indexed in a loop may end up in local memory.
    let [a, b, c, d] = args.copies;
    write(a);
    write(b);
    write(c);
    write(d);
}

probe!(ferry_probe_write, WriteArgs, write);

/// Writes zeros, enough to push everything else out of the cache. Any number of blocks of any number of
/// threads.
///
/// # Safety
/// The host built `args`: its tensor is a live allocation that nobody else uses.
#[inline(always)]
unsafe fn clear(args: &ClearArgs) {
    let step = u64::from(thread::threads() * thread::blocks());
    let mut index = u64::from(thread::block() * thread::threads() + thread::thread());
    while index < args.vectors {
        let at = args.at + size_of::<Vector>() as u64 * index;
        // SAFETY: the vector is inside the host's tensor: documented above.
        unsafe { memory::store_vector(at, [0; 4], true) };
        index += step;
    }
}

probe!(ferry_probe_clear, ClearArgs, clear);
