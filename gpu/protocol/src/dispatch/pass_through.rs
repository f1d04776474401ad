//! Tokens that the user has encoded: instead of being encoded, they are copied to where encoded ones go. Rows
//! look the same, so receivers know nothing of it.
//!
//! Words that mean something on the way change: see [`avoid_sentinel_in_codes`] and [`LOST_SCALES`].

#[cfg(doc)]
use ferry_layout::avoid_sentinel_in_codes;
use ferry_layout::{
    DispatchOptions, EncodedInput, Fault, FaultKind, LOST_SCALES, Rank, Region, SENTINEL, Table,
    Tensor, TokenFormat, avoid_sentinel,
};

use crate::dispatch::route::Route;
use crate::dispatch::scales::words_of;
use crate::machine::rows::{Bits, ByteRange, OutputRow, Row, TokenPart};
use crate::machine::{LANES, Machine};
use crate::sync::launch::Launch;
use crate::work::item::RowLocation;
use crate::work::ranks::{for_each_bit, p2p_ranks};

/// Whether the input is encoded. Never in BF16, for which kernels have no code for it.
#[inline(always)]
pub fn is_encoded(format: TokenFormat, options: &DispatchOptions) -> bool {
    options.encoded.is_on != 0 && !matches!(format, TokenFormat::Bf16)
}

/// Copies a part of an encoded token to its rows in windows: codes to the row `to(i)` for every bit `i` of
/// `targets`, and scales to the same rows.
#[inline(always)]
pub fn send<M: Machine>(
    launch: &Launch<M>,
    encoded: &EncodedInput,
    route: Route<M::Lanes<u32>>,
    location: RowLocation,
    targets: impl Bits,
    to: impl Fn(u32) -> Row,
) {
    let (machine, common) = (launch.machine, launch.common);
    let Route { token, ranks, .. } = route;
    let p2p = p2p_ranks(machine, common, ranks);
    let staging = common.row.scales(common.window.dispatch_staging(token));
    let part = TokenPart {
        token,
        range: location.range,
    };
    copy(launch, encoded, part, targets, to, |first, end, words| {
        let write = |rank, scales: ferry_layout::ByteOffset| {
            machine.lanes(|lane| {
                if first + lane < end {
                    // With flags all words travel.
                    let word = match (location.is_inline, machine.own(words, lane)) {
                        (true, word) => avoid_sentinel(word),
                        (false, word) => word,
                    };
                    machine.write_word(rank, scales.word(first + lane), word);
                }
            });
        };
        for_each_bit(p2p, |rank| {
            write(Rank(rank), common.row.scales(location.row));
        });
        if ranks != p2p {
            write(common.rank(), staging);
        }
    });
}

/// Copies a part of an encoded token to the row `to(i)` of the outputs for every bit `i` of `targets`, like
/// [`Machine::encode_output`]: words of scales are `stride` words apart.
#[inline(always)]
pub fn place<M: Machine>(
    launch: &Launch<M>,
    encoded: &EncodedInput,
    part: TokenPart,
    stride: u64,
    targets: u32,
    to: impl Fn(u32) -> OutputRow,
) {
    let machine = launch.machine;
    let row = |target| Row::Tensor(Tensor::Output, to(target).row);
    copy(launch, encoded, part, targets, row, |first, end, words| {
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
}

/// Copies the codes of a part of a token, and calls `put` for its scales: with the number of the first word,
/// the end of the words, and a word for each lane from the first on.
#[inline(always)]
fn copy<M: Machine>(
    launch: &Launch<M>,
    encoded: &EncodedInput,
    part: TokenPart,
    targets: impl Bits,
    to: impl Fn(u32) -> Row,
    put: impl Fn(u32, u32, M::Lanes<u32>),
) {
    let (machine, TokenPart { token, range }) = (launch.machine, part);
    let from = Row::Tensor(Tensor::Codes, token);
    // The scales first: loads that queue behind the stores of the codes take many times as long.
    put_scales(launch, encoded, token, range, put);
    machine.copy_arrived(range, from, targets, to);
}

/// Calls `put` for the scales of a byte range of a token's codes, as rows carry them, and reports words that
/// no row carries.
#[inline(always)]
fn put_scales<M: Machine>(
    launch: &Launch<M>,
    encoded: &EncodedInput,
    token: u32,
    range: ByteRange,
    put: impl Fn(u32, u32, M::Lanes<u32>),
) {
    let machine = launch.machine;
    let (mut first, end) = words_of(launch.common, range);
    while first < end {
        // The last lanes read the last word again rather than branch.
        let word = |lane: u32| (first + lane).min(end - 1);
        let given = machine.lanes(|lane| {
            let index = encoded.word_index(token, word(lane));
            encoded.word_of(machine.read(Table::InputScales, index), word(lane))
        });
        let is_lost = machine.lanes(|lane| machine.own(given, lane) == LOST_SCALES);
        launch.record_input(FaultKind::LostScales, machine.ballot(is_lost), |lane| {
            Fault {
                peer: launch.common.rank(),
                region: Region::InputScales,
                index: token as u64,
                wanted: word(lane) as u64,
                saw: LOST_SCALES as u64,
                ..launch.fault()
            }
        });
        let words = machine.lanes(|lane| match machine.own(given, lane) {
            LOST_SCALES => SENTINEL,
            word => word,
        });
        put(first, end, words);
        first += LANES;
    }
}
