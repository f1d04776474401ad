//! Tokens that the user has encoded: instead of being encoded, they are copied to where encoded ones go. Rows
//! look the same, so receivers know nothing of it.
//!
//! Words that mean something on the way change: see [`TokenFormat::all_ones`] and [`LOST_SCALES`].

use ferry_layout::{
    DispatchOptions, EncodedInput, Fault, FaultKind, LOST_SCALES, Rank, Region, SENTINEL, Table,
    TokenFormat, avoid_sentinel,
};

use crate::dispatch::route::Route;
use crate::dispatch::scales::words_of;
use crate::machine::rows::{OutputRow, TokenPart};
use crate::machine::{LANES, Machine};
use crate::sync::launch::Launch;
use crate::work::item::RowLocation;
use crate::work::ranks::{for_each_bit, p2p_ranks};

/// Whether the input is encoded. Never in BF16, for which kernels have no code for it.
#[inline(always)]
pub fn is_encoded(format: TokenFormat, options: &DispatchOptions) -> bool {
    options.encoded.is_on() && !matches!(format, TokenFormat::Bf16)
}

/// Writes the scales of a part of an encoded token to every rank that holds one of its experts. The codes are
/// copied like BF16.
#[inline(always)]
pub fn send_scales<M: Machine>(
    launch: &Launch<M>,
    encoded: &EncodedInput,
    route: Route<M::Lanes<u32>>,
    location: RowLocation,
) {
    let (machine, common) = (launch.machine, launch.common);
    let Route { token, ranks, .. } = route;
    let p2p = p2p_ranks(machine, common, ranks);
    let part = TokenPart {
        token,
        range: location.range,
    };
    put_scales(launch, encoded, part, |first, end, words| {
        let write = |rank, row| {
            let scales = common.row.scales(row);
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
        for_each_bit(p2p, |rank| write(Rank(rank), location.row));
        if ranks != p2p {
            write(common.rank(), common.window.dispatch_staging(token));
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
    put_scales(launch, encoded, part, |first, end, words| {
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

/// Calls `put` for the scales of a part of a token, as rows carry them: with the number of the first word, the
/// end of the words, and a word for each lane from the first on. Reports words that no row carries.
#[inline(always)]
fn put_scales<M: Machine>(
    launch: &Launch<M>,
    encoded: &EncodedInput,
    TokenPart { token, range }: TokenPart,
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
