//! Processes with memory of their own, and real connections between them: each does as NVSHMEM does.

mod job;
mod pe;
mod rounds;

use std::net::TcpListener;
use std::time::Duration;

use job::{Ended, Job};

/// Delays and cuts of all kinds.
const DELAYS: &str = "delay-us=300,signal-delay-us=300,late-read-us=200,pieces=64";

/// Not a test: what each process runs.
#[test]
fn process() {
    if let Some(job) = pe::Job::of_this_process() {
        rounds::run(&job);
    }
}

fn count(ended: &[Ended], name: &str) -> u64 {
    ended.iter().map(|one| one.count(name)).sum()
}

/// Ranks, rows of each to each other rank and round, rounds.
const SENT: u64 = 3 * 2 * 16 * 8;

#[test]
fn rows_are_there_when_their_signal_is_seen_in_every_order() {
    for order in ["fifo", "fence", "relaxed"] {
        let settings = format!("{order},{DELAYS}");
        let ended = Job::new(&settings, 3).run("rounds");
        for one in &ended {
            assert_eq!(one.said("wrong"), "0", "{order}: {}", one.text);
            assert!(one.success, "{order}: {}", one.text);
        }
        assert_eq!(count(&ended, "puts"), SENT, "{order}");
        assert_eq!(count(&ended, "puts_in"), SENT, "{order}");
        assert!(count(&ended, "pieces") > 4 * SENT, "{order}");
        // A signal for each row, and credits.
        assert_eq!(count(&ended, "signals"), SENT + 3 * 2 * 8, "{order}");
        assert_eq!(count(&ended, "lost"), 0, "{order}");
        let overtakings = count(&ended, "overtakings");
        assert_eq!(overtakings > 0, order != "fifo", "{order}: {overtakings}");
    }
}

#[test]
fn rows_are_missing_when_their_signal_is_seen_in_the_broken_order() {
    let ended = Job::new("broken,delay-us=300", 2).run("rounds");
    for one in &ended {
        assert!(one.number("wrong") > 0, "{}", one.text);
    }
}

#[test]
fn words_gets_and_old_values_are_right_in_every_order() {
    for order in ["fifo", "fence", "relaxed"] {
        let settings = format!("{order},{DELAYS},gbit=100,latency-us=5");
        let ended = Job::new(&settings, 3).run("words");
        for one in &ended {
            assert_eq!(one.said("wrong"), "0", "{order}: {}", one.text);
            assert!(one.success, "{order}: {}", one.text);
        }
        assert!(count(&ended, "gets_in") > 0 && count(&ended, "fetches") > 0);
        assert!(count(&ended, "words") > 0 && count(&ended, "atomics") > 0);
    }
}

#[test]
fn a_peer_that_closes_or_ends_is_named_and_its_survivors_are_told_at_once() {
    for how in ["close", "exit"] {
        let ended = Job::new(&format!("fence,lose=1:100:{how}"), 3).run("until-lost");
        for pe in [0, 2] {
            let text = &ended[pe].text;
            assert!(
                text.contains("PE 1 is lost: it closed its connection"),
                "{text}"
            );
            // Not by patience, which is two minutes.
            assert!(ended[pe].number("told-ms") < 30_000, "{text}");
            assert!(!text.contains(&format!("PE {} is lost", 2 - pe)), "{text}");
        }
        assert!(
            ended[1].text.contains("PE 1 drops out"),
            "{}",
            ended[1].text
        );
    }
}

#[test]
fn a_peer_that_falls_silent_is_lost_once_a_quiet_has_no_more_patience() {
    let ended = Job::new("relaxed,lose=1:100:hang,patience-s=1", 2).run("until-lost");
    let text = &ended[0].text;
    assert!(text.contains("PE 1 is lost: a quiet waits"), "{text}");
    assert!(ended[0].number("told-ms") >= 1_000, "{text}");
}

#[test]
fn nvshmem_is_not_told_of_a_lost_peer_if_it_is_to_be_ignored() {
    let ended = Job::new("fence,lose=1:100:close,lost=ignore", 2).run("some-rounds");
    assert_eq!(ended[0].said("told"), "nothing", "{}", ended[0].text);
    assert_eq!(ended[0].count("lost"), 1);
}

#[test]
fn a_peer_that_left_keeps_nobody_waiting_who_still_asks_it() {
    let ended = Job::new("fence", 2).run("rounds-with-one-that-left");
    let text = &ended[0].text;
    assert_eq!(ended[0].said("told"), "of a failure", "{text}");
    // Not by patience, which is two minutes.
    assert!(ended[0].number("told-ms") < 30_000, "{text}");
    assert_eq!(ended[0].count("lost"), 1, "{text}");
    assert_eq!(ended[1].count("lost"), 0, "{}", ended[1].text);
}

#[test]
fn a_full_send_queue_stalls_its_caller() {
    let ended = Job::new("fence,window=8,lose=1:100:hang,patience-s=1", 2).run("without-quiet");
    let text = &ended[0].text;
    assert!(text.contains("its send queue is full"), "{text}");
    assert!(ended[0].count("stalls") > 0);
    // What the peer acknowledged, those on their way, and the one that was refused.
    let (puts, signals) = (ended[0].count("puts"), ended[0].count("signals"));
    assert!(puts + signals < 2 * (100 + 8), "{puts} {signals}");
}

#[test]
fn puts_and_signals_are_only_counted_from_a_number_on() {
    let ended = Job::new("fence,count-after=40", 2).run("some-rounds");
    for (one, other) in [(&ended[0], &ended[1]), (&ended[1], &ended[0])] {
        let sent = one.count("puts") + one.count("signals");
        assert_eq!(sent - one.count("only_counted"), 40);
        assert_eq!(other.count("puts_in") + other.count("words_in"), 40);
        assert_eq!(sent, 300);
    }
}

#[test]
fn requests_that_are_under_way_arrive_though_their_pe_ends() {
    let settings = "relaxed,delay-us=200000,signal-delay-us=200000,pieces=64";
    let ended = Job::new(settings, 2).run("end-at-once");
    for (one, other) in [(&ended[0], &ended[1]), (&ended[1], &ended[0])] {
        assert!(one.success, "{}", one.text);
        assert_eq!(one.count("puts"), 200);
        assert_eq!(other.count("puts_in"), 200, "{}", other.text);
        assert_eq!(one.count("lost"), 0, "{}", one.text);
    }
}

#[test]
fn another_version_of_nvshmem_is_refused() {
    for version in ["20000", "30001", "30100", "40000", "0"] {
        let ended = Job::new("fence", 1).with("VERSION", version).run("rounds");
        assert_eq!(ended[0].said("init"), "7", "{}", ended[0].text);
        let text = format!("has transport interface {version}; this transport has 30000");
        assert!(ended[0].text.contains(&text), "{}", ended[0].text);
    }
}

#[test]
fn settings_that_are_none_are_named() {
    let ended = Job::new("fence,pieces=7", 1).run("rounds");
    assert_eq!(ended[0].said("init"), "7");
    let text = "FERRY_NETWORK: pieces=7: must be a number of bytes, a multiple of 8";
    assert!(ended[0].text.contains(text), "{}", ended[0].text);
}

#[test]
fn a_port_that_is_in_use_ends_all_and_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let ended = Job::new(&format!("fence,port={}", port - 1), 3).run("rounds");
    for (pe, one) in ended.iter().enumerate() {
        assert_eq!(one.said("connect"), "7", "{}", one.text);
        let text = match pe {
            1 => format!("cannot listen at 127.0.0.1:{port}"),
            _ => "PE 1 does not listen".into(),
        };
        assert!(one.text.contains(&text), "{}", one.text);
    }
}

/// Longest time of a job.
const LONGEST: Duration = Duration::from_secs(120);
