//! Ranks with a key, and strangers who would like to have it.

use std::sync::atomic::AtomicUsize;

use super::*;
use crate::error::warnings_tests::Warnings;
use crate::group::bootstrap::hello::{CHALLENGE, OTHER_KEY};
use crate::group::bootstrap::key::{Prover, Random, random};

const KEY: &[u8] = b"correct horse battery staple";
const OTHER: &[u8] = b"another key";
const DOING: &str = "a test";
/// Number of strangers at once.
const CROWD: usize = 256;

fn long() -> Limit {
    Limit::of(LONG)
}

fn connect(rank: u32, ranks: u32, address: SocketAddr, key: Option<&[u8]>) -> Joined {
    match key {
        Some(key) => TcpBootstrap::connect_with_key(rank, ranks, address, LONG, key),
        None => TcpBootstrap::connect(rank, ranks, address, LONG),
    }
}

fn start(rank: u32, ranks: u32, address: SocketAddr) -> thread::JoinHandle<Joined> {
    thread::spawn(move || connect(rank, ranks, address, Some(KEY)))
}

/// A proof, made from the messages so far.
type Proof = Box<dyn Fn(&[u8]) -> Vec<u8> + Send + Sync>;

/// A stranger's attempt to take a rank's place.
struct Attempt {
    name: &'static str,
    hello: Vec<u8>,
    /// Its answer, made of the challenge; none if it says nothing more.
    proof: Option<Proof>,
}

impl Attempt {
    /// The last message of rank 0 at `address`, over `stream`.
    fn make(&self, address: SocketAddr, stream: TcpStream) -> Result<u32, BootstrapError> {
        let mut host = Peer::new(0, 2, address, stream)?;
        host.send(0, &self.hello, DOING, long())?;
        let answer = host.receive_any(DOING, long())?;
        if answer.number != CHALLENGE {
            return Ok(answer.number);
        }
        if let Some(proof) = &self.proof {
            host.send(0, &proof(&answer.bytes), DOING, long())?;
        }
        Ok(host.receive_any(DOING, long())?.number)
    }
}

/// A hello as rank 1 of `ranks`, with a random number.
fn hello_of(ranks: u32) -> Vec<u8> {
    let hello = Hello {
        rank: 1,
        ranks,
        nonce: 5,
        random: Some(random().unwrap()),
    };
    hello.bytes()
}

/// All messages between rank 1 and rank 0 when `ranks` meet: hello, challenge, proof, welcome.
fn overhear(ranks: u32) -> [Vec<u8>; 4] {
    let address = free_address();
    let between = TcpListener::bind(free_address()).unwrap();
    let at = between.local_addr().unwrap();
    let others = (2..ranks).map(|rank| start(rank, ranks, address));
    let threads: Vec<_> = [start(0, ranks, address), start(1, ranks, at)]
        .into_iter()
        .chain(others)
        .collect();
    let (stream, from) = between.accept().unwrap();
    let mut rank = Peer::new(1, ranks, from, stream).unwrap();
    let mut host = Peer::new(0, ranks, address, stranger(address)).unwrap();
    let pass = |from: &mut Peer, to: &mut Peer| {
        let message = from.receive_any(DOING, long()).unwrap();
        to.send(message.number, &message.bytes, DOING, long())
            .unwrap();
        message.bytes
    };
    let heard = [
        pass(&mut rank, &mut host),
        pass(&mut host, &mut rank),
        pass(&mut rank, &mut host),
        pass(&mut host, &mut rank),
    ];
    for thread in threads {
        thread.join().unwrap().unwrap();
    }
    heard
}

/// All attempts of strangers to be taken for rank 1, except silence.
fn attempts(ranks: u32) -> Vec<Attempt> {
    let [hello, _, proof, welcome] = overhear(ranks);
    let mine = hello_of(ranks);
    let with_key = |key, prover| {
        let (key, mine) = (Key::new(key).unwrap(), mine.clone());
        move |challenge: &[u8]| key.proof(prover, &[&mine, challenge].concat()).to_vec()
    };
    let attempt = |name, hello: &[u8], proof| Attempt {
        name,
        hello: hello.to_vec(),
        proof: Some(proof),
    };
    vec![
        attempt("has no key", &mine[..16], Box::new(|_| Vec::new())),
        attempt("proves nothing", &mine, Box::new(|_| Vec::new())),
        attempt("sends the challenge back", &mine, Box::new(<[u8]>::to_vec)),
        attempt(
            "has another key",
            &mine,
            Box::new(with_key(OTHER, Prover::Rank)),
        ),
        attempt(
            "repeats what it overheard",
            &hello,
            Box::new(move |_| proof.clone()),
        ),
        attempt(
            "repeats what it overheard of rank 0",
            &hello,
            Box::new(move |_| welcome[4..].to_vec()),
        ),
        attempt(
            "reflects rank 0's own proof",
            &mine,
            Box::new(with_key(KEY, Prover::Host)),
        ),
    ]
}

#[test]
fn a_stranger_is_sent_away_with_its_address_logged_and_the_others_go_on() {
    for attempt in attempts(2) {
        let address = free_address();
        let host = thread::spawn(move || Warnings::of(|| connect(0, 2, address, Some(KEY))));
        let stream = stranger(address);
        let from = stream.local_addr().unwrap();
        assert_eq!(
            attempt.make(address, stream).unwrap(),
            OTHER_KEY,
            "{}",
            attempt.name
        );
        let one = start(1, 2, address).join().unwrap();
        let (zero, warnings) = host.join().unwrap();
        assert!(warnings.contains(&from.to_string()), "{warnings}");
        let met = call_all(vec![zero.unwrap(), one.unwrap()]);
        assert!(met.iter().all(|(_, called)| called.is_ok()));
    }
}

#[test]
fn who_proves_nothing_in_time_is_sent_away_and_keeps_nobody_waiting() {
    let address = free_address();
    let host = thread::spawn(move || Warnings::of(|| connect(0, 3, address, Some(KEY))));
    let silent: Vec<_> = (0..30).map(|_| stranger(address)).collect();
    let stream = stranger(address);
    let from = stream.local_addr().unwrap();
    let (begun, start_of_one) = (Instant::now(), start(1, 3, address));
    let halfway = Attempt {
        name: "says hello alone",
        hello: hello_of(3),
        proof: None,
    };
    let waiting: Vec<_> = (0..30)
        .map(|_| {
            let mut host = Peer::new(0, 3, address, stranger(address)).unwrap();
            host.send(0, &halfway.hello, DOING, long()).unwrap();
            host
        })
        .collect();
    let sent_away = halfway.make(address, stream);
    assert!(
        matches!(sent_away, Err(BootstrapError::Io { .. })),
        "{sent_away:?}"
    );
    assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
    let two = start(2, 3, address);
    assert!(start_of_one.join().unwrap().is_ok() && two.join().unwrap().is_ok());
    assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
    let (zero, warnings) = host.join().unwrap();
    assert!(zero.is_ok() && warnings.contains(&from.to_string()));
    drop((silent, waiting));
}

#[test]
fn a_crowd_of_strangers_does_not_keep_four_ranks_apart() {
    let _alone = MANY_CONNECTIONS
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let attempts = attempts(4);
    let address = free_address();
    let mut ranks = vec![start(0, 4, address)];
    let mut crowd: Vec<_> = (0..CROWD).map(|_| stranger(address)).collect();
    let begun = Instant::now();
    ranks.extend([1, 2].map(|rank| start(rank, 4, address)));
    let refused = AtomicUsize::new(0);
    thread::scope(|scope| {
        let mut threads = Vec::new();
        while !crowd.is_empty() {
            let some = crowd.split_off(crowd.len() - CROWD / 16);
            let (attempts, refused) = (&attempts, &refused);
            threads.push(scope.spawn(move || try_in_turn(attempts, address, some, refused)));
        }
        // The last rank comes in the midst of them.
        while refused.load(Ordering::Relaxed) < CROWD / 4
            && !threads.iter().all(|thread| thread.is_finished())
        {
            thread::sleep(PAUSE);
        }
        ranks.push(start(3, 4, address));
    });
    let ranks = ranks.into_iter().map(|rank| rank.join().unwrap().unwrap());
    let ranks: Vec<_> = ranks.collect();
    assert!(begun.elapsed() < LONG / 4, "{:?}", begun.elapsed());
    assert!(refused.into_inner() > 0);
    assert!(call_all(ranks).iter().all(|(_, called)| called.is_ok()));
}

/// Makes the attempts in turn, each over a connection of its own; every eighth stranger says nothing.
fn try_in_turn(
    attempts: &[Attempt],
    address: SocketAddr,
    streams: Vec<TcpStream>,
    refused: &AtomicUsize,
) {
    let mut silent = Vec::new();
    for (stream, attempt) in streams
        .into_iter()
        .zip(attempts.iter().map(Some).chain([None]).cycle())
    {
        let Some(attempt) = attempt else {
            silent.push(stream);
            continue;
        };
        match attempt.make(address, stream) {
            Ok(OTHER_KEY) => drop(refused.fetch_add(1, Ordering::Relaxed)),
            // Sent away before it had said all, or when all ranks had met.
            Err(BootstrapError::Io { .. }) => {}
            told => panic!("{}: {told:?}", attempt.name),
        }
    }
}

#[test]
fn ranks_without_the_same_key_are_told_so_on_both_sides() {
    for (host, rank) in [
        (Some(KEY), Some(OTHER)),
        (Some(KEY), None),
        (None, Some(KEY)),
    ] {
        let address = free_address();
        let short = move |rank, key| match key {
            Some(key) => TcpBootstrap::connect_with_key(rank, 2, address, 3 * SHORT, key),
            None => TcpBootstrap::connect(rank, 2, address, 3 * SHORT),
        };
        let zero = thread::spawn(move || short(0, host));
        let one = short(1, rank).unwrap_err();
        let zero = zero.join().unwrap().unwrap_err();
        for (error, own, of_peer, rank_and_peer) in
            [(&zero, host, rank, (0, 1)), (&one, rank, host, (1, 0))]
        {
            let BootstrapError::OtherKey {
                rank,
                ours,
                peer,
                theirs,
                ..
            } = *error
            else {
                panic!("{error}");
            };
            assert_eq!((rank, peer), rank_and_peer);
            assert_eq!((ours, theirs), (own.is_some(), of_peer.is_some()));
            assert!(error.to_string().contains(" key, and rank "), "{error}");
            let told = format!("{error} {error:?}");
            for key in [KEY, OTHER] {
                assert!(!told.contains(str::from_utf8(key).unwrap()), "{told}");
                assert!(!told.contains(&format!("{key:?}")), "{told}");
            }
        }
    }
}

/// The error of a rank with the key at a rank 0 that does `host`.
fn meet_stranger(host: impl FnOnce(&mut Peer)) -> BootstrapError {
    let listener = TcpListener::bind(free_address()).unwrap();
    let one = start(1, 2, listener.local_addr().unwrap());
    let (stream, from) = listener.accept().unwrap();
    let mut rank = Peer::new(1, 2, from, stream).unwrap();
    host(&mut rank);
    one.join().unwrap().unwrap_err()
}

#[test]
fn a_rank_0_that_does_not_prove_the_key_is_refused() {
    let [_, challenge, _, welcome] = overhear(2);
    let challenge: Random = challenge[..].try_into().unwrap();
    let fresh = random().unwrap();
    let other = Key::new(OTHER).unwrap();
    // Made of the hello, the challenge and the rank's proof.
    let proofs: [(&str, Random, Proof); 4] = [
        ("proves nothing", fresh, Box::new(|_| Vec::new())),
        (
            "has another key",
            fresh,
            Box::new(move |said| other.proof(Prover::Host, &said[..80]).to_vec()),
        ),
        (
            "repeats what it overheard",
            challenge,
            Box::new(move |_| welcome[4..].to_vec()),
        ),
        (
            "reflects the rank's own proof",
            fresh,
            Box::new(|said| said[80..].to_vec()),
        ),
    ];
    let is_refused = |error: &_| matches!(error, BootstrapError::OtherKey { peer: 0, .. });
    for (name, challenge, proof) in proofs {
        let refused = meet_stranger(|rank| {
            let hello = rank.receive(0, DOING, long()).unwrap();
            rank.send(CHALLENGE, &challenge, DOING, long()).unwrap();
            let theirs = rank.receive(0, DOING, long()).unwrap();
            let proof = proof(&[hello, challenge.to_vec(), theirs].concat());
            let answer = [2_u32.to_le_bytes().to_vec(), proof].concat();
            rank.send(WELCOME, &answer, DOING, long()).unwrap();
        });
        assert!(is_refused(&refused), "{name}: {refused}");
    }
    let refused = meet_stranger(|rank| {
        let size = 2_u32.to_le_bytes();
        rank.receive(0, DOING, long()).unwrap();
        rank.send(WELCOME, &size, DOING, long()).unwrap();
    });
    assert!(is_refused(&refused), "asks for no proof: {refused}");
}

#[test]
fn a_rank_with_the_key_that_expects_another_size_is_told_the_size() {
    let address = free_address();
    let host = start(0, 2, address);
    let other = connect(1, 3, address, Some(KEY));
    assert!(
        matches!(other, Err(BootstrapError::WorldSize { theirs: 2, .. })),
        "{other:?}"
    );
    assert!(connect(1, 2, address, Some(KEY)).is_ok());
    assert!(host.join().unwrap().is_ok());
}

#[test]
fn a_key_of_no_bytes_is_refused() {
    let refused = connect(0, 1, free_address(), Some(&[]));
    assert!(matches!(refused, Err(BootstrapError::EmptyKey)));
}

#[test]
fn rank_0_warns_once_where_anybody_can_take_part() {
    let warnings = |address: SocketAddr, key| {
        let (joined, warnings) = Warnings::of(|| connect(0, 1, address, key));
        assert!(joined.is_ok());
        warnings.matches("give all ranks a key").count()
    };
    let everywhere = (Ipv4Addr::UNSPECIFIED, 0).into();
    assert_eq!(warnings(everywhere, None), 1);
    assert_eq!(warnings(everywhere, Some(KEY)), 0);
    assert_eq!(warnings(free_address(), None), 0);
}
