//! Processes that share a GPU.

use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};

use super::*;

/// Outcome on each rank if ranks 1 and 2 share the GPU of rank 1: `says` is whether each allows it, as
/// clients of MPS or in turns.
fn each_of_three(
    node: &Node,
    says: [bool; 3],
    is_under_mps: bool,
) -> Vec<Result<Option<u32>, Error>> {
    // GPUs of no other test, whose communicators would count there, as processes are threads here.
    static FIRST: AtomicU8 = AtomicU8::new(100);
    let first = FIRST.fetch_add(2, Ordering::Relaxed);
    node.each(|process| {
        let mut place = process.place();
        place.gpu.uuid = [first + process.rank.min(1) as u8; 16];
        place.terms.shares = says[process.rank as usize];
        place.terms.runs_beside_others = is_under_mps;
        let group = process.join_at(place)?;
        let mut rank = begin(&group)?;
        round(&mut rank)?;
        let (own, planned) = (rank.max_sms(), rank.plan().max_sms());
        assert_eq!(own, planned);
        rank.close()?;
        group.close()?;
        Ok(own)
    })
}

/// Runs a round, in which the ranks that share a GPU take their parts of it, and the other rank a whole one.
fn pass_a_round(is_under_mps: bool) {
    let node = Node::new(3);
    let found = each_of_three(&node, [false, true, true], is_under_mps).into_iter();
    let found: Vec<_> = found.map(Result::unwrap).collect();
    assert_eq!(found, [None, Some(66), Some(66)]);
    assert!(node.ledger().is_clean(), "{:?}", node.ledger());
}

#[test]
fn processes_that_take_turns_on_a_gpu_pass_a_round() {
    pass_a_round(false);
}

#[test]
fn clients_of_mps_pass_a_round_on_a_gpu() {
    pass_a_round(true);
}

#[test]
fn processes_that_take_turns_are_told_once_and_clients_of_mps_are_not() {
    for (test, told) in [
        ("processes_that_take_turns_on_a_gpu_pass_a_round", 1),
        ("clients_of_mps_pass_a_round_on_a_gpu", 0),
    ] {
        let name = format!("group::node::tests::sharing::{test}");
        let mut program = Command::new(std::env::current_exe().unwrap());
        program.args(["--exact", &name, "--nocapture"]);
        let output = program.output().unwrap();
        let ran = String::from_utf8_lossy(&output.stdout).contains("1 passed");
        assert!(output.status.success() && ran, "{output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        let lines = text.lines().filter(|line| line.contains("without MPS"));
        assert_eq!(lines.count(), told, "{test}: {text}");
    }
}

#[test]
fn a_rank_that_does_not_share_is_named_to_all() {
    for says in [[true, false, true], [true, true, false]] {
        let node = Node::new(3);
        for outcome in each_of_three(&node, says, false) {
            let is_refused = matches!(
                outcome,
                Err(Error::GpuShared {
                    first: Rank(1),
                    second: Rank(2),
                    ..
                })
            );
            assert!(is_refused, "{outcome:?}");
        }
        assert!(node.ledger().is_clean());
    }
}
