//! If every rank has all tokens, dispatch and combine on simulated ranks give what the oracle gives of
//! each rank's share, bit for bit, whatever the order of events.

use ferry::*;
use ferry_reference::{Problem, RankInput, bf16};
use ferry_rig::{Case, Options, Return, Session, Settings, Turn, local_case, run_all};

#[test]
fn any_case_1() {
    run_all(0..200, local_case);
}

#[test]
fn any_case_2() {
    run_all(200..400, local_case);
}

/// The device says how many tokens there are, fewer than there are rows, or as many.
#[test]
fn tokens_that_the_device_counts() {
    run_all(400..560, |seed| Case {
        counted: Some([0, 1, 3, 40][seed as usize % 4]),
        ..local_case(seed)
    });
}

/// Epilogues, other elements and weights of the experts' rows; and these with tokens that the device counts.
#[test]
fn sums_with_options() {
    run_all(600..800, |seed| {
        let case = local_case(seed);
        Case {
            how: [Return::Reduced, Return::Exact][seed as usize / 2 % 2],
            finish: Some(Options::any(seed)),
            counted: [None, Some(3)][seed as usize % 2],
            ..case
        }
    });
}

/// Outputs that hold fewer rows than come: the first ones are there, the others are no part of the sums.
#[test]
fn outputs_that_are_too_small() {
    run_all(800..1_000, |seed| Case {
        short: true,
        counted: [None, None, Some(3)][seed as usize % 3],
        ..local_case(seed)
    });
}

/// So many experts that a block has no room for the positions of all its tokens beside their counts.
#[test]
fn as_many_experts_as_a_block_can_count() {
    run_all(1_000..1_012, |seed| {
        let case = local_case(seed);
        Case {
            experts: 2680 * case.ranks,
            most_tokens: 300,
            tokens: [300, 1, 40].map(|tokens| vec![tokens; case.ranks]).to_vec(),
            hidden: 128,
            format: TokenFormat::ALL[seed as usize % TokenFormat::ALL.len()],
            ..case
        }
    });
}

/// Faults of a round on each rank, with `ids` in place of the case's.
fn faults_of(case: &Case, ids: &[i32], rows: usize) -> Vec<Fault> {
    let tokens = ids.len() / case.top_k;
    let input = RankInput {
        tokens,
        x: vec![bf16::ZERO; tokens * case.hidden],
        topk_ids: ids.to_vec(),
        topk_weights: vec![1.0; ids.len()],
    };
    let problem = Problem {
        ranks: case.ranks,
        experts: case.experts,
        top_k: case.top_k,
        hidden: case.hidden,
        inputs: vec![input; case.ranks],
    };
    let mut settings = Settings::of(case.config(), &[]);
    settings.capacity.rows = rows;
    let group = Group::simulated(case.ranks as u32, case.seed).unwrap();
    let mut session = Session::new(&group, &settings).unwrap();
    session.upload(0, &problem).unwrap();
    session.launch_all(Turn::RETURNED).unwrap();
    let outcomes = session.outcomes().into_iter();
    let faults = outcomes.filter_map(|(_, told)| match told {
        Err(Error::Fault(fault) | Error::Poisoned(fault)) => Some(fault),
        told => told.unwrap().map(|InputFault(fault)| fault),
    });
    let faults = faults.collect();
    session.close().unwrap();
    faults
}

/// Three ranks of four experts each, two a token, BF16.
fn small() -> Case {
    Case {
        ranks: 3,
        experts: 12,
        top_k: 2,
        hidden: 16,
        tokens: Vec::new(),
        most_tokens: 4,
        format: TokenFormat::Bf16,
        how: Return::Reduced,
        shared_expert: false,
        ..local_case(1)
    }
}

#[test]
fn an_id_of_no_expert_is_told_by_every_rank_as_it_was_given() {
    // -1, and experts of other ranks, are none of a rank's faults.
    assert_eq!(faults_of(&small(), &[11, 0, -1, 4], 8), []);
    for id in [12, -2, i32::MAX, i32::MIN] {
        let faults = faults_of(&small(), &[11, 0, 3, id], 8);
        for (rank, fault) in faults.iter().enumerate() {
            assert_eq!(fault.kind, FaultKind::InvalidExpert, "{fault}");
            assert_eq!(fault.rank, Rank(rank as u32), "{fault}");
            assert_eq!((fault.index, fault.peer), (1, Rank(1)), "{fault}");
            assert_eq!((fault.saw as i32, fault.wanted), (id, 12), "{fault}");
        }
        assert_eq!(faults.len(), 3, "id {id}");
    }
}

#[test]
fn an_expert_twice_in_a_token_is_told_where_that_is_looked_for() {
    let ids = [11, 11, 3, 4];
    assert_eq!(faults_of(&small(), &ids, 8), []);
    let checked = Case {
        debug_checks: true,
        ..small()
    };
    let faults = faults_of(&checked, &ids, 8);
    assert_eq!(faults.len(), 3);
    for fault in faults {
        assert_eq!((fault.kind, fault.saw), (FaultKind::DuplicateExpert, 11));
    }
}

#[test]
fn outputs_that_are_too_small_are_told_by_the_rank_that_has_them() {
    // Rank 1 gets three rows, the others none.
    let faults = faults_of(&small(), &[4, 7, 5, -1], 2);
    assert_eq!(faults.len(), 1);
    let fault = faults[0];
    assert_eq!(fault.kind, FaultKind::OutputTooSmall, "{fault}");
    assert_eq!((fault.rank, fault.peer), (Rank(1), Rank(1)), "{fault}");
    assert_eq!((fault.saw, fault.wanted), (3, 2), "{fault}");
    assert_eq!(faults_of(&small(), &[4, 7, 5, -1], 3), []);
}

#[test]
fn split_calls_are_refused_and_the_round_goes_on() {
    let case = small();
    let group = Group::simulated(3, 1).unwrap();
    let plan = Plan::new(&group, case.config()).unwrap();
    // Any other rank's tokens come too: as many rows as one rank's can be.
    assert_eq!((plan.max_rows(), plan.local_experts()), (8, 4));
    let mut ranks = Communicator::new(&group, &plan).unwrap();
    let (rank, stream) = (&mut ranks[1], Stream::DEFAULT);
    let device = rank.device().clone();
    let x = device.upload_tensor([1, 16], &[0u16; 16]).unwrap();
    let ids = device.upload_tensor([1, 2], &[4, 5]).unwrap();
    let (input, rows) = (
        DispatchInput::new(x, ids),
        DispatchBuffers::new(&device, &plan).unwrap(),
    );
    let refused = rank.dispatch_async(stream, &input);
    let Err(Error::SplitWithoutTravel { call }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(call, "dispatch_async");
    let sums = CombineBuffers::new(&device, &plan).unwrap();
    let (experts, sums) = (
        CombineInput::new(rows.output().tokens.unwrap()),
        sums.output(1).unwrap(),
    );
    assert_eq!(rank.round(), Round::Idle);
    rank.dispatch(stream, &input, rows.output()).unwrap();
    let refused = rank.combine_async(stream, &experts, &sums);
    assert!(
        matches!(&refused, Err(Error::SplitWithoutTravel { call }) if *call == "combine_async"),
        "{refused:?}"
    );
    assert_eq!(rank.round(), Round::Dispatched);
    rank.combine(stream, &experts, &sums).unwrap();
    assert_eq!(rank.synchronize(stream).unwrap().fault(), None);
}
