//! A warp of a GPU as the protocol's machine: each operation is an instruction or a tight loop.

mod block_memory;
mod counters;
mod deadline;
mod encode;
mod fault;
mod finishing;
#[cfg(ferry_sm = "90")]
mod loaded;
mod puts;
mod rows;
mod signals;
pub(crate) mod tile;
mod turns;

use core::cell::Cell;

use bytemuck::cast;
use ferry_layout::{
    Arguments, ByteOffset, Common, Counter, Fault, ROW_SCALE_BYTES, Rank, Signal, Table,
    TokenFormat,
};
use ferry_protocol::wire::inline;
use ferry_protocol::{
    Bits, BlockCounter, ByteRange, Finish, LANES, Machine, OutputRow, Rounding, Row, Tiles,
    TimedOut, TokenPart, WarpPosition,
};

use crate::encode::WindowTarget;
use crate::ptx::block::{Block, HELD_WORDS, Loading, SetUp};
use crate::ptx::memory::{self, Vector};
use crate::ptx::{number, thread};

use self::fault::Seen;

/// Whether the target is sm_90 or later. Before that the assembler finds fewer registers.
const IS_SM_90: bool = cfg!(ferry_sm = "90");
/// Vectors that a lane has in flight when it copies a row: 7 divides hidden 3,584 and 7,168 evenly.
/// measured: T-003, H200
const COPY_DEPTH: usize = if IS_SM_90 { 7 } else { 5 };
/// [`COPY_DEPTH`] with ranks of other nodes: registers are scarce then. measured: T-003, H200
const REMOTE_COPY_DEPTH: usize = 4;
/// Vectors that a lane sums at a time.
/// measured: T-002, H200
const SUM_DEPTH: usize = 4;
/// [`SUM_DEPTH`] with ranks of other nodes. measured: T-002, H200
const REMOTE_SUM_DEPTH: usize = 2;
/// Counters that are read when a launch begins.
const PEEKED: [Counter; HELD_WORDS - 1] = [Counter::Aborted, Counter::Finished, Counter::Extent];
/// Polls between two reads of the clock. measured: T-001, H200
const POLLS: u32 = 64;

/// A warp. `SHMEM`: some ranks are on other nodes.
pub struct Gpu<'a, A, const SHMEM: bool> {
    /// The kernel's arguments, from the host.
    pub args: &'a A,
    /// This lane.
    pub lane: u32,
    polls: Cell<u32>,
    /// The slot of the pipeline with the next tile of the loaded token.
    #[cfg(ferry_sm = "90")]
    slot: Cell<u32>,
    /// The block's memory, as it is after the last barrier.
    pub block: Cell<Block>,
}

impl<'a, A: Arguments, const SHMEM: bool> Gpu<'a, A, SHMEM> {
    /// The warp that runs this. Neighbouring warp numbers are on different multiprocessors, so a small number
    /// of tasks spreads over all of them.
    ///
    /// # Safety
    /// The host built `args` for this rank: its addresses are live allocations of the sizes that the shape
    /// implies, and the peers' windows are mapped at the addresses in its table. An epilogue reads only
    /// inside tensors whose addresses are in the host's arguments.
    #[inline(always)]
    pub unsafe fn new(args: &'a A) -> Self {
        const { assert!(!SHMEM || cfg!(feature = "nvshmem")) };
        let block = Block::declare();
        Self {
            args,
            lane: thread::lane(),
            polls: Cell::new(0),
            #[cfg(ferry_sm = "90")]
            slot: Cell::new(0),
            block: Cell::new(block),
        }
    }

    /// The arguments that all kernels take.
    #[inline(always)]
    pub fn common(&self) -> &Common {
        self.args.common()
    }

    /// The window of a mapped rank.
    #[inline(always)]
    pub fn window(&self, rank: Rank) -> u64 {
        self.block.get().window(rank.0)
    }

    #[inline(always)]
    fn counter(&self, counter: Counter) -> u64 {
        self.common().workspace + counter.bytes()
    }
}

impl<A: Arguments, const SHMEM: bool> Machine for Gpu<'_, A, SHMEM> {
    type Lanes<T: Copy> = T;
    type Ahead = [Vector; COPY_DEPTH];
    type Loading = Loading;

    #[inline(always)]
    fn begin(&self) -> Loading {
        let common = self.common();
        let [aborted, finished, extent] = PEEKED.map(|counter| self.counter(counter));
        let set_up = SetUp {
            peers: common.peers,
            ranks: common.shape.ranks,
            words: [aborted, finished, extent, self.last_launch_at()],
            fault_page: common.fault_page,
            last_word: self.args.last_word(),
        };
        // SAFETY: the host's addresses are live (documented on `Gpu::new`); the table of peers has an entry
        // for every rank and does not change. Launches of a stream are ordered, and of these words only
        // values of earlier launches matter. The workspace has a last launch for each of the host's blocks.
        unsafe { self.block.get().ask(&set_up) }
    }

    #[inline(always)]
    fn clear_block(&self) {
        self.block.get().clear(self.common().deadline_ns);
    }

    #[inline(always)]
    fn ask_credits(&self, loading: &mut Loading) {
        // With ranks of other nodes, nobody reads the result.
        if !SHMEM {
            let common = self.common();
            let credits = common.own_window + common.window.credit(Rank(0)).bytes();
            // SAFETY: the window has a credit for every rank, one after the other.
            unsafe { Block::ask_credits(loading, credits, common.shape.ranks) };
        }
    }

    #[inline(always)]
    fn peek_credit(&self, rank: Rank) -> u64 {
        self.block.get().credit(rank.0)
    }

    #[inline(always)]
    fn keep(&self, loading: Loading) {
        let ranks = self.common().shape.ranks;
        // SAFETY: `begin` loaded for the same ranks; blocks have at least `2 * MAX_RANKS` threads.
        unsafe { self.block.get().keep(loading, ranks) };
    }

    #[inline(always)]
    fn rank(&self) -> Rank {
        self.common().rank()
    }

    #[inline(always)]
    fn ranks(&self) -> u32 {
        self.common().shape.ranks
    }

    #[inline(always)]
    fn keeps_rows(&self) -> bool {
        A::KEEPS_ROWS
    }

    #[inline(always)]
    fn spans_nodes(&self) -> bool {
        SHMEM
    }

    #[inline(always)]
    fn warp_position(&self) -> WarpPosition {
        WarpPosition {
            index: thread::thread() / LANES,
            in_block: thread::threads() / LANES,
            block: thread::block(),
            blocks: thread::blocks(),
        }
    }

    #[inline(always)]
    fn arrives_last(&self, block_counter: BlockCounter, callers: u32) -> bool {
        thread::converge();
        let mut before = 0;
        if self.lane == 0 {
            before = self.block.get().pass(block_counter);
        }
        thread::converge();
        thread::broadcast(before, 0) + 1 == callers
    }

    #[inline(always)]
    fn hand_to_last(&self, block_counter: BlockCounter, callers: u32, word: u64) -> Option<u64> {
        if self.lane == 0 {
            self.block.get().leave(thread::thread() / LANES, word);
        }
        self.arrives_last(block_counter, callers)
            .then(|| self.block.get().left_by(self.lane))
    }

    #[inline(always)]
    fn lanes<T: Copy>(&self, mut each: impl FnMut(u32) -> T) -> T {
        each(self.lane)
    }

    #[inline(always)]
    fn own<T: Copy>(&self, values: T, _lane: u32) -> T {
        values
    }

    #[inline(always)]
    fn ballot(&self, values: bool) -> u32 {
        thread::ballot(values)
    }

    #[inline(always)]
    fn broadcast(&self, values: u32, lane: u32) -> u32 {
        thread::broadcast(values, lane)
    }

    #[inline(always)]
    fn shuffle(&self, values: u32, lanes: u32) -> u32 {
        thread::broadcast(values, lanes)
    }

    #[inline(always)]
    fn take_ticket(&self, counter: Counter) -> u32 {
        match self.lane {
            // SAFETY: counters lie inside the workspace.
            0 => unsafe { memory::increment_relaxed_gpu(self.counter(counter)) },
            _ => 0,
        }
    }

    #[inline(always)]
    fn leave(&self, counter: Counter, value: u64) {
        if self.lane == 0 {
            // SAFETY: counters lie inside the workspace.
            unsafe { memory::store_u64(self.counter(counter), value) };
        }
    }

    #[inline(always)]
    fn deadline(&self) -> u64 {
        self.block.get().deadline_ns()
    }

    #[inline(always)]
    fn exclusive_sum(&self, values: u32) -> (u32, u32) {
        let mut sum = values;
        for step in 0..LANES.ilog2() {
            let below = thread::from_below(sum, 1 << step);
            if self.lane >= 1 << step {
                sum += below;
            }
        }
        (sum - values, thread::broadcast(sum, LANES - 1))
    }

    #[inline(always)]
    fn matching(&self, values: u32) -> u32 {
        thread::matching(values)
    }

    #[inline(always)]
    fn dot_bytes(&self, a: u32, b: u32, sum: u32) -> u32 {
        number::dot_bytes(a, b, sum)
    }

    #[inline(always)]
    fn max(&self, values: u32) -> u32 {
        thread::max(values)
    }

    #[inline(always)]
    fn union(&self, values: u64) -> u64 {
        let halves: [u32; 2] = cast(values);
        cast(halves.map(thread::union))
    }

    #[inline(always)]
    fn converge(&self) {
        thread::converge();
    }

    #[inline(always)]
    fn read(&self, table: Table, index: u64) -> u32 {
        // SAFETY: the protocol stays inside the tables.
        unsafe { memory::load_u32(self.args.table(table) + 4 * index) }
    }

    #[inline(always)]
    fn read_vector(&self, table: Table, index: u64) -> Vector {
        // SAFETY: the protocol reads aligned vectors that the tables have.
        unsafe { memory::load_whole_vector(self.args.table(table) + 4 * index) }
    }

    #[inline(always)]
    fn write(&self, table: Table, index: u64, value: u32) {
        // SAFETY: the protocol stays inside the tables.
        unsafe { memory::store_u32(self.args.table(table) + 4 * index, value) };
    }

    #[inline(always)]
    fn write_half(&self, table: Table, index: u64, value: u16) {
        // SAFETY: the protocol stays inside the tables.
        unsafe { memory::store_u16(self.args.table(table) + 2 * index, value) };
    }

    #[inline(always)]
    fn increment(&self, table: Table, index: u64) {
        // SAFETY: the protocol stays inside the tables.
        unsafe { memory::increment_relaxed_gpu(self.args.table(table) + 4 * index) };
    }

    #[inline(always)]
    fn read_window(&self, at: ByteOffset) -> u32 {
        // SAFETY: offsets lie inside the windows.
        unsafe { memory::load_relaxed_u32(self.window(self.common().rank()) + at.bytes()) }
    }

    #[inline(always)]
    fn write_window(&self, at: ByteOffset, word: u32) {
        // SAFETY: offsets lie inside the windows.
        unsafe { memory::store_u32(self.window(self.common().rank()) + at.bytes(), word) };
    }

    #[inline(always)]
    fn write_word(&self, to: Rank, at: ByteOffset, word: u32) {
        // SAFETY: offsets lie inside the windows, and `to` is mapped.
        unsafe { memory::store_relaxed_u32(self.window(to) + at.bytes(), word) };
    }

    #[inline(always)]
    fn encode_row(&self, range: ByteRange, token: u32, targets: u64, to: impl Fn(u32) -> Row) {
        let row = &self.common().row;
        self.encode_token(range, token, targets, |index| WindowTarget {
            row: self.row(to(index)),
            scales_start: row.payload_bytes,
            // Right before the header, whose place is in a register anyway.
            row_scale_start: row.header.wrapping_sub(ROW_SCALE_BYTES),
        });
    }

    #[inline(always)]
    fn encode_output(
        &self,
        range: ByteRange,
        token: u32,
        stride: u64,
        targets: u32,
        to: impl Fn(u32) -> OutputRow,
    ) {
        self.encode_token(range, token, targets as u64, |index| {
            self.output_target(to(index), stride)
        });
    }

    #[inline(always)]
    fn load_token(&self, part: TokenPart) {
        #[cfg(ferry_sm = "90")]
        {
            let format = self.common().shape.format();
            if !SHMEM && Self::streams(format) {
                self.begin_stream(format, part);
            }
        }
        #[cfg(not(ferry_sm = "90"))]
        let _ = part;
    }

    #[inline(always)]
    fn write_loaded(
        &self,
        format: TokenFormat,
        part: TokenPart,
        next: Option<TokenPart>,
        stride: u64,
        targets: u32,
        to: impl Fn(u32) -> OutputRow,
    ) {
        #[cfg(ferry_sm = "90")]
        if !SHMEM && Self::streams(format) {
            return self.write_stream(format, part, next, stride, targets, to);
        }
        let _ = next;
        self.write_token(format, part, stride, targets, to);
    }

    #[inline(always)]
    fn read_ahead(&self, range: ByteRange, from: Row) -> Self::Ahead {
        let mut ahead = [[0; 4]; COPY_DEPTH];
        if SHMEM {
            let first = inline::load_first::<_, REMOTE_COPY_DEPTH>(self, range, from);
            ahead[..REMOTE_COPY_DEPTH].copy_from_slice(&first);
        } else {
            ahead = inline::load_first(self, range, from);
        }
        ahead
    }

    #[inline(always)]
    fn copy_row(
        &self,
        range: ByteRange,
        from: Row,
        ahead: Self::Ahead,
        targets: impl Bits,
        to: impl Fn(u32) -> Row,
    ) -> Result<(), TimedOut> {
        if SHMEM {
            let ahead: [Vector; REMOTE_COPY_DEPTH] = core::array::from_fn(|index| ahead[index]);
            inline::copy(self, range, from, ahead, targets, to)
        } else {
            inline::copy(self, range, from, ahead, targets, to)
        }
    }

    #[inline(always)]
    fn sum_rows(
        &self,
        range: ByteRange,
        sources: u32,
        from: impl Fn(u32) -> (Row, f32),
        to: Row,
        finish: impl Finish<Self>,
    ) {
        #[cfg(ferry_sm = "90")]
        if !SHMEM {
            return self.sum_through_pipeline(range, sources, from, to, finish);
        }
        // The loads that finish sums take registers, too.
        if SHMEM || !finish.is_rounding() {
            self.sum_tiles::<REMOTE_SUM_DEPTH>(range, sources, from, to, finish);
        } else {
            self.sum_tiles::<SUM_DEPTH>(range, sources, from, to, Rounding);
        }
    }

    #[inline(always)]
    fn signal_all(&self, at: Signal, value: u64) {
        let Common { peers, shape, .. } = self.common();
        if self.lane == 0 {
            let of_node = shape.p2p_world_size;
            let first = Rank(self.common().rank().0 / of_node * of_node);
            // SAFETY: the table of peers has an entry for every rank, and signals lie inside the windows.
            unsafe {
                fault::signal_all(*peers, shape.ranks, first, of_node, at, value);
            }
            if SHMEM {
                let word = self.window(self.common().rank()) + at.bytes();
                // SAFETY: the own word among those just stored; a rank aborts once.
                unsafe { fault::put_all(word, shape.ranks, first, of_node) };
            }
        }
    }

    #[inline(always)]
    fn late(&self, value: u32) -> u32 {
        thread::late(value)
    }

    #[inline(always)]
    fn record(&self, fault: &Fault) {
        let page = self.block.get().fault_page();
        let Fault {
            index,
            wanted,
            saw,
            epoch,
            ..
        } = *fault;
        let (packed, workspace) = (fault::pack(fault), self.common().workspace);
        let seen = Seen { wanted, saw };
        // SAFETY: the workspace holds the counters; the page is mapped host memory of the size of
        // a `FaultPage`.
        unsafe { fault::write(page, workspace, packed, fault.rank, index, seen, epoch) };
    }
}
