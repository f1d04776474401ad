//! Waits for words that a lane reads again until they have arrived.
//!
//! Unlike those of `launch`, they record no fault: the caller does, which knows the row. The contents of a
//! record would occupy registers here.

use crate::machine::Machine;
use crate::machine::miss::TimedOut;

/// Reads `values` of one row again until no lane holds the sentinel.
#[inline(always)]
pub fn wait_for<M: Machine, T: Copy>(
    machine: &M,
    values: &mut M::Lanes<T>,
    read: impl Fn() -> M::Lanes<T>,
    is_sentinel: impl Fn(T) -> bool,
) -> Result<(), TimedOut> {
    loop {
        let absent = machine.lanes(|lane| is_sentinel(machine.own(*values, lane)));
        if machine.ballot(absent) == 0 {
            return Ok(());
        }
        if machine.timed_out() {
            return Err(TimedOut { row: 0 });
        }
        *values = read();
    }
}
