//! Launches that are repeated as a graph of a part of a round repeats them: in turn they make rounds as any
//! others do, out of turn the device refuses them, and nothing of the round is touched.

use ferry::layout::Kernel;
use ferry::*;
use ferry_layout::{Counter, CulpritWord, Window};
use ferry_rig::verify::Oracle;
use ferry_rig::{
    Case, Dice, HALVES, Return, Session, Settings, any_case, drawn, factors, inline_case,
};
use ferry_tests::damaged::guarded::GuardedGroup;

/// Launches of one half on each rank.
type Piece = Vec<(Rank, device::Launch)>;

/// A session whose launches can be repeated.
struct Rig {
    case: Case,
    session: Session,
    guarded: GuardedGroup,
    /// Launches of each half of the last round.
    halves: [Piece; HALVES],
}

/// A case of a seed, of which all ranks make fused calls, or all split ones. Some inputs are counted on the
/// device.
fn case_of(seed: u64, is_split: bool) -> Case {
    let case = match seed % 3 {
        0 => inline_case(seed),
        _ => any_case(seed),
    };
    let mut tokens = case.tokens.clone();
    tokens.truncate(2);
    Case {
        split: if is_split { u64::MAX } else { 0 },
        shared_expert: case.shared_expert && case.counted.is_none(),
        tokens,
        ..case
    }
}

impl Rig {
    fn new(case: Case) -> Self {
        let group = Group::simulated_with(case.machine()).unwrap();
        // SAFETY: neither group is closed.
        let guarded = unsafe { GuardedGroup::new(&group, 0) }.unwrap();
        let settings = Settings {
            counted: case.counted.is_some(),
            ..case.settings(case.config(), &case.problems())
        };
        Self {
            session: Session::new(&guarded.group, &settings).unwrap(),
            case,
            guarded,
            halves: [const { Vec::new() }; HALVES],
        }
    }

    fn ranks(&self) -> Vec<usize> {
        (0..self.case.ranks).collect()
    }

    /// Enqueues half `half` of a round on these ranks.
    fn enqueue(&mut self, ranks: &[usize], half: usize) {
        for &rank in ranks {
            self.session.launch_half(rank, half).unwrap();
        }
        self.halves[half] = self.guarded.take_launches();
    }

    /// Uploads the inputs of round `round` and enqueues its first `halves` halves on all ranks; all end well.
    fn begin(&mut self, round: usize, halves: usize) {
        self.session.upload(0, &self.case.problem(round)).unwrap();
        self.session.poison().unwrap();
        for half in 0..halves {
            self.enqueue(&self.ranks(), half);
        }
        self.session.synchronize().unwrap();
    }

    /// Enqueues what half `half` launched on these ranks, again.
    fn repeat(&self, ranks: &[usize], half: usize) {
        let of_ranks = |(rank, _): &&(Rank, _)| ranks.contains(&(rank.0 as usize));
        let launches: Vec<_> = self.halves[half].iter().filter(of_ranks).cloned().collect();
        // SAFETY: the session has all that its launches name.
        unsafe { self.guarded.repeat(&launches) }.unwrap();
    }

    /// Runs a round whose experts' rows are put there by the host, and compares it. `piece` enqueues a half.
    fn round(&mut self, round: usize, piece: impl Fn(&mut Self, usize)) {
        let problem = self.case.problem(round);
        self.session.upload(0, &problem).unwrap();
        self.session.poison().unwrap();
        let scale = factors(self.case.experts, round);
        let compared = self.case.compared();
        let oracle = Oracle::of(&problem, &scale, self.case.format, compared);
        for half in 0..HALVES {
            piece(self, half);
            if half == 1 {
                self.session.synchronize().unwrap();
                self.session.run_experts(&problem, &scale).unwrap();
            }
        }
        self.session.synchronize().unwrap();
        let is_summed = self.case.how != Return::Apart;
        oracle
            .verify(
                self.case.how.mode(),
                is_summed,
                &self.session.outputs().unwrap(),
            )
            .unwrap_or_else(|error| panic!("{error:#}: round {round} of {:?}", self.case));
    }

    /// Windows, workspaces and outputs of all ranks, with what each is of.
    fn memory(&mut self) -> Vec<(usize, &'static str, Vec<u8>)> {
        let (windows, shape) = (self.guarded.windows(), *self.session.plan().shape());
        let mut memory = Vec::new();
        for rank in self.ranks() {
            let workspace = self.session.local(rank).0.device_pointers().counters;
            // SAFETY: the workspace of a rank, from its counters on.
            let workspace =
                unsafe { DevicePtr::new(workspace, self.session.plan().workspace_bytes()) };
            let device = self.guarded.group.device(Rank(rank as u32)).unwrap();
            let mut read = |what, at: DevicePtr, bytes: u64| {
                let mut held = vec![0; bytes as usize];
                device.download(at, &mut held).unwrap();
                memory.push((rank, what, held));
            };
            read("window", windows[rank], Window::of(&shape).bytes);
            read("workspace", workspace, workspace.bytes());
            for at in self.session.written(rank) {
                read("output", at, at.bytes());
            }
        }
        memory
    }

    /// Requires that launches out of turn on `culprits` changed nothing of `before` but what says that they
    /// gave up. What says so to another node may still be on its way.
    fn assert_untouched(&mut self, before: &[(usize, &'static str, Vec<u8>)], culprits: &[usize]) {
        let shape = *self.session.plan().shape();
        let window = Window::of(&shape);
        let told = [
            Counter::Aborted,
            Counter::FaultLock,
            Counter::FaultRecord,
            Counter::CulpritTold,
        ];
        let after = self.memory();
        for ((rank, what, before), (_, _, after)) in before.iter().zip(after) {
            let mut expected = before.clone();
            if *what == "window" {
                for &culprit in culprits {
                    let culprit = Rank(culprit as u32);
                    let at = window.culprit(culprit).bytes() as usize;
                    let word = CulpritWord::of(culprit).0.to_le_bytes();
                    if shape.same_node(culprit, Rank(*rank as u32)) || after[at..at + 8] == word {
                        expected[at..at + 8].copy_from_slice(&word);
                    }
                }
            }
            if *what == "workspace" && culprits.contains(rank) {
                for counter in told {
                    let at = counter.bytes() as usize;
                    expected[at..at + 8].copy_from_slice(&after[at..at + 8]);
                }
            }
            let differs = || expected.iter().zip(&after).position(|(a, b)| a != b);
            // Slices are compared many bytes at a time.
            if expected != after {
                panic!(
                    "{what} of rank {rank} differs at {:?}: {:?}",
                    differs(),
                    self.case
                );
            }
        }
    }

    /// Requires that each of `culprits` was refused `kernel` of `epoch`, and names `last` as its launch
    /// before.
    fn assert_refused(
        &self,
        culprits: &[usize],
        kernel: Kernel,
        epoch: u64,
        last: (Kernel, u64),
    ) -> Vec<Fault> {
        let outcomes = self.session.outcomes();
        culprits
            .iter()
            .map(|&rank| {
                let Err(Error::Fault(fault)) = outcomes[rank].1 else {
                    panic!("rank {rank}: {:?}\n{:?}", outcomes[rank].1, self.case);
                };
                let me = Rank(rank as u32);
                assert_eq!(fault.kind, FaultKind::OutOfTurn, "{fault}\n{:?}", self.case);
                assert_eq!(
                    (fault.rank, fault.peer, fault.culprit),
                    (me, me, me),
                    "{fault}"
                );
                assert_eq!((fault.kernel, fault.epoch), (kernel, epoch), "{fault}");
                assert_eq!(fault.last_launch(), Some(last), "{fault}");
                fault
            })
            .collect()
    }

    /// Requires that all others, which go on with the round's halves from `half` on and then with the
    /// next dispatch, give up on the culprit, and that it can do nothing any more.
    fn assert_named(&mut self, culprit: usize, fault: Fault, half: usize) {
        let others: Vec<usize> = self.ranks().into_iter().filter(|&r| r != culprit).collect();
        let rest = half..HALVES;
        for half in rest.chain(0..2) {
            self.enqueue(&others, half);
        }
        let outcomes = self.session.outcomes();
        for &rank in &others {
            let Err(Error::Fault(fault)) = outcomes[rank].1 else {
                panic!("rank {rank}: {:?}\n{:?}", outcomes[rank].1, self.case);
            };
            let named = (fault.kind, fault.culprit);
            let wanted = (FaultKind::PeerTimeout, Rank(culprit as u32));
            assert_eq!(named, wanted, "{fault}\n{:?}", self.case);
        }
        let again = self.session.launch_half(culprit, half % HALVES);
        assert!(
            matches!(again, Err(Error::Poisoned(first)) if first == fault),
            "{again:?}"
        );
    }

    /// Ranks whose launches are repeated: one of them, or all.
    fn culprits(&self, dice: &mut Dice) -> Vec<usize> {
        match dice.below(3) {
            0 => self.ranks(),
            _ => vec![dice.below(self.case.ranks)],
        }
    }
}

/// Repeats the half of a round that came last, and what belongs to it, on one rank or on all.
fn repeat_last(seeds: std::ops::Range<u64>, halves: usize) {
    for seed in drawn(seeds) {
        let is_split = seed % 2 == 1;
        let mut dice = Dice::new(seed);
        let mut rig = Rig::new(case_of(seed, is_split));
        rig.begin(0, HALVES);
        rig.begin(1, halves);
        let before = rig.memory();
        let culprits = rig.culprits(&mut dice);
        rig.repeat(&culprits, halves - 2);
        rig.repeat(&culprits, halves - 1);
        let (kernels, epoch) = match (halves, is_split) {
            (2, false) => ((Kernel::Dispatch, Kernel::Dispatch), 2),
            (2, true) => ((Kernel::DispatchAsync, Kernel::DispatchWait), 2),
            (_, false) => ((Kernel::Combine, Kernel::Combine), 3),
            (_, true) => ((Kernel::CombineAsync, Kernel::CombineWait), 3),
        };
        let faults = rig.assert_refused(&culprits, kernels.0, epoch, (kernels.1, 2));
        rig.assert_untouched(&before, &culprits);
        if let ([culprit], [fault]) = (&culprits[..], &faults[..]) {
            rig.assert_named(*culprit, *fault, halves);
        }
        // One that gave up waits for nobody.
        rig.session.close_after_fault().unwrap();
    }
}

#[test]
fn a_dispatch_before_its_predecessors_combine_is_refused() {
    repeat_last(30_000..30_120, 2);
}

#[test]
fn a_combine_without_a_dispatch_of_its_own_is_refused() {
    repeat_last(31_000..31_120, HALVES);
}

/// Split calls: so many halves of the second round, then a half that is not the next one. On one node:
/// rows of a half that only sends may come to another node later.
#[test]
fn a_half_out_of_turn_is_refused() {
    use Kernel::{CombineAsync, CombineWait, DispatchAsync, DispatchWait};
    let kernels = [DispatchAsync, DispatchWait, CombineAsync, CombineWait];
    for halves in 1..=HALVES {
        for half in (0..HALVES).filter(|half| *half != halves % HALVES) {
            for seed in drawn(32_000..32_006) {
                let case = case_of(seed + 10 * (HALVES * halves + half) as u64, true);
                let mut rig = Rig::new(Case {
                    p2p_world_size: case.ranks,
                    ..case
                });
                rig.begin(0, HALVES);
                let pieces = rig.halves.clone();
                rig.begin(1, halves);
                let before = rig.memory();
                let culprits = rig.culprits(&mut Dice::new(seed));
                rig.halves = pieces;
                rig.repeat(&culprits, half);
                let epoch = if halves == HALVES { 3 } else { 2 };
                let last = (kernels[halves - 1], 2);
                rig.assert_refused(&culprits, kernels[half], epoch, last);
                rig.assert_untouched(&before, &culprits);
                rig.session.close_after_fault().unwrap();
            }
        }
    }
}

/// Pieces that were launched once are repeated for many rounds, each at its turn, with experts between them
/// that the host plays, and with rounds of calls among them.
#[test]
fn pieces_in_turn_make_rounds() {
    for seed in drawn(33_000..33_060) {
        let mut case = case_of(seed, seed % 2 == 1);
        let mut dice = Dice::new(seed);
        // A graph keeps the number of tokens, unless the device counts them.
        if case.counted.is_none() {
            case.tokens = vec![case.tokens[0].clone(); 2];
        }
        case.tokens = case.tokens.iter().cycle().take(8).cloned().collect();
        let mut rig = Rig::new(case);
        for round in 0..8 {
            let is_called = round == 0 || dice.below(4) == 0;
            rig.round(round, |rig, half| {
                if is_called {
                    rig.enqueue(&rig.ranks(), half)
                } else {
                    rig.repeat(&rig.ranks(), half)
                }
            });
        }
        rig.session.close().unwrap();
    }
}
