//! Processes that share a GPU.

use std::process::Command;

use super::*;

/// Set for the program that a test starts: whether the processes of its group are clients of MPS.
const UNDER_MPS: &str = "FERRY_TEST_UNDER_MPS";

/// What each rank of `node` finds where ranks 1 and 2 are on the GPU of rank 1, if they say so.
fn each_of_three(node: &Node, says: [bool; 3]) -> Vec<Result<Option<u32>, Error>> {
    let is_under_mps = std::env::var(UNDER_MPS).is_ok_and(|value| value == "yes");
    node.each(|process| {
        let mut place = process.place();
        place.gpu.uuid = [process.rank.min(1) as u8; 16];
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

#[test]
fn ranks_that_share_a_gpu_take_their_part_and_one_that_is_alone_all() {
    let node = Node::new(3);
    let found = each_of_three(&node, [false, true, true]).into_iter();
    let found: Vec<_> = found.map(Result::unwrap).collect();
    assert_eq!(found, [None, Some(66), Some(66)]);
    assert!(node.ledger().is_clean(), "{:?}", node.ledger());
}

#[test]
fn a_rank_that_does_not_share_is_named_to_all() {
    for says in [[true, false, true], [true, true, false]] {
        let node = Node::new(3);
        for outcome in each_of_three(&node, says) {
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

#[test]
fn processes_that_take_turns_are_told_once_and_clients_of_mps_are_not() {
    let name = "ranks_that_share_a_gpu_take_their_part_and_one_that_is_alone_all";
    let name = format!("node::tests::sharing::{name}");
    for (is_under_mps, told) in [("yes", 0), ("no", 1)] {
        let mut program = Command::new(std::env::current_exe().unwrap());
        program.args(["--exact", &name, "--nocapture"]);
        let output = program.env(UNDER_MPS, is_under_mps).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        let lines = text.lines().filter(|line| line.contains("without MPS"));
        assert_eq!(lines.count(), told, "{is_under_mps}: {text}");
    }
}
