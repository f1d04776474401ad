//! Tokens that the user has encoded: instead of being encoded, they are copied to where encoded ones go. Rows
//! look the same, so receivers know nothing of it.
//!
//! Words that mean something on the way change: see [`TokenFormat::all_ones`] and [`LOST_SCALES`].

use ferry_layout::{
    ByteOffset, Fault, FaultKind, LOST_SCALES, Rank, Region, SENTINEL, Table, TokenFormat,
    avoid_sentinel,
};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::place::scales::words_of;
use crate::machine::rows::{Bits, OutputRow, TokenPart};
use crate::machine::{LANES, Machine};
use crate::work::item::RowLocation;
use crate::work::lanes::for_each_bit;

impl<M: Machine> Dispatch<'_, M> {
    /// Whether the input is encoded. Never in BF16, for which kernels have no code for it.
    #[inline(always)]
    pub fn is_encoded(&self) -> bool {
        let format = self.common.shape.format();
        self.options.encoded.is_on() && !matches!(format, TokenFormat::Bf16)
    }

    /// Writes the scales of a part of an encoded token to the row at `place(i)`, in a window, for every bit
    /// `i` of `targets`. The codes are copied like BF16.
    #[inline(always)]
    pub fn send_scales(
        &self,
        token: u32,
        location: RowLocation,
        targets: impl Bits,
        place: impl Fn(u32) -> (Rank, ByteOffset),
    ) {
        let (machine, common) = (self.machine, self.common);
        let part = TokenPart {
            token,
            range: location.range,
        };
        // With flags all words travel. Between nodes there are no others.
        let is_inline = location.is_inline && !machine.spans_nodes();
        self.put_scales(part, |first, end, words| {
            let words = machine.lanes(|lane| match (is_inline, machine.own(words, lane)) {
                (true, word) => avoid_sentinel(word),
                (false, word) => word,
            });
            for_each_bit(targets, |target| {
                let (rank, row) = place(target);
                let scales = common.row.scales(row);
                machine.lanes(|lane| {
                    if first + lane < end {
                        machine.write_word(
                            rank,
                            scales.word(first + lane),
                            machine.own(words, lane),
                        );
                    }
                });
            });
        });
    }

    /// Copies a part of an encoded token to the row `to(i)` of the outputs for every bit `i` of `targets`,
    /// like [`Machine::encode_output`]: words of scales are `stride` words apart.
    #[inline(always)]
    pub fn place_encoded(
        &self,
        part: TokenPart,
        stride: u64,
        targets: u32,
        to: impl Fn(u32) -> OutputRow,
    ) {
        let machine = self.machine;
        self.report_lost(part);
        self.put_scales(part, |first, end, words| {
            for_each_bit(targets, |target| {
                let start = to(target).scales as u64;
                machine.lanes(|lane| {
                    if first + lane < end {
                        let index = start + (first + lane) as u64 * stride;
                        machine.write(Table::Scales, index, machine.own(words, lane));
                    }
                });
            });
        });
        machine.write_token(TokenFormat::Bf16, part, stride, targets, to);
    }

    /// Reports words among a part of a token's scales that no row carries. Apart from their way, as a report
    /// takes registers.
    #[inline(always)]
    pub fn report_lost(&self, part: TokenPart) {
        let machine = self.machine;
        self.each_words(part, |first, _, words| {
            let is_lost = machine.lanes(|lane| machine.own(words, lane) == LOST_SCALES);
            let lost = machine.ballot(is_lost);
            if lost != 0 {
                self.record_input(FaultKind::LostScales, lost, |lane| Fault {
                    peer: self.common.rank(),
                    region: Region::InputScales,
                    index: part.token as u64,
                    wanted: (first + lane) as u64,
                    saw: LOST_SCALES as u64,
                    ..self.fault()
                });
            }
        });
    }

    /// Calls `put` for the scales of a part of a token, as rows carry them: with the number of the first
    /// word, the end of the words, and a word for each lane from the first on.
    #[inline(always)]
    fn put_scales(&self, part: TokenPart, put: impl Fn(u32, u32, M::Lanes<u32>)) {
        let machine = self.machine;
        self.each_words(part, |first, end, words| {
            let words = machine.lanes(|lane| match machine.own(words, lane) {
                LOST_SCALES => SENTINEL,
                word => word,
            });
            put(first, end, words);
        });
    }

    /// Calls `each` for the scales of a part of a token, like [`put_scales`](Self::put_scales), but with all
    /// bits that the user gave.
    #[inline(always)]
    fn each_words(
        &self,
        TokenPart { token, range }: TokenPart,
        each: impl Fn(u32, u32, M::Lanes<u32>),
    ) {
        let (machine, encoded) = (self.machine, &self.options.encoded);
        let (mut first, end) = words_of(self.common, range);
        while first < end {
            let words = machine.lanes(|lane| {
                // The last lanes read the last word again rather than branch.
                let word = (first + lane).min(end - 1);
                let index = encoded.word_index(token, word);
                encoded.word_of(machine.read(Table::InputScales, index as u64), word)
            });
            each(first, end, words);
            first += LANES;
        }
    }
}
