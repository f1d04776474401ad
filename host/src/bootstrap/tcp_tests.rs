//! Ranks that meet, and ranks that do not.

use std::thread;
use std::time::Instant;

use super::*;

const SHORT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(20);

/// An address that nobody listens on at the moment.
fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .unwrap()
}

type Joined = Result<TcpBootstrap, BootstrapError>;

/// Connects ranks as `(rank, ranks)`, each on a thread of its own.
fn meet(who: &[(u32, u32)], timeout: Duration) -> Vec<Joined> {
    let address = free_address();
    let threads: Vec<_> = who
        .iter()
        .map(|&(rank, ranks)| {
            thread::spawn(move || TcpBootstrap::connect(rank, ranks, address, timeout))
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

#[test]
fn everybody_hears_everybody() {
    for ranks in [1, 2, 5] {
        let who: Vec<_> = (0..ranks).rev().map(|rank| (rank, ranks)).collect();
        let threads: Vec<_> = meet(&who, LONG)
            .into_iter()
            .map(|joined| {
                thread::spawn(move || {
                    let mut me = joined.unwrap();
                    assert_eq!(me.ranks(), ranks);
                    for round in 0..3 {
                        // Lengths differ, and some are none.
                        let mine = vec![round; me.rank() as usize * 1000];
                        let all = me.all_gather(&mine).unwrap();
                        let lengths: Vec<_> = all.iter().map(Vec::len).collect();
                        let wanted: Vec<_> = (0..ranks as usize).map(|r| r * 1000).collect();
                        assert_eq!(lengths, wanted);
                        assert!(all.iter().flatten().all(|&byte| byte == round));
                        me.barrier().unwrap();
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
    }
}

#[test]
fn a_missing_rank_is_named_in_time() {
    let start = Instant::now();
    let joined = meet(&[(0, 4), (2, 4)], SHORT);
    assert!(start.elapsed() < SHORT + HELLO_TIMEOUT);
    let Err(BootstrapError::MissingRanks {
        missing, ranks: 4, ..
    }) = &joined[0]
    else {
        panic!("{:?}", joined[0]);
    };
    assert_eq!(missing, &[1, 3]);
    // Rank 2 may give up first.
    assert!(
        matches!(
            joined[1],
            Err(BootstrapError::GivenUp { .. } | BootstrapError::Timeout { peer: 0, .. })
        ),
        "{:?}",
        joined[1]
    );
}

#[test]
fn a_missing_rank_zero_is_named_in_time() {
    let start = Instant::now();
    let joined = meet(&[(1, 2)], SHORT);
    assert!(start.elapsed() < 10 * SHORT);
    assert!(matches!(
        joined[0],
        Err(BootstrapError::Timeout { peer: 0, .. })
    ));
}

#[test]
fn ranks_that_expect_different_sizes_name_both() {
    let joined = meet(&[(0, 2), (1, 3)], LONG);
    let sizes = |joined: &Joined| match joined {
        Err(BootstrapError::WorldSize {
            rank,
            ours,
            peer,
            theirs,
            ..
        }) => (*rank, *ours, *peer, *theirs),
        other => panic!("{other:?}"),
    };
    assert_eq!(sizes(&joined[0]), (0, 2, 1, 3));
    assert_eq!(sizes(&joined[1]), (1, 3, 0, 2));
}

#[test]
fn a_rank_that_stands_there_twice_is_refused_and_the_others_go_on() {
    let address = free_address();
    let join = |rank| thread::spawn(move || TcpBootstrap::connect(rank, 3, address, LONG));
    let host = join(0);
    let ones = [join(1), join(1)];
    // One of the two is refused at once; rank 2 comes only then.
    while !ones.iter().any(|one| one.is_finished()) {
        thread::sleep(PAUSE);
    }
    let two = join(2);
    let joined: Vec<_> = ones.into_iter().map(|one| one.join().unwrap()).collect();
    assert_eq!(joined.iter().filter(|one| one.is_ok()).count(), 1);
    assert!(
        joined
            .iter()
            .any(|one| matches!(one, Err(BootstrapError::DuplicateRank { rank: 1, .. })))
    );
    assert!(host.join().unwrap().is_ok() && two.join().unwrap().is_ok());
}

#[test]
fn a_rank_outside_the_group_does_not_even_connect() {
    let joined = TcpBootstrap::connect(2, 2, free_address(), LONG);
    assert!(matches!(
        joined,
        Err(BootstrapError::RankOutOfRange {
            rank: 2,
            ranks: 2,
            ..
        })
    ));
}

#[test]
fn strangers_do_not_disturb() {
    use std::io::Write;
    let address = free_address();
    let host = thread::spawn(move || TcpBootstrap::connect(0, 2, address, LONG));
    let mut stranger = loop {
        match TcpStream::connect(address) {
            Ok(stream) => break stream,
            Err(_) => thread::sleep(PAUSE),
        }
    };
    stranger
        .write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .unwrap();
    assert!(TcpBootstrap::connect(1, 2, address, LONG).is_ok());
    assert!(host.join().unwrap().is_ok());
}

#[test]
fn a_rank_that_leaves_or_stays_silent_is_named() {
    let mut joined = meet(&[(0, 2), (1, 2)], SHORT);
    let (one, zero) = (
        joined.pop().unwrap().unwrap(),
        joined.pop().unwrap().unwrap(),
    );
    let mut zero = zero;
    let start = Instant::now();
    assert!(matches!(
        zero.barrier(),
        Err(BootstrapError::Timeout { peer: 1, .. })
    ));
    assert!(start.elapsed() < 10 * SHORT);
    drop(one);
    assert!(matches!(
        zero.barrier(),
        Err(BootstrapError::Io { peer: 1, .. })
    ));
}

#[test]
fn ranks_that_make_different_numbers_of_calls_are_told() {
    let mut joined = meet(&[(0, 2), (1, 2)], SHORT);
    let (mut one, mut zero) = (
        joined.pop().unwrap().unwrap(),
        joined.pop().unwrap().unwrap(),
    );
    one.calls = 7;
    let one = thread::spawn(move || one.barrier());
    let unexpected = zero.barrier();
    assert!(
        matches!(
            unexpected,
            Err(BootstrapError::Unexpected {
                peer: 1,
                wanted: 1,
                got: 8,
                ..
            })
        ),
        "{unexpected:?}"
    );
    drop(zero);
    assert!(one.join().unwrap().is_err());
}
