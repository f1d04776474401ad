//! Operations that each machine has its own way to.

/// What is an instruction or three on a GPU, and a function elsewhere.
pub trait Arithmetic: Copy {
    /// `a * b + c`, rounded once, to nearest even.
    fn multiply_add(self, a: f32, b: f32, c: f32) -> f32;

    /// `1 / d` for a positive `d`, rounded once, to nearest even; 0 where `d` is above 2^126.
    fn reciprocal(self, d: f32) -> f32;
}
