//! Ranks that come late, give up or end, after a message that was sent before.

use super::*;

const ALL: &str = "all_gather";

/// A limit that no test reaches.
fn long() -> Limit {
    Limit::of(LONG)
}

/// Three ranks that have met: 0, 1 and 2.
fn three() -> [TcpBootstrap; 3] {
    met(3, LONG).try_into().unwrap()
}

/// Sends the first message of a call of a rank other than 0.
fn send_call(rank: &mut TcpBootstrap) {
    rank.peers[0].send(1, &[], ALL, long()).unwrap();
}

/// Receives the bytes of all ranks, as a call does.
fn receive_all(rank: &mut TcpBootstrap) {
    for _ in 0..rank.ranks {
        rank.peers[0].receive(1, ALL, long()).unwrap();
    }
}

/// The next message of a rank.
fn hear(mut rank: TcpBootstrap) -> Result<Vec<u8>, BootstrapError> {
    rank.peers[0].receive(1, ALL, long())
}

#[test]
fn rank_zero_does_not_pass_when_all_others_have_given_up() {
    let [mut zero, mut one, mut two] = three();
    (one.timeout, two.timeout) = (SHORT, SHORT);
    let called = call_all(vec![one, two]);
    assert!(called.iter().all(|(_, called)| called.is_err()));
    let late = zero.barrier().unwrap_err();
    // They are all there, and rank 0 was only late.
    assert_eq!(late.lost_rank(), None, "{late}");
}

#[test]
fn a_rank_that_ended_behind_its_call_is_found() {
    let [mut zero, mut one, mut two] = three();
    send_call(&mut one);
    send_call(&mut two);
    drop(two);
    assert_eq!(zero.barrier().unwrap_err().lost_rank(), Some(2));
    // Rank 1 has not been answered before.
    assert_eq!(hear(one).unwrap_err().lost_rank(), Some(2));
}

#[test]
fn a_rank_that_ended_after_it_had_all_bytes_is_found_by_all() {
    let [mut zero, mut one, mut two] = three();
    let zero = thread::spawn(move || zero.barrier());
    send_call(&mut one);
    send_call(&mut two);
    receive_all(&mut one);
    receive_all(&mut two);
    send_call(&mut one);
    drop(one);
    send_call(&mut two);
    assert_eq!(hear(two).unwrap_err().lost_rank(), Some(1));
    assert_eq!(zero.join().unwrap().unwrap_err().lost_rank(), Some(1));
}

#[test]
fn no_rank_goes_on_before_all_have_all_bytes() {
    let [mut zero, one, mut two] = three();
    zero.timeout = SHORT;
    send_call(&mut two);
    let mut called = call_all(vec![zero, one]);
    receive_all(&mut two);
    for (rank, called) in &mut called {
        let error = called.as_ref().unwrap_err();
        assert_eq!(error.lost_rank(), Some(2), "rank {}: {error}", rank.rank);
    }
}

#[test]
fn a_rank_that_gave_up_names_nobody_that_may_be_there() {
    let [zero, mut one, two] = three();
    one.timeout = SHORT;
    // Rank 2 does not call, and rank 0 only once rank 1 has given up.
    for late in [one, zero, two] {
        let (mut rank, called) = call_all(vec![late]).remove(0);
        let error = called.unwrap_err();
        assert_eq!(error.lost_rank(), None, "rank {}: {error}", rank.rank);
        let error = rank.barrier().unwrap_err();
        assert_eq!(error.lost_rank(), None, "rank {}: {error}", rank.rank);
        assert!(error.to_string().contains("did not answer"), "{error}");
        // It stays connected: the next rank gets a message, not a broken connection.
        std::mem::forget(rank);
    }
}

#[test]
fn a_lost_rank_outside_the_group_is_not_believed() {
    for lost in [3, 4_000_000_000] {
        let [mut zero, mut one, _two] = three();
        one.peers[0].tell_lost(lost, "a test", long());
        let error = zero.barrier().unwrap_err();
        assert!(
            matches!(error, BootstrapError::Unexpected { peer: 1, got, .. } if got == u64::from(lost)),
            "{error}"
        );
    }
}

#[test]
fn a_stranger_of_another_group_is_told_and_the_others_go_on() {
    let address = free_address();
    let host = thread::spawn(move || TcpBootstrap::connect(0, 2, address, LONG));
    let stranger = TcpBootstrap::connect(1, 3, address, LONG);
    assert!(
        matches!(
            stranger,
            Err(BootstrapError::WorldSize {
                ours: 3,
                theirs: 2,
                ..
            })
        ),
        "{stranger:?}"
    );
    let one = thread::spawn(move || TcpBootstrap::connect(1, 2, address, LONG));
    assert!(host.join().unwrap().is_ok());
    assert!(one.join().unwrap().is_ok());
}
