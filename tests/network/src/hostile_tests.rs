//! Peers that send what nobody may send: nothing is written, nobody panics, and NVSHMEM is told.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use crate::endpoint::{Endpoint, Verdict};
use crate::frame::{Answer, Atomic, AtomicRequest, HEADER, Request};
use crate::join;
use crate::memory::{Memory, Place, Region};
use crate::settings::{Order, Settings};

/// Words of memory, of which the middle half is registered for peers and the last quarter for this PE.
const WORDS: usize = 64;

/// PE 0, which is honest, and what PE 1 has of it.
struct Pair {
    endpoint: Endpoint,
    memory: &'static mut [u64; WORDS],
    /// The connection from PE 1 to PE 0.
    requests: TcpStream,
    /// PE 1's answers go here.
    answers: TcpStream,
}

impl Pair {
    fn new(settings: Settings) -> Self {
        let memory = Box::leak(Box::new([7; WORDS]));
        let base = memory.as_ptr() as u64;
        let registered = Memory::default();
        for (index, is_local) in [
            (WORDS / 4, false),
            (WORDS / 2, false),
            (3 * WORDS / 4, true),
        ] {
            registered.register(Region {
                base: base + 8 * index as u64,
                bytes: 8 * WORDS as u64 / 4,
                place: Place::Host,
                is_local,
            });
        }
        let mut other = None;
        let settings = Settings {
            without_gpu: true,
            ..settings
        };
        let endpoint = Endpoint::connect(settings, None, Arc::new(registered), [0, 2], |own, _| {
            let (all, met) = join::meet_by_hand(own);
            other = Some(met);
            Ok(all)
        });
        let (requests, answers) = other.unwrap().join().unwrap();
        Self {
            endpoint: endpoint.unwrap(),
            memory,
            requests,
            answers,
        }
    }

    fn address(&self, word: usize) -> u64 {
        self.memory.as_ptr() as u64 + 8 * word as u64
    }

    fn ask(&mut self, request: &Request) {
        let mut frame = Vec::new();
        request.write(&mut frame);
        self.requests.write_all(&frame).unwrap();
    }

    fn answer(&mut self, answer: &Answer) {
        let mut frame = Vec::new();
        answer.write(&mut frame);
        self.answers.write_all(&frame).unwrap();
    }

    /// Whether the transport fails soon.
    fn fails(&self) -> bool {
        wait(|| self.endpoint.progress() == Verdict::Failed)
    }

    fn count(&self, name: &str) -> u64 {
        let counts = self.endpoint.counts();
        counts.all().find(|(found, _)| *found == name).unwrap().1
    }
}

fn wait(mut is_over: impl FnMut() -> bool) -> bool {
    let begin = Instant::now();
    while !is_over() {
        if begin.elapsed() > Duration::from_secs(20) {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

fn fence() -> Settings {
    Settings::new(Order::Fence)
}

fn put(to: u64, bytes: usize) -> Request {
    Request::Put {
        to,
        bytes: vec![0xee; bytes],
    }
}

#[test]
fn what_is_registered_for_peers_is_written_up_to_its_edges() {
    let mut pair = Pair::new(fence());
    let to = pair.address(WORDS / 4);
    pair.ask(&put(to, 8 * WORDS / 2));
    assert!(wait(|| pair.count("puts_in") == 1));
    assert_eq!(pair.endpoint.progress(), Verdict::Fine);
    assert!(pair.memory[..WORDS / 4].iter().all(|word| *word == 7));
    let written = &pair.memory[WORDS / 4..3 * WORDS / 4];
    assert!(written.iter().all(|word| *word == 0xeeee_eeee_eeee_eeee));
    assert!(pair.memory[3 * WORDS / 4..].iter().all(|word| *word == 7));
}

#[test]
fn nothing_is_written_or_read_outside_of_what_is_registered_for_peers() {
    let atomic = |at, fetch| {
        Request::Atomic(AtomicRequest {
            at,
            size: 8,
            operation: Atomic::Add,
            value: 1,
            comparand: 0,
            fetch,
        })
    };
    let get = |from, bytes| Request::Get { from, bytes, id: 1 };
    let word = |to| Request::Word {
        to,
        size: 8,
        value: 1,
    };
    let (first, end) = (WORDS / 4, 3 * WORDS / 4);
    type Make<'a> = &'a dyn Fn(&Pair) -> Request;
    let requests: [Make<'_>; 11] = [
        &|pair| put(pair.address(first) - 1, 8),
        &|pair| put(pair.address(end) - 7, 8),
        &|pair| put(pair.address(end), 8),
        &|pair| put(pair.address(first), 8 * WORDS),
        &|_| put(u64::MAX - 3, 8),
        &|_| put(0, 8),
        &|pair| word(pair.address(end)),
        &|pair| atomic(pair.address(end), None),
        &|pair| atomic(pair.address(end), Some(1)),
        &|pair| get(pair.address(end) - 8, 16),
        &|_| get(u64::MAX, 1 << 20),
    ];
    for (index, request) in requests.iter().enumerate() {
        for pieces in [0, 8] {
            let mut pair = Pair::new(Settings { pieces, ..fence() });
            let request = request(&pair);
            pair.ask(&request);
            assert!(pair.fails(), "request {index}");
            drop(pair.endpoint);
            // A put in pieces may have written those that are inside.
            let outside = pair.memory[..first].iter().chain(&pair.memory[end..]);
            assert!(outside.clone().all(|word| *word == 7), "request {index}");
        }
    }
}

#[test]
fn bytes_that_are_no_frame_end_the_transport() {
    let mut last = Vec::new();
    Request::Last.write(&mut last);
    Request::Fence.write(&mut last);
    let mut long = Vec::new();
    put(0, 0).write(&mut long);
    long[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    for bytes in [vec![0; HEADER], vec![0xff; 3 * HEADER], long, last] {
        let mut pair = Pair::new(fence());
        pair.requests.write_all(&bytes).unwrap();
        assert!(pair.fails());
        let mut pair = Pair::new(fence());
        pair.answers.write_all(&bytes).unwrap();
        assert!(pair.fails());
    }
}

#[test]
fn a_peer_that_vanishes_within_a_frame_is_lost_and_writes_nothing() {
    let mut pair = Pair::new(fence());
    let mut frame = Vec::new();
    put(pair.address(WORDS / 2), 64).write(&mut frame);
    pair.requests.write_all(&frame).unwrap();
    pair.requests.write_all(&frame[..HEADER + 63]).unwrap();
    let Pair {
        endpoint,
        memory,
        requests,
        answers,
    } = pair;
    drop((requests, answers));
    assert!(wait(|| endpoint.counts().lost.load(Ordering::Relaxed) == 1));
    // The one that came as a whole, alone.
    assert_eq!(endpoint.counts().puts_in.load(Ordering::Relaxed), 1);
    assert_eq!(endpoint.progress(), Verdict::Fine);
    assert_eq!(endpoint.quiet(1), Verdict::Failed);
    assert_eq!(endpoint.quiet(0), Verdict::Fine);
    drop(endpoint);
    assert_eq!(memory[WORDS / 2 + 8], 7);
}

#[test]
fn answers_that_were_not_asked_for_end_the_transport_and_go_nowhere() {
    let bytes = |id, bytes| Answer::Bytes {
        id,
        bytes: vec![0xee; bytes],
    };
    // A get of 16 bytes has number 1, an old value number 2, and one put is to be acknowledged.
    for answer in [
        Answer::Done(2),
        Answer::Done(u64::MAX),
        bytes(1, 17),
        bytes(1, 0),
        bytes(2, 8),
        bytes(3, 16),
        Answer::Old { id: 1, value: 0 },
        Answer::Old {
            id: u64::MAX,
            value: 0,
        },
    ] {
        let mut pair = Pair::new(fence());
        let own = pair.address(3 * WORDS / 4);
        let atomic = AtomicRequest {
            at: 8,
            size: 8,
            operation: Atomic::Add,
            value: 1,
            comparand: 0,
            fetch: None,
        };
        // SAFETY: all places are in memory that is never freed.
        unsafe {
            pair.endpoint.get(1, [own, 8], 16, true);
            pair.endpoint.change(1, atomic, Some((own + 16, 1)), true);
            pair.endpoint.put(1, [8, own], 8, true);
        }
        pair.answer(&answer);
        assert!(pair.fails(), "{answer:?}");
        drop(pair.endpoint);
        assert!(pair.memory.iter().all(|word| *word == 7), "{answer:?}");
    }
}

#[test]
fn acknowledgements_only_grow() {
    let mut pair = Pair::new(fence());
    let own = pair.address(3 * WORDS / 4);
    for _ in 0..3 {
        // SAFETY: the source is never freed.
        unsafe { pair.endpoint.put(1, [8, own], 8, true) };
    }
    pair.answer(&Answer::Done(2));
    pair.answer(&Answer::Done(3));
    assert_eq!(pair.endpoint.quiet(1), Verdict::Fine);
    pair.answer(&Answer::Done(1));
    assert!(pair.fails());
}

#[test]
fn an_end_with_requests_under_way_does_not_wait_for_a_silent_peer() {
    let pair = Pair::new(fence());
    let own = pair.address(3 * WORDS / 4);
    for _ in 0..1_000 {
        // SAFETY: the source is never freed.
        unsafe { pair.endpoint.put(1, [8, own], 64, true) };
    }
    let begin = Instant::now();
    drop(pair.endpoint);
    assert!(begin.elapsed() < Duration::from_secs(15));
}
