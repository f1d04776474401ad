//! What is dispatched must be combined, also where the round has its rank.

#![deny(unused_must_use)]

use ferry::*;

fn ignored(pending: DispatchPendingOwned, output: &DispatchOutput) -> Result<(), Error> {
    pending.wait(Stream::DEFAULT, output)?;
    Ok(())
}

fn main() {}
