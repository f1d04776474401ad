//! Rounds that are given up: what comes after them, a rank that combines what others give up, and rows of a
//! later dispatch at the places of an earlier one.

use ferry::layout::Kernel;
use ferry::*;
use ferry_rig::verify::{Contents, Oracle};
use ferry_rig::{
    Case, Dice, HALVES, Return, Run, Session, Settings, any_case, any_rows_case, drawn, draws_all,
    factors, inline_case, some_keep_rows,
};
use ferry_tests::damaged::guarded::GuardedGroup;

/// A case of a seed for a session, which makes rounds of its own.
fn session_case(seed: u64) -> Case {
    let case = match seed % 3 {
        0 => inline_case(seed),
        _ => any_case(seed),
    };
    Case {
        counted: None,
        tokens: case.tokens.iter().cycle().take(3).cloned().collect(),
        ..some_keep_rows(case)
    }
}

/// A session of a case, and what its results are compared with in a round.
struct Rig {
    case: Case,
    session: Session,
}

impl Rig {
    fn new(group: &Group, case: Case) -> Self {
        let settings = Settings {
            split: case.is_split(0),
            ..case.settings(case.config(), &case.problems())
        };
        let session = Session::new(group, &settings).unwrap();
        Self { case, session }
    }

    fn scale(&self, round: usize) -> Vec<f32> {
        factors(self.case.experts, round)
    }

    fn oracle(&self, round: usize) -> Oracle {
        let (problem, scale) = (self.case.problem(round), self.scale(round));
        let compared = self.case.compared();
        Oracle::of(&problem, &scale, self.case.format, compared)
    }

    /// Uploads the inputs of a round and dispatches on all ranks; the host plays the experts.
    fn dispatch(&mut self, round: usize) {
        let problem = self.case.problem(round);
        self.session.upload(0, &problem).unwrap();
        self.session.poison().unwrap();
        self.session.launch_halves(0..2).unwrap();
        self.session.synchronize().unwrap();
        let scale = self.scale(round);
        self.session.run_experts(&problem, &scale).unwrap();
    }

    /// Combines on a rank.
    fn combine(&mut self, rank: usize) {
        (2..HALVES).for_each(|half| self.session.launch_half(rank, half).unwrap());
    }

    fn give_up(&mut self, rank: usize) {
        let (communicator, stream) = self.session.local(rank);
        communicator.give_up(stream).unwrap();
    }

    /// Requires that the sums of a rank are those of the oracle.
    fn assert_sums(&self, round: usize, rank: usize) {
        let is_summed = self.case.how != Return::Apart;
        let oracle = self.oracle(round);
        let wanted = &oracle.combined(self.case.how.mode(), is_summed)[rank];
        let found = &self.session.outputs().unwrap()[rank].combined;
        oracle
            .verify_combined(rank, wanted, found)
            .unwrap_or_else(|error| panic!("{error:#}: round {round} of {:?}", self.case));
    }

    /// Whether each rank has timed out on another, or one on it. Nothing else may have happened.
    fn have_timed_out(&self) -> Vec<bool> {
        let outcomes = self.session.outcomes().into_iter();
        let told = outcomes.map(|(rank, outcome)| match outcome {
            Ok(_) => false,
            Err(Error::Fault(fault) | Error::Poisoned(fault)) => {
                assert_eq!(
                    fault.kind,
                    FaultKind::PeerTimeout,
                    "{fault}: {:?}",
                    self.case
                );
                true
            }
            Err(Error::PeerGaveUp { .. }) => true,
            Err(error) => panic!("rank {rank}: {error}: {:?}", self.case),
        });
        told.collect()
    }
}

/// Some ranks combine a round that the others give up. A sum that is made is right, and nobody gets beyond
/// the next dispatch.
#[test]
fn a_round_that_only_some_give_up_ends_in_time_outs_and_never_in_wrong_sums() {
    let (mut right, mut early) = (0, 0);
    for seed in drawn(60_000..60_240) {
        let mut dice = Dice::new(seed);
        let case = session_case(seed);
        let machine = simulator::Options {
            // Rows come back to ranks that have given up their round.
            allow_late_signals: true,
            ..case.machine()
        };
        let group = Group::simulated_with(machine).unwrap();
        let mut rig = Rig::new(&group, case);
        rig.dispatch(0);
        let ranks = 0..rig.case.ranks;
        ranks.clone().for_each(|rank| rig.combine(rank));
        rig.session.synchronize().unwrap();
        rig.dispatch(1);
        let combiner = dice.below(rig.case.ranks);
        let giver = (combiner + 1 + dice.below(rig.case.ranks - 1)) % rig.case.ranks;
        let bits = (dice.bits() | 1 << combiner) & !(1 << giver);
        let combines = |rank: usize| bits >> rank & 1 != 0;
        for rank in ranks.clone() {
            if combines(rank) {
                rig.combine(rank);
            } else {
                rig.give_up(rank);
            }
        }
        for (rank, has_timed_out) in rig.have_timed_out().into_iter().enumerate() {
            early += u32::from(has_timed_out);
            if combines(rank) && !has_timed_out {
                rig.assert_sums(1, rank);
                right += 1;
            }
        }
        rig.session.upload(0, &rig.case.problem(2)).unwrap();
        for rank in ranks {
            for half in 0..2 {
                // Refused on ranks that have timed out.
                let _ = rig.session.launch_half(rank, half);
            }
        }
        let all = rig.have_timed_out();
        assert!(
            all.iter().all(|is_over| *is_over),
            "{all:?}: {:?}",
            rig.case
        );
        rig.session.close_after_fault().unwrap();
    }
    println!("{right} right sums, {early} time-outs in the round itself");
    assert!(
        (right > 20 && early > 100) || !draws_all(),
        "{right}, {early}"
    );
}

/// Launches of a dispatch and its end without a combine are repeated, as a graph of both repeats them, with
/// whole rounds of calls between.
#[test]
fn a_dispatch_and_its_end_are_repeated_like_a_graph() {
    for seed in drawn(61_000..61_060) {
        let (mut dice, case) = (Dice::new(seed), session_case(seed));
        let case = Case {
            // A graph keeps the number of tokens.
            tokens: vec![case.tokens[0].clone(); 3],
            ..case
        };
        let group = Group::simulated_with(case.machine()).unwrap();
        // SAFETY: neither group is closed.
        let guarded = unsafe { GuardedGroup::new(&group, 0) }.unwrap();
        let mut rig = Rig::new(&guarded.group, case);
        let ranks = 0..rig.case.ranks;
        rig.dispatch(0);
        ranks.clone().for_each(|rank| rig.give_up(rank));
        let graph = guarded.take_launches();
        for round in 1..3 {
            for _ in 0..1 + dice.below(3) {
                // SAFETY: the session has all that its launches name.
                unsafe { guarded.repeat(&graph) }.unwrap();
            }
            rig.dispatch(round);
            ranks.clone().for_each(|rank| rig.combine(rank));
            rig.session.synchronize().unwrap();
            ranks.clone().for_each(|rank| rig.assert_sums(round, rank));
        }
        rig.session.close().unwrap();
    }
}

/// A launch that does not follow a dispatch, of a graph that is launched at the wrong time, is refused.
#[test]
fn a_round_is_given_up_once() {
    for seed in drawn(62_000..62_060) {
        let case = session_case(seed);
        let group = Group::simulated_with(case.machine()).unwrap();
        // SAFETY: neither group is closed.
        let guarded = unsafe { GuardedGroup::new(&group, 0) }.unwrap();
        let mut rig = Rig::new(&guarded.group, case);
        rig.dispatch(0);
        guarded.take_launches();
        (0..rig.case.ranks).for_each(|rank| rig.give_up(rank));
        let end = guarded.take_launches();
        rig.session.synchronize().unwrap();
        // SAFETY: the session has all that its launches name.
        unsafe { guarded.repeat(&end) }.unwrap();
        for (rank, outcome) in rig.session.outcomes() {
            let Err(Error::Fault(fault)) = outcome else {
                panic!("rank {rank}: {outcome:?}: {:?}", rig.case);
            };
            let found = (fault.kind, fault.kernel, fault.last_launch());
            let last = Some((Kernel::GiveUp, 1));
            assert_eq!(
                found,
                (FaultKind::OutOfTurn, Kernel::GiveUp, last),
                "{fault}"
            );
        }
        rig.session.close_after_fault().unwrap();
    }
}

/// The ids of one dispatch in another, with other tokens, whether the one between was given up or combined:
/// in every layout each row comes to the same place. Both are compared with the oracle, too.
#[test]
fn the_same_ids_put_rows_at_the_same_places() {
    for seed in drawn(63_000..63_300) {
        let case = match seed % 2 {
            0 => any_case(seed),
            _ => any_rows_case(seed),
        };
        let first = case.tokens[0].clone();
        let case = Case {
            short: false,
            // Bit 1 is drawn.
            given_up: case.given_up | 1,
            tokens: vec![first; 4],
            ..case
        };
        let mut problems = case.problems();
        let ids: Vec<_> = problems[0]
            .inputs
            .iter()
            .map(|input| input.topk_ids.clone())
            .collect();
        for problem in &mut problems[1..] {
            for (input, ids) in problem.inputs.iter_mut().zip(&ids) {
                input.topk_ids.clone_from(ids);
            }
        }
        let run = Run::with(&case, &problems, |_, _| {});
        for rank in 0..case.ranks {
            let places = |round| match run.contents(round, rank) {
                Contents::ByExpert(rows) => {
                    let end = *rows.row_offsets.last().unwrap() as usize;
                    let sources = rows.tables.sources.iter();
                    let mut info: Vec<_> = sources.map(|&[_, token, slot]| [token, slot]).collect();
                    info.extend(rows.src_info);
                    (rows.row_offsets, info[..end].to_vec(), vec![])
                }
                Contents::Rows(rows) => {
                    let of_sources = rows.source_counts.iter().map(|&rows| rows as u32);
                    (of_sources.collect(), rows.src_info, rows.ids)
                }
            };
            let first = places(0);
            for round in 1..4 {
                assert_eq!(places(round), first, "round {round}, rank {rank}: {case:?}");
            }
        }
        run.expect_success();
    }
}
