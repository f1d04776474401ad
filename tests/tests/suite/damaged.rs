//! Simulated ranks with windows that a peer has damaged: they touch only their own memory, and end.
//!
//! 100,000 windows take minutes: `cargo run --release -p ferry-tests -- damaged`.

use ferry_tests::damaged::sweep::{DamagedArgs, run};

#[test]
fn damaged_windows_harm_nobody_else() {
    let args = DamagedArgs {
        windows: 2_000,
        seed: 20_000,
    };
    run(&args).unwrap();
}
