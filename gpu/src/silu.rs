//! The fused SiLU: a warp takes 512 output columns of a row at a time. Memory is its limit, so the next
//! columns are loaded while the last ones become outputs, and many warps share a multiprocessor.

use ferry_layout::silu::Activation;
use ferry_layout::{ScaleLayout, SiluArgs, TokenFormat, scale_placement};
use ferry_protocol::LANES;

use crate::elements::{LANE_ELEMENTS, TILE_ELEMENTS};
use crate::encode::{self, Encoded, Encoder};
use crate::ptx::lookup::Storage;
use crate::ptx::memory::{self, Vector};
use crate::ptx::number::{self, Instructions};
use crate::ptx::thread;
use crate::sigmoids::Sigmoids;

/// Reads gates and ups, and writes their activations in the format that `args` name. Takes any number of
/// blocks, each of any multiple of 32 threads. Waits for no other rank.
///
/// # Safety
/// The host built `args`: its addresses are live allocations of the sizes that they say.
#[inline(always)]
pub unsafe fn fused_silu(args: &SiluArgs) {
    let warp = Warp::new(args);
    // SAFETY: the addresses of `args` are live allocations of the sizes that they say: documented above.
    unsafe {
        let format = TokenFormat::of_number(args.format);
        // Each arm names its format anew, which makes it a constant there.
        match format {
            TokenFormat::Bf16 => warp.run(TokenFormat::Bf16, |_| Bf16),
            TokenFormat::BlockwiseFp8 => {
                warp.run(TokenFormat::BlockwiseFp8, |_| encode::BlockwiseFp8);
            }
            TokenFormat::Mxfp8(layout) => warp.run(TokenFormat::Mxfp8(layout), |_| encode::Mxfp8),
            TokenFormat::Mxfp4(layout) => warp.run(TokenFormat::Mxfp4(layout), |_| encode::Mxfp4),
            TokenFormat::Nvfp4(layout) | TokenFormat::Nvfp4RowScaled(layout) => {
                let encoder = |expert| encode::Nvfp4::new(warp.input_scale(expert));
                warp.run(TokenFormat::Nvfp4(layout), encoder);
            }
        }
        warp.clear_unused(format);
    }
}

/// BF16: no scales, and twice the bytes of an encoder's payload.
struct Bf16;

/// Conversion of values to outputs.
trait Output {
    /// Stores a lane's 16 outputs, number `at` of the tensor, if `active`, and returns their scale.
    ///
    /// # Safety
    /// If `active`, `output` has these outputs.
    unsafe fn store(&self, output: u64, at: u64, values: &[f32; 16], active: bool) -> u32;
    /// Lanes that share a scale; 0 if there are no scales.
    const GROUP_LANES: u32;
    /// Scales of a word.
    const WORD_SCALES: u32;
}

impl Output for Bf16 {
    const GROUP_LANES: u32 = 0;
    const WORD_SCALES: u32 = 1;

    #[inline(always)]
    unsafe fn store(&self, output: u64, at: u64, values: &[f32; 16], active: bool) -> u32 {
        let pair = |index: usize| number::bf16_pair(values[2 * index], values[2 * index + 1]);
        let at = output + 32 * at;
        // SAFETY: `output` has these outputs if `active`: documented on `Output::store`.
        unsafe {
            memory::store_vector(at, [pair(0), pair(1), pair(2), pair(3)], active);
            memory::store_vector(at + 16, [pair(4), pair(5), pair(6), pair(7)], active);
        }
        0
    }
}

impl<E: Encoder> Output for E {
    const GROUP_LANES: u32 = E::GROUP_LANES;
    const WORD_SCALES: u32 = E::WORD_LANES / E::GROUP_LANES;

    #[inline(always)]
    unsafe fn store(&self, output: u64, at: u64, values: &[f32; 16], active: bool) -> u32 {
        let Encoded { payload, scale } = self.encode(values);
        let at = output + E::PAYLOAD_BYTES as u64 * at;
        // SAFETY: `output` has these outputs if `active`: documented on `Output::store`.
        unsafe {
            match E::PAYLOAD_BYTES {
                16 => memory::store_vector(at, payload, active),
                _ => memory::store_pair(at, payload, active),
            }
        }
        scale
    }
}

/// A warp of the launch.
struct Warp<'a> {
    args: &'a SiluArgs,
    lane: u32,
    warp: u32,
    warps: u32,
    table: Storage,
}

/// An expert and its rows.
#[derive(Clone, Copy)]
struct Expert {
    index: u32,
    start: u32,
    end: u32,
    /// The first block of its tiled scales.
    block: u32,
}

/// A row and its expert.
#[derive(Clone, Copy)]
struct ExpertRow {
    row: u32,
    expert: Expert,
}

/// 512 columns of a row.
#[derive(Clone, Copy)]
struct Tile {
    row: u32,
    /// The first of these columns.
    column: u32,
}

impl Tile {
    /// Tile `index` of all, row by row.
    #[inline(always)]
    fn of(index: u32, columns: u32) -> Self {
        let in_row = columns.div_ceil(TILE_ELEMENTS);
        Self {
            row: index / in_row,
            column: index % in_row * TILE_ELEMENTS,
        }
    }

    /// The tile `step` further on.
    #[inline(always)]
    fn plus(self, step: Self, columns: u32) -> Self {
        let (row, column) = (self.row + step.row, self.column + step.column);
        match column < columns {
            true => Self { row, column },
            false => Self {
                row: row + 1,
                column: column - columns.next_multiple_of(TILE_ELEMENTS),
            },
        }
    }
}

/// Sixteen numbers.
type Values = [f32; 16];

/// Arrangement of gates and ups in the result of [`Warp::load`].
trait Arrangement: Copy {
    /// The gates and ups of two neighbours: `pair` counts them from 0.
    fn pairs(self, loaded: &[Vector; 4], pair: usize) -> Pairs;
}

/// Gates and ups of two neighbours.
struct Pairs {
    /// The gates as BF16.
    gates: u32,
    /// The same as f32.
    gate: (f32, f32),
    up: (f32, f32),
}

/// All gates of a row precede its ups.
#[derive(Clone, Copy)]
struct GatesFirst;

/// Each gate is followed by its up.
#[derive(Clone, Copy)]
struct Interleaved;

impl Arrangement for GatesFirst {
    #[inline(always)]
    fn pairs(self, loaded: &[Vector; 4], pair: usize) -> Pairs {
        let gates = loaded[pair / 4][pair % 4];
        Pairs {
            gates,
            gate: number::f32_pair(gates),
            up: number::f32_pair(loaded[2 + pair / 4][pair % 4]),
        }
    }
}

impl Arrangement for Interleaved {
    #[inline(always)]
    fn pairs(self, loaded: &[Vector; 4], pair: usize) -> Pairs {
        let word = |index: usize| loaded[index / 4][index % 4];
        let (first, second) = (word(2 * pair), word(2 * pair + 1));
        let (first_of, second_of) = (number::f32_pair(first), number::f32_pair(second));
        Pairs {
            gates: number::low_halves(first, second),
            gate: (first_of.0, second_of.0),
            up: (first_of.1, second_of.1),
        }
    }
}

/// Sixteen values from the result of [`Warp::load`], two by two.
#[inline(always)]
fn values(
    loaded: &[Vector; 4],
    arrangement: impl Arrangement,
    apply: impl Fn(Pairs) -> (f32, f32),
) -> Values {
    // Spelled out: the compiler does not unroll so much, and arrays that are indexed at run time leave the
    // registers.
    let at = |pair: usize| apply(arrangement.pairs(loaded, pair));
    let [a, b, c, d] = [at(0), at(1), at(2), at(3)];
    let [e, f, g, h] = [at(4), at(5), at(6), at(7)];
    [
        a.0, a.1, b.0, b.1, c.0, c.1, d.0, d.1, e.0, e.1, f.0, f.1, g.0, g.1, h.0, h.1,
    ]
}

impl<'a> Warp<'a> {
    #[inline(always)]
    fn new(args: &'a SiluArgs) -> Self {
        Self {
            args,
            lane: thread::lane(),
            warp: thread::thread() / LANES * thread::blocks() + thread::block(),
            warps: thread::threads() / LANES * thread::blocks(),
            table: Storage::declare(),
        }
    }

    /// First row of an expert, or, after the last one, the end of all rows.
    ///
    /// # Safety
    /// The host built the arguments. Every unsafe method of [`Warp`] requires this.
    #[inline(always)]
    unsafe fn row_offset(&self, expert: u32) -> u32 {
        // SAFETY: the host's `row_offsets` have `experts + 1` words, and nobody writes there meanwhile.
        unsafe { memory::load_constant_u32(self.args.row_offsets + 4 * expert as u64) }
    }

    #[inline(always)]
    unsafe fn input_scale(&self, expert: u32) -> f32 {
        match self.args.input_scales {
            0 => 1.0,
            // SAFETY: the host's `input_scales` have a word for each expert, and nobody writes there
            // meanwhile.
            at => f32::from_bits(unsafe { memory::load_constant_u32(at + 4 * expert as u64) }),
        }
    }

    /// The expert of `row`, which has one: `last` or a later one. All lanes.
    #[inline(always)]
    unsafe fn expert_of(&self, row: u32, last: Expert) -> Expert {
        let mut first = last.index;
        loop {
            let expert = (first + self.lane).min(self.args.experts - 1);
            // SAFETY: there are `experts + 1` row offsets.
            let end = unsafe { self.row_offset(expert + 1) };
            let behind = thread::ballot(row < end);
            if behind != 0 || first + LANES >= self.args.experts {
                let index = first + behind.trailing_zeros();
                // SAFETY: `index` is the expert of `row`.
                let start = unsafe { self.row_offset(index) };
                let end = thread::broadcast(end, index - first);
                // SAFETY: as above.
                let block = unsafe { self.first_block(index, start) };
                return Expert {
                    index,
                    start,
                    end,
                    block,
                };
            }
            first += LANES;
        }
    }

    /// Loads sixteen gates and ups of this lane, from column `column` of a row on.
    #[inline(always)]
    unsafe fn load(&self, row: u32, column: u32, active: bool) -> [Vector; 4] {
        let columns = self.args.columns as u64;
        let start = self.args.input + 4 * row as u64 * columns;
        let (first, second) = match self.args.interleaved {
            0 => (2 * column as u64, 2 * (columns + column as u64)),
            _ => (4 * column as u64, 4 * column as u64 + 32),
        };
        let at = |byte| start + byte;
        // SAFETY: active only inside the row.
        unsafe {
            [
                memory::load_constant_or_any(at(first), active),
                memory::load_constant_or_any(at(first) + 16, active),
                memory::load_constant_or_any(at(second), active),
                memory::load_constant_or_any(at(second) + 16, active),
            ]
        }
    }

    /// Works on this warp's rows and columns. `output` returns the encoder of an expert.
    #[inline(always)]
    unsafe fn run<O: Output>(&self, format: TokenFormat, output: impl Fn(u32) -> O) {
        let args = self.args;
        let silu = Activation::Silu;
        let (alpha, limit) = (args.alpha, args.limit);
        let clamped = Activation::Clamped { alpha, limit };
        // A loop for each case, so that none has a branch among the elements.
        // SAFETY: the host built the arguments: documented on `row_offset`.
        unsafe {
            match (args.clamped != 0, args.interleaved != 0) {
                (false, false) => self.run_with(format, output, GatesFirst, silu),
                (false, true) => self.run_with(format, output, Interleaved, silu),
                (true, false) => self.run_with(format, output, GatesFirst, clamped),
                (true, true) => self.run_with(format, output, Interleaved, clamped),
            }
        }
    }

    /// Runs [`run`](Self::run) with this launch's `activation` and `arrangement`.
    #[inline(always)]
    unsafe fn run_with<O: Output>(
        &self,
        format: TokenFormat,
        output: impl Fn(u32) -> O,
        arrangement: impl Arrangement,
        activation: Activation,
    ) {
        let args = self.args;
        // SAFETY: there are `experts + 1` row offsets.
        let rows = unsafe { self.row_offset(args.experts) };
        let rows = rows.min(args.row_capacity as u32);
        let needs_expert = args.scales_offsets != 0 || args.input_scales != 0;
        let lane_column = self.lane * LANE_ELEMENTS;
        // SAFETY: active only inside the rows of the host's input.
        let load = |tile: Tile| unsafe {
            let column = tile.column + lane_column;
            self.load(tile.row, column, tile.row < rows && column < args.columns)
        };
        let step = Tile::of(self.warps, args.columns);
        let mut tile = Tile::of(self.warp, args.columns);
        let mut expert = Expert {
            index: 0,
            start: 0,
            // Without `needs_expert` no row looks for its expert.
            end: if needs_expert { 0 } else { u32::MAX },
            block: 0,
        };
        let mut encoder = output(0);
        let mut loaded = load(tile);
        // While the first tile is being loaded.
        let sigmoids = Sigmoids::fill(self.table, activation);
        let apply = |Pairs { gates, gate, up }: Pairs| {
            let sigmoid = sigmoids.of_pair(gates);
            (
                activation.with_sigmoid(gate.0, sigmoid.0, up.0, Instructions),
                activation.with_sigmoid(gate.1, sigmoid.1, up.1, Instructions),
            )
        };
        while tile.row < rows {
            let values = values(&loaded, arrangement, apply);
            // Not before: the new values then take the registers of the old ones, without copies.
            let following = tile.plus(step, args.columns);
            loaded = load(following);
            let (row, column) = (tile.row, tile.column + lane_column);
            if row >= expert.end {
                // SAFETY: `row` is below the last row offset, so it has an expert.
                expert = unsafe { self.expert_of(row, expert) };
                encoder = output(expert.index);
            }
            let in_row = args.columns / LANE_ELEMENTS;
            let at = row as u64 * in_row as u64 + (column / LANE_ELEMENTS) as u64;
            let active = column < args.columns;
            // SAFETY: the host's output and scales have this row; active only inside it.
            unsafe {
                let scale = encoder.store(args.output, at, &values, active);
                if O::GROUP_LANES != 0 && self.lane.is_multiple_of(O::GROUP_LANES.max(1)) {
                    self.store_scale::<O>(format, ExpertRow { row, expert }, column, scale, active);
                }
            }
            tile = following;
        }
    }

    /// Stores the scale of the group of `column` of a row. Each scale by itself: combining them takes more
    /// instructions than storing them.
    #[inline(always)]
    unsafe fn store_scale<O: Output>(
        &self,
        format: TokenFormat,
        of: ExpertRow,
        column: u32,
        scale: u32,
        active: bool,
    ) {
        let args = self.args;
        if !active {
            return;
        }
        let ExpertRow { row, expert } = of;
        let group = column / (LANE_ELEMENTS * O::GROUP_LANES);
        let (word, place) = (group / O::WORD_SCALES, group % O::WORD_SCALES);
        // SAFETY: the word is among the `scale_words` words of the host's scales.
        unsafe {
            let first = args.first_scale(format, row, row - expert.start, expert.block);
            let index = first + word as u64 * args.scale_stride(format) as u64;
            if index < args.scale_words {
                let at = args.scales + 4 * index;
                match O::WORD_SCALES {
                    1 => memory::store_u32(at, scale),
                    _ => memory::store_u8(at + place as u64, scale as u8),
                }
            }
        }
    }

    /// First block of an expert's tiled scales.
    #[inline(always)]
    unsafe fn first_block(&self, expert: u32, start: u32) -> u32 {
        match self.args.scales_offsets {
            0 => 0,
            at => {
                // SAFETY: the host's `scales_offsets` have a word for each expert, and nobody writes there
                // meanwhile.
                let offset = unsafe { memory::load_constant_u32(at + 4 * expert as u64) };
                scale_placement::first_block(start, offset)
            }
        }
    }

    /// Writes zeros for the scales of the rows that an expert's last block has and the expert has not.
    #[inline(always)]
    unsafe fn clear_unused(&self, format: TokenFormat) {
        let args = self.args;
        if format.scale_layout() != Some(ScaleLayout::Tiled) {
            return;
        }
        let words = format.sizes().scale_words(args.columns);
        for task in (self.warp..args.experts * words).step_by(self.warps as usize) {
            let (index, word) = (task / words, task % words);
            // SAFETY: the expert exists, and the words are among the `scale_words` words of the host's
            // scales.
            unsafe {
                let start = self.row_offset(index);
                let rows = self.row_offset(index + 1) - start;
                let end = rows.next_multiple_of(scale_placement::BLOCK_ROWS);
                let block = self.first_block(index, start);
                let mut row = rows + self.lane;
                while row < end {
                    let first = args.first_scale(format, start + row, row, block);
                    let index = first + word as u64 * args.scale_stride(format) as u64;
                    if index < args.scale_words {
                        memory::store_u32(args.scales + 4 * index, 0);
                    }
                    row += LANES;
                }
            }
        }
    }
}
