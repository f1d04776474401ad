//! A round that has its rank lends it to be read only: nobody else calls it meanwhile.

use ferry::*;

fn behind(dispatched: &DispatchedOwned, input: &DispatchInput, output: &DispatchOutput) {
    let _ = dispatched.expert_parallel().dispatch(Stream::DEFAULT, input, output);
}

fn main() {}
