//! Values that are not numbers, or that mean something on their way.

use ferry_reference::{Problem, bf16};

use super::dice::Dice;

/// f32 bits: all ones, which mean "not written yet", one less, NaN, infinity, -0.
const WEIGHTS: [u32; 5] = [
    u32::MAX,
    u32::MAX - 1,
    0x7fc0_0000,
    0x7f80_0000,
    0x8000_0000,
];

/// BF16 bits of two elements that share a word.
const PAIRS: [[u16; 2]; 5] = [
    [0xffff, 0xffff],
    [0xfffe, 0xffff],
    [0x7fc0, 0x0001],
    [0x7f80, 0xff80],
    [0x8000, 0x8000],
];

/// Puts values among a token's numbers: pairs of NaNs, of infinities, of -0, and in one of four tokens
/// infinities that make all scales special, too.
pub(super) fn put_numbers(dice: &mut Dice, row: &mut [bf16]) {
    for pair in row.chunks_mut(2) {
        if dice.below(16) == 0 {
            let drawn = dice.pick(&PAIRS).into_iter();
            pair.iter_mut()
                .zip(drawn)
                .for_each(|(x, bits)| *x = bf16::from_bits(bits));
        }
    }
    if dice.below(4) == 0 {
        let groups = row.chunks_mut(16);
        groups.for_each(|group| group[0] = bf16::INFINITY);
    }
}

/// Puts any bits in one of eight places.
pub(super) fn put_bits(dice: &mut Dice, elements: &mut [bf16]) {
    for x in elements {
        if dice.below(8) == 0 {
            *x = bf16::from_bits(dice.bits() as u16);
        }
    }
}

/// Puts weights of all ones, NaN, infinity and -0 among others.
pub(super) fn put_weights(dice: &mut Dice, weights: &mut [f32]) {
    for weight in weights {
        if dice.below(8) == 0 {
            *weight = f32::from_bits(dice.pick(&WEIGHTS));
        }
    }
}

/// A problem's tokens as they arrive: BF16 sends two NaNs of all ones in a word as others. In all other
/// formats the code of a NaN has none of its bits.
pub(super) fn arrived(problem: &Problem) -> Problem {
    let mut arrived = problem.clone();
    for x in arrived.inputs.iter_mut().map(|input| &mut input.x) {
        for pair in x.chunks_mut(2) {
            if pair.iter().all(|x| x.to_bits() == 0xffff) {
                pair[0] = bf16::from_bits(0xfffe);
            }
        }
    }
    arrived
}
