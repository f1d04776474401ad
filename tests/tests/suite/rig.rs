//! The rig sees errors of the group that it drives.

use ferry_rig::{Case, Options, Run, caught};

/// Same as in a process that drives one rank of many.
#[test]
fn one_rank_of_a_group_is_compared() {
    let case = Case {
        options: true,
        finish: Some(Options::any(3)),
        ..Case::small(3)
    };
    let mut run = Run::of(&case);
    run.ranks.remove(0).close().unwrap();
    run.tensors[0].remove(0);
    run.outcomes.remove(0);
    run.expect_success();
}

#[test]
fn a_wrong_byte_of_a_result_and_one_after_it_are_found() {
    for (is_after, wanted) in [(false, "instead of"), (true, "behind the tokens")] {
        let run = Run::of(&Case::small(5));
        let bytes = run.expected[0].wanted[0].len() as u64;
        let at = run.tensors[0][0].combined.rows().at;
        let at = at.plus(if is_after { bytes } else { 0 });
        let (device, mut byte) = (run.ranks[0].device().clone(), [0]);
        device.download(at, &mut byte).unwrap();
        device.upload(at, &[byte[0] ^ 1]).unwrap();
        let told = caught(|| run.expect_success()).unwrap_err();
        assert!(told.contains(wanted), "{told}");
    }
}
