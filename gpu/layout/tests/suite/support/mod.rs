//! Helpers that several tests of conversions share.
use ferry_layout::Arithmetic;

/// The standard library's arithmetic.
#[derive(Clone, Copy)]
pub struct Std;

impl Arithmetic for Std {
    fn multiply_add(self, a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    fn reciprocal(self, d: f32) -> f32 {
        if d > 2f32.powi(126) { 0.0 } else { 1.0 / d }
    }
}

/// The code below `codes` whose value is nearest to `magnitude`; of two, the even one.
pub fn nearest(magnitude: f32, codes: u8, value: impl Fn(u8) -> f32) -> u8 {
    let distance = |code: u8| (f64::from(value(code)) - f64::from(magnitude)).abs();
    let nearer = |best: u8, code: u8| {
        let (old, new) = (distance(best), distance(code));
        if new < old || new == old && code.is_multiple_of(2) {
            code
        } else {
            best
        }
    };
    (0..codes).fold(0, nearer)
}
