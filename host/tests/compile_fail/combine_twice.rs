//! A round ends once.

use ferry::*;

fn twice(dispatched: Dispatched<'_>, input: &CombineInput, output: &CombineOutput) {
    let _ = dispatched.combine(Stream::DEFAULT, input, output);
    let _ = dispatched.combine(Stream::DEFAULT, input, output);
}

fn main() {}
