//! An owned round has its rank: nobody starts another with it.

use ferry::*;

fn overlap(rank: Communicator, input: &DispatchInput, output: &DispatchOutput) {
    let first = rank.dispatch_owned(Stream::DEFAULT, input, output);
    let second = rank.dispatch_owned(Stream::DEFAULT, input, output);
    drop((first, second));
}

fn main() {}
