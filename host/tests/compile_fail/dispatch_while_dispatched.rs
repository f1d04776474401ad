//! A round starts after the one before has ended.

use ferry::*;

fn overlap(rank: &mut Communicator, input: &DispatchInput, output: &DispatchOutput) {
    let first = rank.dispatch(Stream::DEFAULT, input, output);
    let second = rank.dispatch(Stream::DEFAULT, input, output);
    drop((first, second));
}

fn main() {}
