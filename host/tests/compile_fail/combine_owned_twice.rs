//! An owned round ends once.

use ferry::*;

fn twice(dispatched: DispatchedOwned, input: &CombineInput, output: &CombineOutput) {
    let _ = dispatched.combine(Stream::DEFAULT, input, output);
    let _ = dispatched.combine(Stream::DEFAULT, input, output);
}

fn main() {}
