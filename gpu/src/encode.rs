//! Formats on a GPU: a lane's 16 elements as payload and scales. The arithmetic is `ferry-layout`'s;
//! conversions are instructions if the target has them.

use ferry_layout::fp8::{self, Divisor};
use ferry_layout::{avoid_sentinel, mxfp4, mxfp8, nvfp4};

use ferry_protocol::{Bits, ByteRange, LANES};

use crate::elements::{Elements, LANE_ELEMENTS, TILE_ELEMENTS, load_elements};
use crate::ptx::memory::{self, Vector};
use crate::ptx::{number, thread};

/// Encoded elements of a lane.
pub struct Encoded {
    /// Their payload: 16 bytes, or 8 in the first half.
    pub payload: Vector,
    /// The scale of the lane's group: a code, or the bits of an f32.
    pub scale: u32,
}

/// A format with scales.
pub trait Encoder {
    /// Bytes of payload of a lane's elements.
    const PAYLOAD_BYTES: u32;
    /// Lanes that share a scale.
    const GROUP_LANES: u32;
    /// Lanes whose scales fill a word.
    const WORD_LANES: u32;

    /// Encodes the lane's elements. All lanes.
    fn encode(&self, values: &[f32; 16]) -> Encoded;

    /// A word of the scales that [`encode`](Self::encode) returned, on every lane whose number is a multiple
    /// of [`Encoder::WORD_LANES`]. All lanes.
    #[inline(always)]
    fn scales(scale: u32) -> u32 {
        if Self::WORD_LANES == Self::GROUP_LANES {
            return scale;
        }
        let pair = scale | thread::from_partner(scale, Self::GROUP_LANES) << 8;
        pair | thread::from_partner(pair, 2 * Self::GROUP_LANES) << 16
    }
}

/// Blockwise FP8.
pub struct BlockwiseFp8;
/// Encoder of MXFP8: 32 elements, those of two lanes, share a one-byte scale.
pub struct Mxfp8;
/// Encoder of MXFP4: 32 elements share a one-byte scale.
pub struct Mxfp4;
/// NVFP4 under a global scale.
pub struct Nvfp4 {
    /// Factor of scales.
    pub global: f32,
    /// `1.0 / global`.
    pub inverse: f32,
}

impl Nvfp4 {
    /// Encoder under the global scale `global`.
    #[inline(always)]
    pub fn new(global: f32) -> Self {
        Self {
            global,
            inverse: 1.0 / global,
        }
    }
}

/// The largest magnitude of a lane's elements; a NaN does not count.
#[inline(always)]
pub fn largest(values: &[f32; 16]) -> f32 {
    // Two chains, since each step waits for the one before. One chain may begin with a NaN: the other does
    // not.
    let (mut even, mut odd) = (number::larger(0.0, values[0]), values[1]);
    core::array::from_fn::<(), 7, _>(|index| {
        even = number::larger(even, values[2 * index + 2]);
        odd = number::larger(odd, values[2 * index + 3]);
    });
    number::larger(even, odd)
}

/// The largest magnitude of this lane and the one whose number differs in the bits of `lanes`.
#[inline(always)]
pub fn larger_of_partner(amax: f32, lanes: u32) -> f32 {
    number::larger(
        amax,
        f32::from_bits(thread::from_partner(amax.to_bits(), lanes)),
    )
}

/// Sixteen elements as e4m3, after `divide`.
#[inline(always)]
fn e4m3(values: &[f32; 16], divide: impl Fn(f32) -> f32) -> Vector {
    // Spelled out: the compiler does not unroll this on targets without an instruction for e4m3.
    [
        e4m3_word::<0>(values, &divide),
        e4m3_word::<4>(values, &divide),
        e4m3_word::<8>(values, &divide),
        e4m3_word::<12>(values, &divide),
    ]
}

/// Four elements from `FIRST` on.
#[inline(always)]
fn e4m3_word<const FIRST: usize>(values: &[f32; 16], divide: &impl Fn(f32) -> f32) -> u32 {
    number::e4m3_quad(
        divide(values[FIRST]),
        divide(values[FIRST + 1]),
        divide(values[FIRST + 2]),
        divide(values[FIRST + 3]),
    )
}

/// Sixteen elements as e2m1, `eight` at a time, in the first two words.
#[inline(always)]
fn e2m1(values: &[f32; 16], eight: impl Fn([f32; 8]) -> u32) -> Vector {
    let word = |first: usize| eight(core::array::from_fn(|index| values[first + index]));
    [word(0), word(8), 0, 0]
}

impl Encoder for BlockwiseFp8 {
    const PAYLOAD_BYTES: u32 = 16;
    const GROUP_LANES: u32 = 8;
    const WORD_LANES: u32 = 8;

    #[inline(always)]
    fn encode(&self, values: &[f32; 16]) -> Encoded {
        let amax = larger_of_partner(largest(values), 1);
        let amax = larger_of_partner(larger_of_partner(amax, 2), 4);
        let scale = fp8::scale(amax);
        let divisor = Divisor::new(scale);
        Encoded {
            payload: e4m3(values, |value| divisor.divide(value, number::Instructions)),
            scale: scale.to_bits(),
        }
    }
}

impl Encoder for Mxfp8 {
    const PAYLOAD_BYTES: u32 = 16;
    const GROUP_LANES: u32 = 2;
    const WORD_LANES: u32 = 8;

    #[inline(always)]
    fn encode(&self, values: &[f32; 16]) -> Encoded {
        let amax = larger_of_partner(largest(values), 1);
        let scale = mxfp8::scale_bits(amax);
        let multiplier = mxfp8::multiplier(amax, scale);
        Encoded {
            payload: e4m3(values, |value| value * multiplier),
            scale: scale.into(),
        }
    }
}

impl Encoder for Mxfp4 {
    const PAYLOAD_BYTES: u32 = 8;
    const GROUP_LANES: u32 = 2;
    const WORD_LANES: u32 = 8;

    #[inline(always)]
    fn encode(&self, values: &[f32; 16]) -> Encoded {
        let amax = larger_of_partner(largest(values), 1);
        let scale = mxfp4::scale_bits(amax);
        let multiplier = mxfp4::multiplier(scale);
        Encoded {
            payload: e2m1(values, |eight| number::e2m1_eight_scaled(eight, multiplier)),
            scale: scale.into(),
        }
    }
}

/// Returns the same as [`nvfp4::multiplier`].
#[inline(always)]
pub fn multiplier(scale: u8, inverse_global: f32) -> f32 {
    let value = number::f32_of_e4m3(scale);
    nvfp4::multiplier_of_value(value, inverse_global, number::Instructions)
}

impl Encoder for Nvfp4 {
    const PAYLOAD_BYTES: u32 = 8;
    const GROUP_LANES: u32 = 1;
    const WORD_LANES: u32 = 4;

    #[inline(always)]
    fn encode(&self, values: &[f32; 16]) -> Encoded {
        let scale = number::e4m3(nvfp4::exact_scale(largest(values), self.global));
        let multiplier = multiplier(scale, self.inverse);
        Encoded {
            payload: e2m1(values, |eight| number::e2m1_eight(eight, multiplier)),
            scale: scale.into(),
        }
    }
}

/// Destination of an encoded token.
pub trait Target: Copy {
    /// Whether a lane may ask others for the destination, so that all lanes compute it together.
    const ASKS_LANES: bool;

    /// The address of its payload.
    fn payload(self) -> u64;
    /// Stores word `index` of its scales. For one lane.
    ///
    /// # Safety
    /// The destination has such a word.
    unsafe fn store_scales(self, index: u32, word: u32);
    /// Stores the token's own scale. For one lane.
    ///
    /// # Safety
    /// The destination has a place for it.
    unsafe fn store_row_scale(self, scale: u16);
}

/// A row of a window: payload, scales, the row's own scale.
#[derive(Clone, Copy)]
pub struct WindowTarget {
    /// Start of the row.
    pub row: u64,
    /// Bytes from the start to its scales.
    pub scales_start: u32,
    /// Bytes from the start to its own scale.
    pub row_scale_start: u32,
}

impl Target for WindowTarget {
    const ASKS_LANES: bool = false;

    #[inline(always)]
    fn payload(self) -> u64 {
        self.row
    }

    #[inline(always)]
    unsafe fn store_scales(self, index: u32, word: u32) {
        let at = self.row + (self.scales_start + 4 * index) as u64;
        // SAFETY: the row has word `index` of scales: documented on `Target::store_scales`.
        unsafe { memory::store_relaxed_u32(at, avoid_sentinel(word)) };
    }

    #[inline(always)]
    unsafe fn store_row_scale(self, scale: u16) {
        // SAFETY: the row has a place for its own scale: documented on `Target::store_row_scale`.
        unsafe { memory::store_u32(self.row + self.row_scale_start as u64, scale as u32) };
    }
}

/// A row of the outputs.
#[derive(Clone, Copy)]
pub struct OutputTarget {
    /// Its payload.
    pub payload: u64,
    /// The first word of its scales.
    pub scales: u64,
    /// Words between two consecutive ones.
    pub stride: u64,
    /// Its own scale.
    pub row_scale: u64,
}

impl Target for OutputTarget {
    const ASKS_LANES: bool = true;

    #[inline(always)]
    fn payload(self) -> u64 {
        self.payload
    }

    #[inline(always)]
    unsafe fn store_scales(self, index: u32, word: u32) {
        // SAFETY: the row has word `index` of scales: documented on `Target::store_scales`.
        unsafe { memory::store_u32_kept(self.scales + 4 * (index as u64 * self.stride), word) };
    }

    #[inline(always)]
    unsafe fn store_row_scale(self, scale: u16) {
        // SAFETY: the row has a place for its own scale: documented on `Target::store_row_scale`.
        unsafe { memory::store_u16(self.row_scale, scale) };
    }
}

/// A token that is encoded into rows.
pub struct EncodedRow<To> {
    /// The token: BF16.
    pub source: u64,
    /// Its elements.
    pub elements: u32,
    /// This lane.
    pub lane: u32,
    /// Its rows, as bits.
    pub targets: u64,
    /// Destination of each row.
    pub to: To,
}

impl<T: Target, To: Fn(u32) -> T> EncodedRow<To> {
    /// Calls `each` for every row.
    #[inline(always)]
    fn each_target(&self, each: impl Fn(T)) {
        if T::ASKS_LANES {
            return self.each_slot(each);
        }
        let mut left = self.targets;
        while let Some(target) = left.take_lowest() {
            each((self.to)(target));
        }
    }

    /// Calls `each` for every top-k slot, of which there are at most 32: a word of 32 bits takes half the
    /// instructions of one of 64.
    #[inline(always)]
    fn each_slot(&self, each: impl Fn(T)) {
        let mut left = self.targets as u32;
        while let Some(target) = left.take_lowest() {
            each((self.to)(target));
        }
    }

    /// Calls `each` for every row, on the lanes that are `active`. All lanes.
    #[inline(always)]
    fn each_target_of(&self, active: bool, each: impl Fn(T)) {
        if T::ASKS_LANES {
            self.each_target(|row| {
                if active {
                    each(row);
                }
            });
        } else if active {
            self.each_target(each);
        }
    }

    /// Encodes the elements of a byte range of the payload, and the scales of its groups. All lanes.
    ///
    /// # Safety
    /// The token has its elements, and each row has payload and scales for them.
    #[inline(always)]
    pub unsafe fn encode<E: Encoder>(
        &self,
        encoder: &E,
        range: ByteRange,
        mut elements: impl Elements,
    ) {
        let element = |byte: u32| byte / E::PAYLOAD_BYTES * LANE_ELEMENTS;
        let (mut tile, end) = (element(range.start), element(range.end));
        let mut scales = Scales::<E>::new(tile, end);
        // SAFETY: the token has `end` elements: documented above.
        unsafe { elements.begin(tile, end) };
        while tile < end {
            // SAFETY: as above.
            let loaded = unsafe { elements.take(tile, end) };
            let encoded = encoder.encode(&values(loaded));
            let start = tile + self.lane * LANE_ELEMENTS;
            self.each_target(|row| {
                let at = row.payload() + (start / LANE_ELEMENTS * E::PAYLOAD_BYTES) as u64;
                // SAFETY: active only inside the row.
                unsafe {
                    match E::PAYLOAD_BYTES {
                        16 => memory::store_relaxed_vector(at, encoded.payload, start < end),
                        _ => memory::store_pair(at, encoded.payload, start < end),
                    }
                }
            });
            tile += TILE_ELEMENTS;
            if scales.take(E::scales(encoded.scale), self.lane) || tile >= end {
                let index = scales.first + self.lane;
                // SAFETY: inside the row's scales.
                self.each_target_of(index < scales.end, |row| unsafe {
                    row.store_scales(index, scales.words)
                });
                scales.begin_next();
            }
        }
    }

    /// The largest magnitude of the token's elements; a NaN does not count. All lanes.
    ///
    /// # Safety
    /// The token has its elements.
    #[inline(always)]
    pub unsafe fn largest(&self) -> f32 {
        let (mut tile, mut amax) = (0, 0.0);
        while tile < self.elements {
            // SAFETY: the token has `self.elements` elements: documented above.
            let (this, next) = unsafe {
                let load = |tile| load_elements(self.source, self.lane, tile, self.elements);
                (load(tile), load(tile + TILE_ELEMENTS))
            };
            amax = number::larger(amax, largest(&values(this)));
            amax = number::larger(amax, largest(&values(next)));
            tile += 2 * TILE_ELEMENTS;
        }
        for step in 0..LANES.ilog2() {
            amax = larger_of_partner(amax, 1 << step);
        }
        amax
    }

    /// Stores the token's own scale for each row.
    ///
    /// # Safety
    /// The rows have a place for one.
    #[inline(always)]
    pub unsafe fn store_row_scale(&self, scale: u16) {
        // SAFETY: the rows have a place for it: documented above.
        self.each_target_of(self.lane == 0, |row| unsafe { row.store_row_scale(scale) });
    }
}

/// Sixteen BF16 as f32.
#[inline(always)]
pub fn values(halves: [Vector; 2]) -> [f32; 16] {
    core::array::from_fn(|index| {
        let (low, high) = number::f32_pair(halves[index / 8][index / 2 % 4]);
        if index % 2 == 0 { low } else { high }
    })
}

/// Words of scales, collected until every lane has one: small stores are expensive on the wire.
struct Scales<E> {
    /// This lane's.
    words: u32,
    /// Index, in the row, of the word that lane 0 holds.
    first: u32,
    /// Index after the row's last word.
    end: u32,
    /// Words that lanes hold.
    held: u32,
    format: core::marker::PhantomData<E>,
}

impl<E: Encoder> Scales<E> {
    /// Words of a tile.
    const TILE_WORDS: u32 = LANES / E::WORD_LANES;

    /// Words of elements `start..end`.
    #[inline(always)]
    fn new(start: u32, end: u32) -> Self {
        Self {
            words: 0,
            first: start / (LANE_ELEMENTS * E::WORD_LANES),
            end: end / (LANE_ELEMENTS * E::WORD_LANES),
            held: 0,
            format: core::marker::PhantomData,
        }
    }

    /// Takes a tile's words; true if every lane now has one. All lanes.
    #[inline(always)]
    fn take(&mut self, scales: u32, lane: u32) -> bool {
        let word = thread::broadcast(scales, lane % Self::TILE_WORDS * E::WORD_LANES);
        if lane / Self::TILE_WORDS == self.held / Self::TILE_WORDS {
            self.words = word;
        }
        self.held += Self::TILE_WORDS;
        self.held == LANES
    }

    #[inline(always)]
    fn begin_next(&mut self) {
        self.first += self.held;
        self.held = 0;
    }
}
