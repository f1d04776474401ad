//! Ranks that meet, and ranks that do not.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use super::super::peer::word;
use super::*;

#[path = "key_tests.rs"]
mod key;
#[path = "late_tests.rs"]
mod late;

const SHORT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(20);

/// Held by tests that open hundreds of connections: a process may have a thousand.
static MANY_CONNECTIONS: Mutex<()> = Mutex::new(());

/// An address that nobody else gets: every call has one of the machine's own for itself, so that another test
/// cannot take the port before it is listened on.
fn free_address() -> SocketAddr {
    static CALLS: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let own = Ipv4Addr::new(127, high, low, CALLS.fetch_add(1, Ordering::Relaxed));
    TcpListener::bind((own, 0))
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
    // Rank 0 goes on waiting for a rank 1 that expects two.
    let joined = meet(&[(0, 2), (1, 3)], Duration::from_secs(4));
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
fn more_ranks_than_a_group_has_do_not_even_meet() {
    for (rank, ranks) in [(0, u32::MAX), (0, 65), (7, 65)] {
        let joined = TcpBootstrap::connect(rank, ranks, free_address(), SHORT);
        assert!(
            matches!(joined, Err(BootstrapError::TooManyRanks { ranks: many }) if many == ranks),
            "{joined:?}"
        );
    }
}

#[test]
fn strangers_do_not_disturb() {
    use std::io::Write;
    let address = free_address();
    let host = thread::spawn(move || TcpBootstrap::connect(0, 2, address, LONG));
    let mut stranger = stranger(address);
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
    // Failed once, it does not even look.
    let start = Instant::now();
    assert!(matches!(
        zero.barrier(),
        Err(BootstrapError::Lost { rank: 1, .. })
    ));
    assert!(start.elapsed() < SHORT / 2);
}

/// Ranks that have met, ascending.
fn met(ranks: u32, timeout: Duration) -> Vec<TcpBootstrap> {
    let who: Vec<_> = (0..ranks).map(|rank| (rank, ranks)).collect();
    let joined = meet(&who, timeout);
    joined.into_iter().map(Result::unwrap).collect()
}

/// Lets each make a call, on a thread of its own, and returns them with their results.
fn call_all(ranks: Vec<TcpBootstrap>) -> Vec<(TcpBootstrap, Result<(), BootstrapError>)> {
    let call = |mut rank: TcpBootstrap| {
        thread::spawn(move || {
            let called = rank.barrier();
            (rank, called)
        })
    };
    let threads: Vec<_> = ranks.into_iter().map(call).collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

#[test]
fn a_lost_rank_is_told_to_all_at_once_and_every_later_call_names_it() {
    for lost in 0..4 {
        let mut ranks = met(4, LONG);
        drop(ranks.remove(lost as usize));
        let start = Instant::now();
        let mut called = call_all(ranks);
        for (rank, called) in &mut called {
            let error = called.as_ref().unwrap_err();
            assert_eq!(error.lost_rank(), Some(lost), "rank {}: {error}", rank.rank);
            let again = rank.barrier().unwrap_err();
            assert!(
                matches!(again, BootstrapError::Lost { rank, .. } if rank == lost),
                "{again}"
            );
        }
        assert!(start.elapsed() < LONG / 2);
    }
}

#[test]
fn a_lost_rank_is_found_although_another_one_has_not_called() {
    let mut ranks = met(4, LONG);
    let late = ranks.remove(2);
    drop(ranks.remove(1));
    let start = Instant::now();
    for (_, called) in call_all(ranks) {
        assert_eq!(called.unwrap_err().lost_rank(), Some(1));
    }
    let (_, called) = call_all(vec![late]).remove(0);
    assert!(matches!(called, Err(BootstrapError::Lost { rank: 1, .. })));
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn a_rank_that_does_not_call_is_named_to_those_that_did() {
    // Rank 0 gives up a second before the others would.
    let mut ranks = met(4, Duration::from_secs(8));
    let silent = ranks.remove(2);
    for (_, called) in call_all(ranks) {
        assert_eq!(called.unwrap_err().lost_rank(), Some(2));
    }
    drop(silent);
}

#[test]
fn whoever_writes_to_a_rank_that_gave_up_learns_why() {
    // More than sockets take, so that rank 2 is still writing when rank 0 gives up.
    let mut ranks = met(3, LONG);
    let mut two = ranks.pop().unwrap();
    drop(ranks.pop());
    let two = thread::spawn(move || two.all_gather(&vec![7; MAX_BYTES as usize]));
    let mut zero = ranks.pop().unwrap();
    assert_eq!(zero.barrier().unwrap_err().lost_rank(), Some(1));
    let start = Instant::now();
    let told = two.join().unwrap().unwrap_err();
    assert!(
        matches!(told, BootstrapError::Lost { rank: 1, .. }),
        "{told}"
    );
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn too_many_bytes_end_the_call_of_all_and_name_who_sent_them() {
    let mut ranks = met(3, LONG);
    let mut one = ranks.remove(1);
    let too_many = one.all_gather(&vec![0; MAX_BYTES as usize + 1]);
    assert!(matches!(too_many, Err(BootstrapError::Other { .. })));
    for (_, called) in call_all(ranks) {
        assert_eq!(called.unwrap_err().lost_rank(), Some(1));
    }
}

#[test]
fn survivors_meet_again_at_the_same_address() {
    let address = free_address();
    let join = |rank, ranks| {
        thread::spawn(move || TcpBootstrap::connect(rank, ranks, address, LONG).unwrap())
    };
    let first: Vec<_> = (0..3).map(|rank| join(rank, 3)).collect();
    let mut ranks: Vec<_> = first.into_iter().map(|t| t.join().unwrap()).collect();
    drop(ranks.remove(1));
    for (_, called) in call_all(ranks) {
        assert_eq!(called.unwrap_err().lost_rank(), Some(1));
    }
    let again: Vec<_> = (0..2).map(|rank| join(rank, 2)).collect();
    let again = again.into_iter().map(|t| t.join().unwrap()).collect();
    assert!(call_all(again).iter().all(|(_, called)| called.is_ok()));
}

/// Connects to a rendezvous without saying anything.
fn stranger(address: SocketAddr) -> TcpStream {
    let start = Instant::now();
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return stream,
            Err(error) => assert!(start.elapsed() < LONG, "{address}: {error}"),
        }
        thread::sleep(PAUSE);
    }
}

#[test]
fn silent_strangers_keep_nobody_waiting() {
    let address = free_address();
    let host = thread::spawn(move || TcpBootstrap::connect(0, 2, address, LONG));
    let silent: Vec<_> = (0..30).map(|_| stranger(address)).collect();
    let start = Instant::now();
    assert!(TcpBootstrap::connect(1, 2, address, LONG).is_ok());
    assert!(host.join().unwrap().is_ok());
    assert!(start.elapsed() < LONG / 4, "{:?}", start.elapsed());
    drop(silent);
}

#[test]
fn more_silent_strangers_than_are_let_in_do_not_keep_a_rank_out() {
    let _alone = MANY_CONNECTIONS
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let address = free_address();
    let host = thread::spawn(move || TcpBootstrap::connect(0, 2, address, LONG));
    let silent: Vec<_> = (0..MOST_NEWCOMERS + 50)
        .map(|_| stranger(address))
        .collect();
    assert!(TcpBootstrap::connect(1, 2, address, LONG).is_ok());
    assert!(host.join().unwrap().is_ok());
    drop(silent);
}

#[test]
fn a_hello_is_short() {
    use std::io::{Read, Write};
    let address = free_address();
    let host = thread::spawn(move || TcpBootstrap::connect(0, 2, address, LONG));
    let mut long = stranger(address);
    let hello = [*b"FRY3\0\0\0\0", MAX_BYTES.to_le_bytes()].concat();
    long.write_all(&hello).unwrap();
    long.set_read_timeout(Some(LONG)).unwrap();
    // Sent away for the length alone, before its bytes come.
    let start = Instant::now();
    assert!(matches!(long.read(&mut [0]), Ok(0) | Err(_)));
    assert!(start.elapsed() < HELLO_TIMEOUT / 2, "{:?}", start.elapsed());
    assert!(TcpBootstrap::connect(1, 2, address, LONG).is_ok());
    assert!(host.join().unwrap().is_ok());
}

/// Says hello as rank 1 of 3, with a nonce.
fn hello(stream: &mut TcpStream, nonce: u64) {
    use std::io::Write;
    let words = [u32::from_le_bytes(*b"FRY3"), 0, 16, 0, 1, 3];
    let words = words.map(u32::to_le_bytes).concat();
    let message = [words, nonce.to_le_bytes().to_vec()].concat();
    stream.write_all(&message).unwrap();
}

/// The verdict, if one comes.
fn verdict(stream: &mut TcpStream) -> Option<u32> {
    use std::io::Read;
    let mut answer = [0; 20];
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.read_exact(&mut answer).ok()?;
    word(&answer, 1)
}

#[test]
fn a_rank_that_comes_again_takes_its_own_place() {
    let address = free_address();
    let join = |rank| thread::spawn(move || TcpBootstrap::connect(rank, 3, address, LONG));
    let host = join(0);
    // The first connection stays open, as it does if the network lost one end.
    let (mut first, mut again) = (stranger(address), stranger(address));
    hello(&mut first, 77);
    hello(&mut again, 77);
    assert_eq!(verdict(&mut first), None);
    // Another process of the same rank is still sent away.
    let mut other = stranger(address);
    hello(&mut other, 78);
    assert_eq!(verdict(&mut other), Some(DUPLICATE));
    let two = join(2);
    assert_eq!(verdict(&mut again), Some(WELCOME));
    assert!(host.join().unwrap().is_ok() && two.join().unwrap().is_ok());
}

#[test]
fn a_rank_that_was_started_again_takes_the_place_of_the_one_that_ended() {
    let address = free_address();
    let join = |rank| thread::spawn(move || TcpBootstrap::connect(rank, 3, address, LONG));
    let host = join(0);
    let mut ended = stranger(address);
    hello(&mut ended, 1);
    // Rank 0 has heard it: a second one is refused.
    let mut other = stranger(address);
    hello(&mut other, 2);
    assert_eq!(verdict(&mut other), Some(DUPLICATE));
    drop(ended);
    // Rank 2 comes first: with the rank that ended, all would be there.
    let two = join(2);
    thread::sleep(20 * PAUSE);
    let one = join(1);
    let mut ranks: Vec<_> = [host, one, two].map(|t| t.join().unwrap().unwrap()).into();
    ranks.sort_by_key(|rank| rank.rank);
    assert!(call_all(ranks).iter().all(|(_, called)| called.is_ok()));
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
