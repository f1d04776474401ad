//! The check of links between ranks, in the simulator.

use std::collections::BTreeSet;
use std::time::Duration;

use ferry::error::LinksError;
use ferry::simulator::{BadLink, BadLinkKind, Options};
use ferry::{Error, Group, Link, LinkReport, LinkState, LinkTest};

const RANKS: [u32; 4] = [2, 3, 4, 8];

/// The report of a simulated group with these options.
fn report(options: Options) -> LinkReport {
    let group = Group::simulated_with(Options {
        // A rank that has ended may leave others waiting, and launches nothing more.
        patience: Some(Duration::from_millis(1)),
        ..options
    });
    let group = group.unwrap();
    let report = group.check_links().unwrap();
    group.close().unwrap();
    report
}

/// The report of a group with a bad link.
fn with_bad_link(ranks: u32, seed: u64, bad: BadLink) -> LinkReport {
    report(Options {
        bad_link: Some(bad),
        ..Options::new(ranks, seed)
    })
}

/// Pairs of ranks whose link is bad in a test, with what it is.
fn bad(report: &LinkReport, test: LinkTest) -> BTreeSet<(u32, u32, String)> {
    let of_test = report.bad().filter(|link| link.test == test);
    of_test
        .map(|link| (link.from.0, link.to.0, format!("{:?}", link.state)))
        .collect()
}

/// A link of a group, another one for each seed.
fn link(ranks: u32, seed: u64) -> (u32, u32) {
    let from = seed as u32 % ranks;
    (from, (from + 1 + seed as u32 / ranks % (ranks - 1)) % ranks)
}

#[test]
fn every_pair_is_tested_in_every_way_and_none_is_blamed_for_nothing() {
    for ranks in [1, 2, 3, 4, 5, 8] {
        for seed in 0..12 {
            let report = report(Options {
                warps: 1 + seed as u32 % 5,
                ..Options::new(ranks, seed)
            });
            assert!(
                report.is_well() && report.judges_times,
                "seed {seed}: {report}"
            );
            let key = |link: &Link| (link.test, link.from, link.to);
            let tested: BTreeSet<_> = report.links.iter().map(key).collect();
            let pairs = (ranks * (ranks - 1)) as usize;
            assert_eq!((tested.len(), report.links.len()), (3 * pairs, 3 * pairs));
            let is_whole = |link: &Link| {
                let bytes = match link.test {
                    LinkTest::Flag => 8,
                    LinkTest::Inline => 4096,
                    LinkTest::Rows => 4 * 4096,
                };
                link.from != link.to && link.bytes == bytes && link.rate().is_some()
            };
            assert!(report.links.iter().all(is_whole), "seed {seed}: {report:?}");
        }
    }
}

#[test]
fn a_link_that_loses_or_changes_stores_is_named_and_no_other() {
    for (kind, state, found_by) in [
        (BadLinkKind::Lost, "Lost", LinkTest::Flag),
        (BadLinkKind::Corrupt, "Corrupt", LinkTest::Flag),
        (BadLinkKind::CorruptRows, "Corrupt", LinkTest::Inline),
    ] {
        for ranks in RANKS {
            for seed in 0..8 {
                let (from, to) = link(ranks, seed);
                let report = with_bad_link(ranks, seed, BadLink { from, to, kind });
                for test in LinkTest::ALL {
                    let named = match test == found_by {
                        true => [(from, to, state.to_owned())].into(),
                        false => BTreeSet::new(),
                    };
                    assert_eq!(bad(&report, test), named, "seed {seed}: {report}");
                    // The pair is left out afterwards, in both directions, and no other is.
                    let links = report.links.iter().filter(|link| link.test == test);
                    let out = links.filter(|link| link.state == LinkState::NotRun);
                    let out: BTreeSet<_> = out.map(|link| (link.from.0, link.to.0)).collect();
                    let wanted = match test > found_by {
                        true => [(from, to), (to, from)].into(),
                        false => BTreeSet::new(),
                    };
                    assert_eq!(out, wanted, "seed {seed}: {report}");
                }
            }
        }
    }
}

#[test]
fn a_slow_link_is_named_and_no_other_pair() {
    for ranks in RANKS {
        for seed in 0..8 {
            let (from, to) = link(ranks, seed);
            let kind = BadLinkKind::Slow;
            let report = with_bad_link(ranks, seed, BadLink { from, to, kind });
            let there = (from, to, "Slow".to_owned());
            let back = (to, from, "Slow".to_owned());
            // What is sent there takes many times what is sent back, whose answer alone is slow.
            assert_eq!(
                bad(&report, LinkTest::Inline),
                [there.clone()].into(),
                "seed {seed}: {report}"
            );
            for test in [LinkTest::Flag, LinkTest::Rows] {
                let named = bad(&report, test);
                let others = named.iter().find(|link| **link != there && **link != back);
                assert_eq!(others, None, "seed {seed}: {report}");
            }
        }
    }
}

#[test]
fn a_report_names_the_link_and_what_to_look_at() {
    let bad = BadLink {
        from: 2,
        to: 0,
        kind: BadLinkKind::Lost,
    };
    let report = with_bad_link(3, 1, bad);
    let text = report.to_string();
    for part in [
        "Links of 3 ranks, simulated group: times are simulated\n",
        "\na flag of 8 bytes, and its answer: µs, median ",
        "\nfrom\\to       0       1       2\n",
        "\n      2   lost!",
        "\n  the link from rank 2 to rank 0 lost a flag of 8 bytes\n",
        "iommu=pt",
        "nvidia-smi topo -m",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    let error = Error::from(LinksError::Bad(Box::new(report)));
    assert_eq!(
        error.to_string(),
        "the link from rank 2 to rank 0 lost a flag of 8 bytes; the page `doctor` of the guide says what to \
         look at"
    );
}

#[test]
fn processes_find_the_same_as_threads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let bad_link = Some(BadLink {
        from: 0,
        to: 2,
        kind: BadLinkKind::Lost,
    });
    let options = Options {
        bad_link,
        patience: Some(Duration::from_millis(20)),
        ..Options::new(3, 4)
    };
    let join = |rank| {
        let timeout = Duration::from_secs(20);
        let group = Group::simulated_at(&path, ferry::Rank(rank), &options, timeout).unwrap();
        let report = group.check_links().unwrap();
        group.close().unwrap();
        report
    };
    let reports: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|rank| {
                scope.spawn({
                    let join = &join;
                    move || join(rank)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    for report in &reports {
        assert_eq!(report, &reports[0]);
        assert_eq!(
            bad(report, LinkTest::Flag),
            [(0, 2, "Lost".to_owned())].into()
        );
    }
}
