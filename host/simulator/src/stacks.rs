//! Stacks of fibres, which all machines share: a fresh one costs system calls and page faults.

use std::sync::{Mutex, PoisonError};

use corosensei::stack::DefaultStack;

/// Bytes of a stack, of which only those in use take memory. Unoptimised code, as in a user's debug build,
/// needs more than 256 KiB.
const BYTES: usize = 1 << 20;
/// Most stacks that are kept for later launches.
const MOST_SPARE: usize = 512;

static SPARE: Mutex<Vec<DefaultStack>> = Mutex::new(Vec::new());

/// Takes a stack that is kept, or makes one.
pub fn take() -> DefaultStack {
    let spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner).pop();
    spare
        .or_else(|| DefaultStack::new(BYTES).ok())
        .expect("memory for a fibre's stack")
}

/// Keeps a stack that no fibre uses any more, if there is room.
pub fn give_back(stack: DefaultStack) {
    let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
    if spare.len() < MOST_SPARE {
        spare.push(stack);
    }
}
