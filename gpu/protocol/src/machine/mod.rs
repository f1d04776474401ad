//! Operations that a machine provides to run the protocol.

pub mod block_memory;
pub mod counters;
pub mod deadline;
pub mod finishing;
pub mod host;
pub mod miss;
pub mod position;
pub mod puts;
pub mod rows;
pub mod signals;
pub mod tile;
pub mod turns;

use ferry_layout::{ByteOffset, Counter, Fault, Rank, Signal, Table, Tensor, TokenFormat};

use crate::machine::block_memory::BlockMemory;
use crate::machine::counters::{BlockCounter, Counters};
use crate::machine::deadline::Deadline;
use crate::machine::finishing::{Finish, Finishing};
use crate::machine::host::Host;
use crate::machine::miss::TimedOut;
use crate::machine::position::WarpPosition;
use crate::machine::puts::Puts;
use crate::machine::rows::{Bits, ByteRange, OutputRow, Row, TokenPart};
use crate::machine::signals::Signals;
use crate::machine::turns::Turns;

/// Lanes of a warp.
pub const LANES: u32 = 32;
/// A warp of a GPU, or of an equivalent.
///
/// A method is for all lanes together, with the same arguments, unless it says "for one lane".
pub trait Machine:
    Signals + Puts + Counters + Turns + BlockMemory + Deadline + Finishing + Host
{
    /// One `T` a lane.
    type Lanes<T: Copy>: Copy;
    /// Part of a row that is being loaded.
    type Ahead;
    /// Loads that [`begin`](Self::begin) issued.
    type Loading;

    /// Begins a launch: data that earlier launches of its stream wrote can be read from here on. Issues loads
    /// of the values that the machine keeps for the block, such as windows and counters, without waiting for
    /// them. The first operation of a launch, once, by all warps.
    fn begin(&self) -> Self::Loading;
    /// Clears the block counters, and sets the block's deadline, relative to now. Once, after
    /// [`begin`](Self::begin), by all warps.
    fn clear_block(&self);
    /// Loads the credits of all ranks, too, and acquires the reads that they order: see
    /// [`peek_credit`](Self::peek_credit). Between [`clear_block`](Self::clear_block) and
    /// [`keep`](Self::keep), after all other loads: an acquire delays the loads after it.
    fn ask_credits(&self, loading: &mut Self::Loading);
    /// Keeps the values that [`begin`](Self::begin) loaded. Once, by all warps. Until the next barrier of the
    /// block, only the user's tables, the block's memory and operations among lanes may be used.
    fn keep(&self, loading: Self::Loading);

    /// The round for which `rank` had returned its credit when this warp's block began and
    /// [loaded](Self::ask_credits) it, or an earlier one. Stores of this block come after all that `rank` had
    /// read by then: a thread of the block acquired the credit, and then all of them met at a barrier. For
    /// one lane.
    fn peek_credit(&self, rank: Rank) -> u64;

    /// This rank.
    fn rank(&self) -> Rank;
    /// Ranks of the group.
    fn ranks(&self) -> u32;
    /// Whether received rows stay as they came: a GPU has a kernel for each case.
    fn keeps_rows(&self) -> bool;
    /// Whether this kernel sends to ranks of other nodes: a GPU has a kernel for each case. False for kernels
    /// that only wait, as they send nothing.
    fn spans_nodes(&self) -> bool;
    /// Position of this warp in the launch on this rank.
    fn warp_position(&self) -> WarpPosition;
    /// This warp's number among those of the launch: see [`WarpPosition::warp`].
    #[inline(always)]
    fn warp(&self) -> u32 {
        self.warp_position().warp()
    }
    /// Blocks of the launch.
    #[inline(always)]
    fn blocks(&self) -> u32 {
        self.warp_position().blocks
    }
    /// Passes this block's `block_counter`, as `callers` of its warps do in a launch. True for the last,
    /// which sees the writes of the others in its block, and comes after all their reads.
    fn arrives_last(&self, block_counter: BlockCounter, callers: u32) -> bool;
    /// Passes a block counter like [`arrives_last`](Self::arrives_last), and hands `word` to the last: lane
    /// `i` gets that of the block's `i`-th warp, 0 if that has handed over none. A later release by the last
    /// one covers the writes of all of them. For one block counter of a launch.
    fn hand_to_last(
        &self,
        block_counter: BlockCounter,
        callers: u32,
        word: u64,
    ) -> Option<Self::Lanes<u64>>;

    /// Calls `each` once for every lane, with the lane's number.
    fn lanes<T: Copy>(&self, each: impl FnMut(u32) -> T) -> Self::Lanes<T>;
    /// The value of `lane`; inside [`lanes`](Self::lanes), and only for the lane that asks.
    fn own<T: Copy>(&self, values: Self::Lanes<T>, lane: u32) -> T;
    /// Bit `i` is set if lane `i` holds `true`.
    fn ballot(&self, values: Self::Lanes<bool>) -> u32;
    /// The value of `lane`.
    fn broadcast(&self, values: Self::Lanes<u32>, lane: u32) -> u32;
    /// The value of lane `lanes[i]` for each lane `i`.
    fn shuffle(&self, values: Self::Lanes<u32>, lanes: Self::Lanes<u32>) -> Self::Lanes<u32>;
    /// Adds one to a counter and returns its previous value on lane 0, anything on the others. Orders
    /// nothing, and the value may arrive late: its first use waits for it.
    fn take_ticket(&self, counter: Counter) -> Self::Lanes<u32>;
    /// Leaves a value in a counter for later launches; this launch no longer uses it.
    fn leave(&self, counter: Counter, value: u64);
    /// Time at which this launch should abort, on the clock of [`Deadline`].
    fn deadline(&self) -> u64;
    /// The sum over all lower lanes, for each lane; and the sum over all lanes. Sums wrap around.
    fn exclusive_sum(&self, values: Self::Lanes<u32>) -> (Self::Lanes<u32>, u32);
    /// The lanes that hold the same value, as bits, for each lane.
    fn matching(&self, values: Self::Lanes<u32>) -> Self::Lanes<u32>;
    /// The products of the bytes of two words, added to `sum`, as [`dot_bytes`](ferry_layout::dot_bytes). For
    /// one lane.
    fn dot_bytes(&self, a: u32, b: u32, sum: u32) -> u32;
    /// The largest value.
    fn max(&self, values: Self::Lanes<u32>) -> u32;
    /// Bits that any lane holds.
    fn union(&self, values: Self::Lanes<u64>) -> u64;
    /// Lets lanes read data that other lanes of this warp wrote or acquired before.
    fn converge(&self);

    /// Reads a word of a table. For one lane.
    fn read(&self, table: Table, index: u64) -> u32;
    /// Reads the 16 bytes of a table at word `index`, which is aligned to them. For one lane.
    fn read_vector(&self, table: Table, index: u64) -> [u32; 4];
    /// Writes a word of a table. For one lane.
    fn write(&self, table: Table, index: u64, value: u32);
    /// Writes a half word of a table: `index` counts half words. For one lane.
    fn write_half(&self, table: Table, index: u64, value: u16);
    /// Adds one to a word of a table, which other warps may do at the same time. For one lane.
    fn increment(&self, table: Table, index: u64);
    /// Reads a 4-byte word of a row in the own window, which a peer may be writing. For one lane.
    fn read_window(&self, at: ByteOffset) -> u32;
    /// Writes a 4-byte word of a row in the own window. For one lane.
    fn write_window(&self, at: ByteOffset, word: u32);
    /// Writes a 4-byte word of a row in the window of a rank of this node, whose reader may be waiting for
    /// it. For one lane.
    fn write_word(&self, to: Rank, at: ByteOffset, word: u32);

    /// Encodes a token in the shape's format: writes a byte range of the payload, and the scales of the
    /// groups in it, to the row `to(i)` for every set bit `i` of `targets`. The row's own scale, if the
    /// format has one, goes with the range that begins the row. Words of scales [avoid the
    /// sentinel](ferry_layout::avoid_sentinel).
    fn encode_row(&self, range: ByteRange, token: u32, targets: u64, to: impl Fn(u32) -> Row);
    /// Encodes a token like [`encode_row`](Self::encode_row), to the row `to(i)` of the outputs for every set
    /// bit `i` of `targets`: its words of scales are `stride` words apart, as computed, and its own scale is
    /// in the table of rows' own scales. Not for BF16, which is copied.
    fn encode_output(
        &self,
        range: ByteRange,
        token: u32,
        stride: u64,
        targets: u32,
        to: impl Fn(u32) -> OutputRow,
    );
    /// Writes a byte range of a token's payload, in `format`, to the row `to(i)` of the outputs for every set
    /// bit `i` of `targets`, with the scales of the groups in that range: see
    /// [`encode_output`](Self::encode_output). BF16 is copied, and [avoids the
    /// sentinel](ferry_layout::avoid_sentinel) like rows that travel.
    #[inline(always)]
    fn write_token(
        &self,
        format: TokenFormat,
        part: TokenPart,
        stride: u64,
        targets: u32,
        to: impl Fn(u32) -> OutputRow,
    ) {
        let TokenPart { token, range } = part;
        match format {
            TokenFormat::Bf16 => {
                let from = Row::Tensor(Tensor::Input, token);
                let to = |target| Row::Tensor(Tensor::Output, to(target).row);
                self.copy_arrived(range, from, targets, to);
            }
            _ => self.encode_output(range, token, stride, targets, to),
        }
    }
    /// Begins to load a part, and waits for nothing. The warp then calls [`write_loaded`](Self::write_loaded)
    /// for the same part before it loads another one this way.
    fn load_token(&self, part: TokenPart);
    /// Writes a part that [`load_token`](Self::load_token) began to load, like
    /// [`write_token`](Self::write_token). Begins to load `next`, if there is one, as soon as it can.
    fn write_loaded(
        &self,
        format: TokenFormat,
        part: TokenPart,
        next: Option<TokenPart>,
        stride: u64,
        targets: u32,
        to: impl Fn(u32) -> OutputRow,
    );
    /// Begins to load the first tile for [`copy_row`](Self::copy_row): `wire::inline::load_first`, with tiles
    /// as deep as suits this machine.
    fn read_ahead(&self, range: ByteRange, from: Row) -> Self::Ahead;
    /// Copies a byte range of a row to the same range of the row `to(i)` for every `i` of `targets`:
    /// `wire::inline::copy`, with tiles as deep as suits this machine. `ahead` is the result of
    /// [`read_ahead`](Self::read_ahead).
    fn copy_row(
        &self,
        range: ByteRange,
        from: Row,
        ahead: Self::Ahead,
        targets: impl Bits,
        to: impl Fn(u32) -> Row,
    ) -> Result<(), TimedOut>;
    /// Copies a row that has arrived and has no inline flags, like [`copy_row`](Self::copy_row). Waits for
    /// nothing.
    #[inline(always)]
    fn copy_arrived(
        &self,
        range: ByteRange,
        from: Row,
        targets: impl Bits,
        to: impl Fn(u32) -> Row,
    ) {
        debug_assert!(
            !matches!(from, Row::Inline(..)),
            "{from:?} may not have arrived"
        );
        let copied = self.copy_row(range, from, self.read_ahead(range, from), targets, to);
        debug_assert_eq!(copied, Ok(()), "{from:?} had arrived");
    }
    /// Writes the elements in a byte range of `to`: the sum over the set bits `i` of `sources`, lowest first,
    /// of weight times BF16 row. Starts at +0; every product and every sum is rounded to f32. `finish`
    /// converts the sums and stores them.
    fn sum_rows(
        &self,
        range: ByteRange,
        sources: u32,
        from: impl Fn(u32) -> (Row, f32),
        to: Row,
        finish: impl Finish<Self>,
    );

    /// Stores `value` into a signal word of every rank that this kernel reaches, in the order of ranks: see
    /// [`Signals::signal`]. Leaves out ranks of other nodes to which there is no [room](Puts::has_room).
    /// `at`: a word of this rank, so that puts carry its own. Rarely called.
    fn signal_all(&self, at: Signal, value: u64);

    /// `value`, for a path that is rarely taken: computations with the value happen on that path, and not
    /// before, when their results would occupy registers.
    #[inline(always)]
    fn late(&self, value: u32) -> u32 {
        value
    }
    /// Records a fault, unless one is recorded already. For one lane.
    fn record(&self, fault: &Fault);
}
