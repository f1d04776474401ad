//! Operations that each machine implements in its own way.

/// Operations of one to three instructions on a GPU, and functions elsewhere.
pub trait Arithmetic: Copy {
    /// `a * b + c`, rounded once, to nearest even.
    fn multiply_add(self, a: f32, b: f32, c: f32) -> f32;

    /// `1 / d` for a positive normal `d`, rounded once, to nearest even; 0 if `d` is above 2^126. Not a
    /// finite number for 0 or NaN.
    fn reciprocal(self, d: f32) -> f32;

    /// The lesser of `value` and `limit`, which is neither 0 nor NaN; a NaN passes through.
    #[inline(always)]
    fn at_most(self, value: f32, limit: f32) -> f32 {
        // False for NaN.
        if value > limit { limit } else { value }
    }

    /// The greater of `value` and `limit`, which is neither 0 nor NaN; a NaN passes through.
    #[inline(always)]
    fn at_least(self, value: f32, limit: f32) -> f32 {
        if value < limit { limit } else { value }
    }

    /// [`multiply_add`](Self::multiply_add), then clamped to 0..=1; 0 for a NaN.
    #[inline(always)]
    fn saturated_multiply_add(self, a: f32, b: f32, c: f32) -> f32 {
        saturated(self.multiply_add(a, b, c))
    }
}

/// The number from 0 to 1 that is nearest to `value`; 0 for NaN. On a GPU it costs nothing after a sum or a
/// product (PTX ISA, "sub", "fma": `.sat`).
#[inline(always)]
#[expect(clippy::manual_clamp, reason = "`clamp` hands a NaN on")]
fn saturated(value: f32) -> f32 {
    value.max(0.0).min(1.0)
}
