//! Runs of models.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use super::Weak;

/// Models run one at a time: each maps and unmaps stacks, and threads that do so at once wait longer for each
/// other than one thread takes for all of them.
static TURN: Mutex<()> = Mutex::new(());

/// Runs every interleaving of a model, up to a few preemptions.
pub fn check(model: fn(Weak), weak: Weak) {
    // A mutant panics, as it should, and poisons the lock.
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut builder = loom::model::Builder::new();
    // loom's variable, which the quick tests set, comes first.
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(move || model(weak));
}

/// Asserts that the model fails with this message.
pub fn finds(model: fn(Weak), weak: Weak, message: &str) {
    let panic = catch_unwind(AssertUnwindSafe(|| check(model, weak)));
    let panic = panic.expect_err("the mutant was not found");
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied());
    assert_eq!(text, Some(message), "{weak:?}");
}
