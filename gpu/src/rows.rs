//! Rows on their way through a warp's registers: copied, summed, and waited for where they are bare.

use ferry_layout::{ABSENT, Arguments, ByteOffset, RowGroup, Tensor, sent};
#[cfg(target_feature = "sm_90")]
use ferry_layout::{RING_BYTES, RING_SLOTS};
use ferry_protocol::{Bits, Machine, Row, Span};

use crate::device::Gpu;
use crate::ptx::memory::Vector;
#[cfg(target_feature = "sm_90")]
use crate::ptx::ring::{self, Ring};
use crate::ptx::thread;
use crate::strip;

/// So many vectors of a bare row a lane looks at all the time rather than at the last one first.
const FEW_VECTORS: u32 = 2;

/// Vectors of a lane that are few enough to be handled apart: of those that there are not, nothing is done.
const SHORT: usize = 2;

/// Whether nobody writes a row while kernels read it.
#[inline(always)]
fn is_constant(row: Row) -> bool {
    matches!(row, Row::Tensor(Tensor::Input | Tensor::Expert, _))
}

impl<A: Arguments, const SHMEM: bool> Gpu<'_, A, SHMEM> {
    /// [`Machine::read_ahead`].
    #[inline(always)]
    pub fn first_strip<const DEPTH: usize>(&self, span: Span, from: Row) -> [Vector; DEPTH] {
        let start = span.start + self.lane * size_of::<Vector>() as u32;
        self.load_strip((self.row(from), start, span), from)
    }

    /// A strip of a row that is copied: as many vectors as there are, or a few, or none.
    #[inline(always)]
    fn load_strip<const DEPTH: usize>(
        &self,
        (source, start, span): (u64, u32, Span),
        from: Row,
    ) -> [Vector; DEPTH] {
        let mut strip = [[0; 4]; DEPTH];
        // The same for all lanes.
        let left = span.end + self.lane * size_of::<Vector>() as u32 - start;
        // SAFETY: the protocol copies whole rows, with the span's bytes on both sides.
        unsafe {
            if left > SHORT as u32 * strip::WARP_BYTES {
                strip = strip::load_again(source, start, span.end, is_constant(from));
            } else if left > 0 {
                let few = strip::load_again::<SHORT>(source, start, span.end, is_constant(from));
                strip[..SHORT].copy_from_slice(&few);
            }
        }
        strip
    }

    /// [`Machine::copy_row`], `DEPTH` vectors a lane at a time.
    #[inline(always)]
    pub fn copy_strips<const DEPTH: usize>(
        &self,
        (span, from): (Span, Row),
        ahead: [Vector; DEPTH],
        targets: impl Bits,
        to: impl Fn(u32) -> Row,
    ) -> bool {
        let (source, mut strip) = (self.row(from), ahead);
        let mut start = span.start + self.lane * size_of::<Vector>() as u32;
        let lane_end = span.end + self.lane * size_of::<Vector>() as u32;
        loop {
            let at = (source, start, span);
            // How much is left is the same for all lanes, here and below.
            let passed = match lane_end - start <= SHORT as u32 * strip::WARP_BYTES {
                true => {
                    let strip: [Vector; SHORT] = core::array::from_fn(|index| strip[index]);
                    self.pass_strip(from, at, strip, (targets, &to))
                }
                false => self.pass_strip(from, at, strip, (targets, &to)),
            };
            if !passed {
                return false;
            }
            start += DEPTH as u32 * strip::WARP_BYTES;
            if start >= lane_end {
                return true;
            }
            strip = self.load_strip((source, start, span), from);
        }
    }

    /// Waits for the words of a strip, if it is of a bare row, and stores it. False where this launch should give up.
    #[inline(always)]
    fn pass_strip<const DEPTH: usize>(
        &self,
        from: Row,
        (source, start, span): (u64, u32, Span),
        mut strip: [Vector; DEPTH],
        (mut targets, to): (impl Bits, &impl Fn(u32) -> Row),
    ) -> bool {
        if let Row::Bare(..) = from {
            while thread::union((strip::largest_word(&strip) == ABSENT) as u32) != 0 {
                let gives_up = match span.end - span.start > FEW_VECTORS * strip::WARP_BYTES {
                    true => !self.wait_for_last::<DEPTH>(source, start, span.end),
                    false => self.expired(),
                };
                if gives_up {
                    return false;
                }
                // SAFETY: the protocol copies whole rows, with the span's bytes on both sides.
                strip = unsafe { strip::load_again(source, start, span.end, false) };
            }
            // SAFETY: as above.
            unsafe { strip::store(source, start, span.end, &[[ABSENT; 4]; DEPTH]) };
        }
        let is_input = matches!(from, Row::Tensor(Tensor::Input, _));
        if is_input {
            strip = strip.map(|vector| vector.map(sent));
        }
        while let Some(target) = targets.take_lowest() {
            let target = self.row(to(target));
            // SAFETY: as above.
            unsafe {
                match is_input {
                    true => strip::store_polled(target, start, span.end, &strip),
                    false => strip::store(target, start, span.end, &strip),
                }
            }
        }
        true
    }

    /// Waits for the last vectors of a strip of a bare row, which are sent last: to look at all of them
    /// again and again would be in the way of those that come. False where this launch should give up.
    #[inline(always)]
    fn wait_for_last<const DEPTH: usize>(&self, row: u64, start: u32, end: u32) -> bool {
        let strip_start = start - self.lane * size_of::<Vector>() as u32;
        let vectors = (end - strip_start).div_ceil(strip::WARP_BYTES);
        let last = start + (vectors.min(DEPTH as u32) - 1) * strip::WARP_BYTES;
        loop {
            // Also where it is there: others may never come.
            if self.expired() {
                return false;
            }
            // SAFETY: the caller's row has `end` bytes.
            let vector = unsafe { strip::load_arriving(row, last, end) };
            let is_absent = strip::largest_word(&[vector]) == ABSENT;
            if thread::union(is_absent as u32) == 0 {
                return true;
            }
        }
    }

    /// [`Machine::sum_rows`], `DEPTH` vectors a lane at a time.
    #[inline(always)]
    pub fn sum_strips<const DEPTH: usize>(
        &self,
        span: Span,
        sources: u32,
        from: impl Fn(u32) -> (Row, f32),
        to: Row,
    ) {
        // The next row is on its way while this one is added, which takes registers: for sm_80 the
        // assembler finds too few.
        let loads_ahead = !matches!(to, Row::Tensor(..)) && cfg!(target_feature = "sm_90");
        let target = self.row(to);
        let lane_start = self.lane * size_of::<Vector>() as u32;
        let mut strip_start = span.start;
        while strip_start < span.end {
            let start = strip_start + lane_start;
            let load = |sources: u32| {
                if sources == 0 {
                    return [[0; 4]; DEPTH];
                }
                let (row, _) = from(sources.trailing_zeros());
                // SAFETY: the protocol sums whole rows, with the span's bytes on both sides.
                unsafe { strip::load::<DEPTH>(self.row(row), start, span.end, is_constant(row)) }
            };
            let mut sums = [[0f32; 8]; DEPTH];
            let mut left = sources;
            let mut ahead = [[0; 4]; DEPTH];
            if loads_ahead {
                ahead = load(left);
            }
            while left != 0 {
                let (_, weight) = from(left.trailing_zeros());
                let mut strip = ahead;
                if !loads_ahead {
                    strip = load(left);
                }
                left &= left - 1;
                if loads_ahead {
                    ahead = load(left);
                }
                sums = core::array::from_fn(|i| strip::add(sums[i], strip[i], weight));
            }
            let strip = core::array::from_fn(|index| strip::round(&sums[index]));
            // SAFETY: as above.
            unsafe { strip::store_polled::<DEPTH>(target, start, span.end, &strip) };
            strip_start += DEPTH as u32 * strip::WARP_BYTES;
        }
    }
}

#[cfg(target_feature = "sm_90")]
impl<A: Arguments, const SHMEM: bool> Gpu<'_, A, SHMEM> {
    /// [`Machine::sum_rows`] of rows that go through the ring.
    #[inline(always)]
    pub fn sum_through_ring(&self, of: (Span, u32), from: impl Fn(u32) -> (Row, f32), to: Row) {
        const DEPTH: usize = (RING_BYTES / RING_SLOTS / strip::WARP_BYTES) as usize;
        match of.0.end - of.0.start <= SHORT as u32 * strip::WARP_BYTES {
            true => self.sum_slots::<SHORT>(of, &from, to),
            false => self.sum_slots::<DEPTH>(of, &from, to),
        }
    }

    /// [`sum_through_ring`](Self::sum_through_ring), `DEPTH` of a row's vectors a lane at a time, which a slot holds.
    #[inline(always)]
    fn sum_slots<const DEPTH: usize>(
        &self,
        (span, sources): (Span, u32),
        from: &impl Fn(u32) -> (Row, f32),
        to: Row,
    ) {
        let strip_bytes = DEPTH as u32 * strip::WARP_BYTES;
        let (ring, target) = (Ring::of_lane(), self.row(to));
        let lane_start = self.lane * size_of::<Vector>() as u32;
        let next = |slot: u32| (slot + 1) % RING_SLOTS;
        let (mut ahead_start, mut ahead, mut ahead_slot) = (span.start, sources, 0);
        // Begins to load what comes next, if anything. Gives the slot that is read next: the one after.
        let mut load = || {
            if ahead != 0 && ahead_start < span.end {
                let (row, _) = from(ahead.trailing_zeros());
                let start = ahead_start + lane_start;
                // SAFETY: the protocol sums whole rows, with the span's bytes on both sides. The slot was read by
                // this lane in the step before, and memory takes longer than that.
                unsafe { ring.load::<DEPTH>(ahead_slot, self.row(row), start, span.end) };
                ahead &= ahead - 1;
                if ahead == 0 {
                    ahead = sources;
                    ahead_start += strip_bytes;
                }
            }
            ahead_slot = next(ahead_slot);
            ring::commit();
            ahead_slot
        };
        for _ in 1..RING_SLOTS {
            load();
        }
        let mut strip_start = span.start;
        while strip_start < span.end {
            let mut sums = [[0f32; 8]; DEPTH];
            let mut left = sources;
            while left != 0 {
                let slot = load();
                ring::wait_for_all_but::<{ RING_SLOTS - 1 }>();
                let strip = ring.read::<DEPTH>(slot);
                let (_, weight) = from(left.trailing_zeros());
                left &= left - 1;
                sums = core::array::from_fn(|i| strip::add(sums[i], strip[i], weight));
            }
            let strip = core::array::from_fn(|index| strip::round(&sums[index]));
            let start = strip_start + lane_start;
            // SAFETY: as above.
            unsafe { strip::store_polled::<DEPTH>(target, start, span.end, &strip) };
            strip_start += strip_bytes;
        }
    }
}

/// Vectors of a bare row that a lane has in flight.
pub const BARE_DEPTH: usize = 2;

impl<A: Arguments, const SHMEM: bool> Gpu<'_, A, SHMEM> {
    /// Waits for a vector a lane of a bare row. False where this launch should give up.
    #[inline(always)]
    fn wait_for_vector(&self, row: u64, start: u32, end: u32) -> bool {
        loop {
            // SAFETY: the caller's row has `end` bytes.
            let vector = unsafe { strip::load_arriving(row, start, end) };
            let is_absent = strip::largest_word(&[vector]) == ABSENT;
            if thread::union(is_absent as u32) == 0 {
                return true;
            }
            if self.expired() {
                return false;
            }
        }
    }

    /// A strip of [`Machine::sum_bare_rows`].
    #[inline(always)]
    pub fn sum_bare_strip(
        &self,
        (strip_start, end): (u32, u32),
        (sources, few): (u32, bool),
        from: impl Fn(u32) -> ByteOffset,
        to: Row,
    ) -> Result<(), u32> {
        let start = strip_start + self.lane * size_of::<Vector>() as u32;
        let own = self.window(self.common().rank());
        let mut sums = [[0f32; 8]; BARE_DEPTH];
        const { assert!(RowGroup::SIZE == 4) };
        let mut group = RowGroup::first_of(sources);
        while group.is_some() {
            let row = |index: u32| own + from(group.row(index)).bytes();
            // Where there are fewer, the last one again: loads that may not take place would be made one
            // after the other.
            // SAFETY: the protocol sums whole rows, with the span's bytes on both sides.
            let load = |index: u32| unsafe {
                strip::load_again::<BARE_DEPTH>(row(index), start, end, false)
            };
            let rows = loop {
                // Spelled out, so that they stay in registers.
                let rows = [load(0), load(1), load(2), load(3)];
                let is_absent =
                    |index: usize| ((strip::largest_word(&rows[index]) == ABSENT) as u32) << index;
                let absent = is_absent(0) | is_absent(1) | is_absent(2) | is_absent(3);
                let absent = thread::union(absent);
                if absent == 0 {
                    break rows;
                }
                // One vector of one of them, until it is there: to look at all again and again would be
                // in the way of those that come.
                let missing = absent.trailing_zeros();
                if !few && !self.wait_for_vector(row(missing), start, end) {
                    return Err(group.row(missing));
                }
                // Its other vectors may never come.
                if self.expired() {
                    return Err(group.row(missing));
                }
            };
            let mut take = |index: u32| {
                if group.has(index) {
                    let of_row = &rows[index as usize];
                    sums = core::array::from_fn(|i| strip::add(sums[i], of_row[i], 1.0));
                    // SAFETY: as above.
                    unsafe { strip::store(row(index), start, end, &[[ABSENT; 4]; BARE_DEPTH]) };
                }
            };
            take(0);
            take(1);
            take(2);
            take(3);
            group = group.next();
        }
        let sums = core::array::from_fn(|index| strip::round(&sums[index]));
        // SAFETY: as above.
        unsafe { strip::store::<BARE_DEPTH>(self.row(to), start, end, &sums) };
        Ok(())
    }
}
