//! Waits for words that a lane reads again until they are there.

use crate::machine::Machine;

/// `values`, or what `read` gives later, once none of them is absent. `None` where this launch should
/// give up.
#[inline(always)]
pub fn wait_for<M: Machine, T: Copy>(
    machine: &M,
    mut values: M::Lanes<T>,
    read: impl Fn() -> M::Lanes<T>,
    is_sentinel: impl Fn(T) -> bool,
) -> Option<M::Lanes<T>> {
    loop {
        let absent = machine.lanes(|lane| is_sentinel(machine.own(values, lane)));
        if machine.ballot(absent) == 0 {
            return Some(values);
        }
        if machine.timed_out() {
            return None;
        }
        values = read();
    }
}
