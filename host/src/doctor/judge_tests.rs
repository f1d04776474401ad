//! Cells by hand, and the links that follow from them.

use super::*;
use LinkOutcome::{Missing, NotRun, Well, Wrong};

const FLOOR: Duration = Duration::from_micros(20);

/// A cell in which a rank got its answers after `ns`, if they came, and received so.
fn cell(sent: LinkOutcome, received: LinkOutcome, ns: u64) -> Cell {
    Cell { sent, received, ns }
}

/// States of the links of two ranks, from 0 to 1 and back, of what each found.
fn states(cells: [Cell; 2]) -> [LinkState; 2] {
    let mut all = Cells::none(2);
    all.set(Rank(0), Rank(1), cells[0]);
    all.set(Rank(1), Rank(0), cells[1]);
    [(0, 1), (1, 0)].map(|(from, to)| all.state(Rank(from), Rank(to)))
}

#[test]
fn a_link_is_blamed_for_what_it_was_given_alone() {
    let well = cell(Well, Well, 5);
    assert_eq!(states([well, well]), [LinkState::Well; 2]);
    // Nothing from 0 arrives at 1: neither a row nor the answer to that of 1.
    let lost = [cell(Missing, Well, 0), cell(Missing, Missing, 0)];
    assert_eq!(states(lost), [LinkState::Lost, LinkState::Well]);
    // A row from 0 arrives changed, so that it is not answered.
    let changed = [cell(Missing, Well, 0), cell(Well, Wrong, 5)];
    assert_eq!(states(changed), [LinkState::Corrupt, LinkState::Well]);
    // Rows arrive both ways, but no answer from 0.
    let unanswered = [cell(Well, Well, 5), cell(Missing, Well, 0)];
    assert_eq!(states(unanswered), [LinkState::Lost, LinkState::Well]);
    // The answer from 0 is another word.
    let answered = [cell(Well, Well, 5), cell(Wrong, Well, 0)];
    assert_eq!(states(answered), [LinkState::Corrupt, LinkState::Well]);
    let none = cell(NotRun, NotRun, 0);
    assert_eq!(states([none, none]), [LinkState::NotRun; 2]);
}

#[test]
fn cells_travel_as_words_and_the_worst_row_and_launch_count() {
    let record = |sent: LinkOutcome, received: LinkOutcome, begun, ended| LinkRecord {
        sent: sent as u32,
        received: received as u32,
        begun,
        ended,
        reserved: 0,
    };
    let rows = [record(Well, Well, 10, 20), record(Well, Missing, 12, 25)];
    let found = Cell::of(&rows).unwrap();
    assert_eq!(found, cell(Well, Missing, 15));
    let answered = record(Well, Well, 10, 20);
    let unanswered = Cell::of(&[answered, record(Missing, Well, 0, u64::MAX)]).unwrap();
    assert_eq!(unanswered, cell(Missing, Well, 0));
    let long = Cell::of(&[record(Well, Well, 0, u64::MAX)]);
    assert_eq!(long, Ok(cell(Well, Well, MOST_NS)));
    // A row that was not tested is neither well nor bad.
    for row in [record(NotRun, Well, 0, 0), record(Well, NotRun, 0, 0)] {
        assert_eq!(Cell::of(&[answered, row]), Err(1));
    }
    for cell in [Cell::NONE, found, unanswered, cell(Wrong, Wrong, MOST_NS)] {
        assert_eq!(Cell::of_word(cell.word()), cell);
    }
    let both = Cell::NONE
        .merge(cell(Well, Well, 7))
        .merge(cell(Well, Well, 4));
    assert_eq!(both, cell(Well, Well, 4));
    assert_eq!(both.merge(cell(Well, Well, 9)), both);
    assert_eq!(both.merge(cell(Missing, Well, 0)), cell(Missing, Well, 0));
}

/// The report of four ranks whose links take 10 µs, but for that from 2 to 0.
fn report(judges_times: bool, ns: u64) -> LinkReport {
    let mut cells = Cells::none(4);
    for (rank, peers) in (0..4).zip(Cells::all_peers(4)) {
        for peer in (0..4).filter(|peer| peers >> peer & 1 != 0) {
            let ns = if (rank, peer) == (2, 0) { ns } else { 10_000 };
            cells.set(Rank(rank), Rank(peer), cell(Well, Well, ns));
        }
    }
    let mut report = LinkReport {
        ranks: 4,
        group: "local",
        judges_times,
        links: Vec::new(),
    };
    judge(&mut report, (LinkTest::Flag, 8), FLOOR, &cells);
    report
}

#[test]
fn ten_times_the_median_is_slow_unless_ranks_share_a_gpu_or_it_is_short() {
    let bad = |report: &LinkReport| -> Vec<_> {
        report
            .bad()
            .map(|link| (link.from.0, link.to.0, link.state))
            .collect()
    };
    assert_eq!(bad(&report(true, 99_999)), []);
    assert_eq!(bad(&report(true, 100_000)), [(2, 0, LinkState::Slow)]);
    assert_eq!(bad(&report(false, 100_000)), []);
    let mut quick = report(true, 10_000);
    for link in &mut quick.links {
        let ns = if link.from == Rank(3) { 20_000 } else { 1_000 };
        link.time = Some(Duration::from_nanos(ns));
    }
    let mut cells = Cells::none(4);
    for link in quick.links.drain(..) {
        let ns = link.time.map_or(0, |time| time.as_nanos() as u64);
        cells.set(link.from, link.to, cell(Well, Well, ns));
    }
    judge(&mut quick, (LinkTest::Flag, 8), FLOOR, &cells);
    assert_eq!(bad(&quick), []);
}

#[test]
fn rows_are_slow_both_ways_but_not_for_the_time_of_their_answers() {
    /// States of the rows of the links 0 to 1 and back, whose rows and flags take so many nanoseconds.
    fn states(rows: [u64; 2], flags: [u64; 2]) -> [LinkState; 2] {
        let mut report = report(true, 10_000);
        report.links.clear();
        for (test, bytes, [there, back], usual) in [
            (LinkTest::Flag, 8, flags, 5_000),
            (LinkTest::Rows, 1 << 20, rows, 12_000),
        ] {
            let mut cells = Cells::none(4);
            for (rank, peers) in (0..4).zip(Cells::all_peers(4)) {
                for peer in (0..4).filter(|peer| peers >> peer & 1 != 0) {
                    let ns = match (rank, peer) {
                        (0, 1) => there,
                        (1, 0) => back,
                        _ => usual,
                    };
                    cells.set(Rank(rank), Rank(peer), cell(Well, Well, ns));
                }
            }
            judge(&mut report, (test, bytes), FLOOR, &cells);
        }
        let of = |from, to| {
            let links = report
                .links
                .iter()
                .filter(|link| link.test == LinkTest::Rows);
            let mut links = links.filter(|link| (link.from, link.to) == (Rank(from), Rank(to)));
            links.next().unwrap().state
        };
        [of(0, 1), of(1, 0)]
    }
    let (slow, well) = (LinkState::Slow, LinkState::Well);
    assert_eq!(states([200_000, 450_000], [5_000; 2]), [slow, slow]);
    assert_eq!(states([12_000, 120_000], [5_000; 2]), [well, slow]);
    // The link back is slow, by 110 µs for anything.
    assert_eq!(states([122_000, 250_000], [115_000; 2]), [well, slow]);
}

#[test]
fn pairs_with_a_bad_link_are_left_out_of_later_tests() {
    let mut cells = Cells::none(3);
    for (rank, peer) in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)] {
        cells.set(Rank(rank), Rank(peer), cell(Well, Well, 5));
    }
    cells.set(Rank(2), Rank(0), cell(Well, Missing, 5));
    let mut peers = Cells::all_peers(3);
    assert_eq!(peers, [0b110, 0b101, 0b011]);
    cells.leave_out_bad(&mut peers);
    assert_eq!(peers, [0b010, 0b101, 0b010]);
    assert_eq!(Cells::all_peers(64)[63], u64::MAX >> 1);
}
