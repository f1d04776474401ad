//! Reports of a leaked communicator, with a subscriber and without.

use std::process::Command;
use std::sync::Arc;

use crate::noted::*;
use ferry::{CombineBuffers, DispatchBuffers, Stream};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Set for the program that the tests start: whether it has a subscriber.
const LEAKS: &str = "FERRY_TEST_LEAKS";

/// Accepts every event silently.
struct Silent;

impl Subscriber for Silent {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Not a test of its own: a program that drops communicators which are at work. Without its variable it
/// does nothing.
#[test]
fn leaking() {
    let leak_three = || {
        for _ in 0..3 {
            let mut rank = start(&Arc::default(), 1, config()).unwrap();
            round(&mut rank, Stream::DEFAULT).unwrap();
        }
    };
    match std::env::var(LEAKS).as_deref() {
        Ok("subscriber") => tracing::subscriber::with_default(Silent, leak_three),
        Ok(_) => leak_three(),
        Err(_) => {}
    }
}

/// Not a test of its own, either: a loop around buffers of each step, which it drops or frees.
#[test]
fn leaking_buffers() {
    let Ok(how) = std::env::var(LEAKS) else {
        return;
    };
    let communicator = start(&Arc::default(), 1, config()).unwrap();
    for _ in 0..3 {
        let (device, plan) = (communicator.device(), communicator.plan());
        let rows = DispatchBuffers::new(device, plan).unwrap();
        let sums = CombineBuffers::new(device, plan).unwrap();
        if how == "freed" {
            // SAFETY: nothing was launched.
            unsafe { rows.free().and(sums.free()) }.unwrap();
        }
    }
}

/// Lines of such a program on stderr about Ferry.
fn stderr_of(leaks: &str) -> Vec<String> {
    stderr_of_test("leaks::leaking", leaks)
}

fn stderr_of_test(test: &str, leaks: &str) -> Vec<String> {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(LEAKS, leaks)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stderr).unwrap();
    let lines = text.lines().filter(|line| line.contains("ferry:"));
    lines.map(str::to_owned).collect()
}

#[test]
fn a_leak_is_told_once_on_stderr_where_nobody_listens() {
    let lines = stderr_of("nobody");
    assert_eq!(lines.len(), 1, "{lines:?}");
    for part in ["rank 0", "leaked", "close it instead"] {
        assert!(lines[0].contains(part), "{lines:?}");
    }
}

#[test]
fn a_leak_is_left_to_the_subscriber_where_there_is_one() {
    assert_eq!(stderr_of("subscriber"), [""; 0]);
}

#[test]
fn buffers_that_are_dropped_are_told_once_with_their_bytes() {
    let lines = stderr_of_test("leaks::leaking_buffers", "dropped");
    let lines: Vec<_> = lines
        .iter()
        .filter(|line| line.contains("buffers"))
        .collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    for part in [" bytes were dropped without free", "leaked", "said once"] {
        assert!(lines[0].contains(part), "{lines:?}");
    }
    let lines = stderr_of_test("leaks::leaking_buffers", "freed");
    assert!(
        !lines.iter().any(|line| line.contains("buffers")),
        "{lines:?}"
    );
}
