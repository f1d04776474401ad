//! Simulated ranks whose windows a peer has damaged touch nothing that is not theirs, and end.
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
