//! A round ends once.

use ferry::*;

fn twice(dispatched: Dispatched<'_>, input: &CombineInput, output: &CombineOutput) {
    let _ = dispatched.combine(Stream(0), input, output);
    let _ = dispatched.combine(Stream(0), input, output);
}

fn main() {}
