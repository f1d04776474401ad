//! Operations that each machine has its own way to.

/// What is an instruction or three on a GPU, and a function elsewhere.
pub trait Arithmetic: Copy {
    /// `a * b + c`, rounded once, to nearest even.
    fn multiply_add(self, a: f32, b: f32, c: f32) -> f32;

    /// `1 / d` for a positive normal `d`, rounded once, to nearest even; 0 where `d` is above 2^126.
    /// No finite number for 0 and for NaN.
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

    /// [`multiply_add`](Self::multiply_add), then brought between 0 and 1; a NaN gives 0.
    #[inline(always)]
    fn saturated_multiply_add(self, a: f32, b: f32, c: f32) -> f32 {
        saturated(self.multiply_add(a, b, c))
    }
}

/// What is nearest to `value` from 0 to 1; 0 for NaN. On a GPU it costs nothing after a sum
/// or a product (PTX ISA, "sub", "fma": `.sat`).
#[inline(always)]
#[expect(clippy::manual_clamp, reason = "`clamp` hands a NaN on")]
fn saturated(value: f32) -> f32 {
    value.max(0.0).min(1.0)
}
