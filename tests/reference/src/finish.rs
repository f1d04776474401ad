//! Results of a combine with options, bit for bit.

use half::bf16;

use crate::combine::{self, CombineMode, round_to_bf16};
use crate::fp8::power_of_two;
use crate::problem::Problem;
use crate::threads;

/// Element type of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// BF16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

/// Rows of the shared expert for some tokens of a rank.
#[derive(Clone, Debug)]
pub struct SharedRows {
    /// The first of the tokens.
    pub start: usize,
    /// `[count, hidden]`.
    pub rows: Vec<bf16>,
    /// Whether the sums are rounded to bf16 before these are added, as in exact mode.
    pub after_rounding: bool,
}

/// Steps applied to the sums of a rank's tokens, in the order of the fields. Each step is rounded to f32.
#[derive(Clone, Debug)]
pub struct Finish {
    /// Rows of the shared expert, which are added.
    pub shared: Option<SharedRows>,
    /// `[tokens]`: factors of the tokens.
    pub row_scales: Option<Vec<f32>>,
    /// `[hidden]` each: added one after the other.
    pub biases: [Option<Vec<bf16>>; 2],
    /// `[tokens, hidden]`: added.
    pub residual: Option<Vec<bf16>>,
    /// Type that the result is rounded to, once.
    pub element: Element,
}

impl Finish {
    /// No step but rounding to bf16.
    pub const NONE: Self = Self {
        shared: None,
        row_scales: None,
        biases: [None, None],
        residual: None,
        element: Element::Bf16,
    };

    /// Applies the steps to a rank's sums, `[tokens, hidden]`, and rounds them. Returns the bytes of the
    /// result in the byte order of this machine.
    pub(crate) fn bytes(&self, hidden: usize, sums: Vec<f32>) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (index, sum) in sums.into_iter().enumerate() {
            let value = self.value(hidden, index, sum);
            match self.element {
                Element::Bf16 => bytes.extend(round_to_bf16(value).to_bits().to_ne_bytes()),
                Element::F16 => bytes.extend(f16_bits(value).to_ne_bytes()),
                Element::F32 if value.is_nan() => bytes.extend(0x7fff_ffff_u32.to_ne_bytes()),
                Element::F32 => bytes.extend(value.to_ne_bytes()),
            }
        }
        bytes
    }

    /// Applies the steps to `sum`, element `index` of the sums.
    fn value(&self, hidden: usize, index: usize, sum: f32) -> f32 {
        let (token, column) = (index / hidden, index % hidden);
        let mut value = sum;
        if let Some(shared) = &self.shared
            && let Some(row) = token.checked_sub(shared.start)
            && let Some(row) = shared.rows.get(row * hidden + column)
        {
            if shared.after_rounding {
                value = round_to_bf16(value).to_f32();
            }
            value += row.to_f32();
        }
        if let Some(scales) = &self.row_scales {
            value *= scales[token];
        }
        for bias in self.biases.iter().flatten() {
            value += bias[column].to_f32();
        }
        if let Some(residual) = &self.residual {
            value += residual[index].to_f32();
        }
        value
    }
}

/// Combines like [`combine`](crate::combine()), with options. Returns the bytes of the result of every
/// source rank, in the byte order of this machine. In reduced mode `row_weights` are weights of each
/// rank's rows, instead of the router's.
///
/// # Panics
///
/// In the cases of [`combine`](crate::combine()), and if the mode is [`CombineMode::Unreduced`] or
/// `finish` does not have one entry for each rank.
pub fn combine_with(
    problem: &Problem,
    expert_rows: &[Vec<bf16>],
    row_weights: Option<&[Vec<f32>]>,
    mode: CombineMode,
    finish: &[Finish],
) -> Vec<Vec<u8>> {
    assert_eq!(finish.len(), problem.ranks, "finish: one per rank");
    let sums = combine::sums(problem, expert_rows, row_weights, mode);
    let finish_one = |(sums, finish): (Vec<f32>, &Finish)| finish.bytes(problem.hidden, sums);
    threads::each(sums.into_iter().zip(finish), problem.elements(), finish_one)
}

/// Rounds to the nearest half-precision number, ties to even: counts units in the last place, exactly in
/// f64.
fn f16_bits(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = f64::from(value.abs());
    // From 65,520 on the nearest number would be 65,536.
    if magnitude >= 65_520.0 {
        return sign | 0x7c00;
    }
    // Subnormals, below 2^-14, have the unit of the smallest normal numbers.
    let mut exponent = -14;
    while magnitude >= power_of_two(exponent + 1) {
        exponent += 1;
    }
    let units = (magnitude / power_of_two(exponent - 10)).round_ties_even() as u16;
    // The bit above the fraction counts as one exponent; a sum of 2,048 units carries into it.
    sign | (((exponent + 14) as u16) << 10).wrapping_add(units)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_precision() {
        let cases: [(f32, u16); 14] = [
            (1.0, 0x3c00),
            (-2.0, 0xc000),
            (0.0, 0),
            (-0.0, 0x8000),
            (65_504.0, 0x7bff),
            (65_519.9, 0x7bff),
            (65_520.0, 0x7c00),
            (f32::NEG_INFINITY, 0xfc00),
            (f32::NAN, 0x7fff),
            (1.0 + 1.0 / 2048.0, 0x3c00), // tie, to even
            (1.0 + 3.0 / 2048.0, 0x3c02), // tie, to even
            (2047.5 / 1024.0, 0x4000),    // carries into the exponent
            (f32::powi(2.0, -24), 1),
            (f32::powi(2.0, -25), 0),
        ];
        for (value, bits) in cases {
            assert_eq!(f16_bits(value), bits, "{value:e}");
        }
        for bits in (0..=0xffff).filter(|bits| bits & 0x7c00 != 0x7c00) {
            assert_eq!(f16_bits(half::f16::from_bits(bits).to_f32()), bits);
        }
    }

    #[test]
    fn steps_go_in_order_and_round_each() {
        let finish = Finish {
            shared: Some(SharedRows {
                start: 1,
                rows: vec![bf16::from_f32(0.5)],
                after_rounding: false,
            }),
            row_scales: Some(vec![3.0, 2.0]),
            biases: [
                Some(vec![bf16::from_f32(16_777_216.0)]),
                Some(vec![bf16::from_f32(-16_777_216.0)]),
            ],
            residual: Some(vec![bf16::ZERO, bf16::from_f32(0.25)]),
            element: Element::F32,
        };
        // 2^24 + 3 is a tie and becomes 2^24 + 4; minus 2^24 is 4.
        assert_eq!(finish.value(1, 0, 1.0), 4.0);
        // (1 + 0.5) * 2 likewise, and the residual.
        assert_eq!(finish.value(1, 1, 1.0), 4.25);
        let shared = |after_rounding| Finish {
            shared: finish.shared.clone().map(|rows| SharedRows {
                after_rounding,
                ..rows
            }),
            ..Finish::NONE
        };
        let [rounded, unrounded] = [true, false].map(shared);
        // 1 + 2^-9 is 1 in bf16.
        let sum = 1.0 + 1.0 / 512.0;
        assert_eq!(rounded.value(1, 1, sum), 1.5);
        assert_eq!(unrounded.value(1, 1, sum), sum + 0.5);
        assert_eq!(rounded.value(1, 0, sum), sum);
    }
}
