//! What is dispatched must be combined.

#![deny(unused_must_use)]

use ferry::*;

fn ignored(pending: DispatchPending<'_>, output: &DispatchOutput) -> Result<(), Error> {
    pending.wait(Stream::DEFAULT, output)?;
    Ok(())
}

fn main() {}
