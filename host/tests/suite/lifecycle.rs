//! The beginning and the end of a communicator, over a fabric that only takes notes.

use std::sync::{Arc, Mutex};

use crate::noted::*;
use ferry::device::{Args, CombineWith, DispatchWith, FaultPage, Launch};
use ferry::*;
use ferry_layout::{Common, PROTOCOL_VERSION};

#[test]
fn a_communicator_begins_and_ends_in_order() {
    let notes = Arc::default();
    let rank = start(&notes, 2, config()).unwrap();
    let begun = [
        "all_gather",
        "alloc",
        "alloc",
        "all_gather",
        "alloc_windows",
        "fill 0",
        "fill 0",
        "fill 255",
        "upload",
        "all_gather",
    ];
    assert_eq!(notes.take(), begun);
    rank.close().unwrap();
    assert_eq!(
        notes.take(),
        [
            // Whether a kernel gave up, and whether a peer gave up on this rank.
            "download",
            "download",
            "free",
            "free",
            "drop page",
            "barrier",
            "free_windows"
        ]
    );
}

#[test]
#[expect(clippy::too_many_lines, reason = "one round, call by call")]
fn a_round_does_nothing_but_launch() {
    let notes = Arc::default();
    let mut rank = start(
        &notes,
        2,
        Config {
            p2p_world_size: Some(1),
            ..config()
        },
    )
    .unwrap();
    let (input, output) = empty_tensors(&rank);
    notes.take();
    let combine = CombineInput::new(output.tokens.unwrap());
    let apart = Tensor::contiguous(memory(8192), DataType::Bf16, [2, 1, 8]);
    let combined = CombineOutput::Apart(apart);
    // SAFETY: `Stream::new` is about a device's streams, and the noted fabric has none.
    let stream = unsafe { Stream::new(9) };
    rank.dispatch(stream, &input, &output).unwrap();
    rank.combine(stream, &combine, &combined).unwrap();
    rank.dispatch_async(stream, &input).unwrap();
    rank.dispatch_wait(stream, &output).unwrap();
    rank.combine_async(stream, &combine, &combined).unwrap();
    rank.combine_wait(stream).unwrap();
    let kernels = [
        "dispatch",
        "combine",
        "dispatch_async",
        "dispatch_wait",
        "combine_async",
        "combine_wait",
    ];
    assert_eq!(notes.take(), kernels);

    let launches = notes.launches.lock().unwrap().clone();
    for launch in &launches {
        assert_eq!(
            (launch.shmem, launch.max_sms, launch.stream),
            (true, Some(5), stream)
        );
        let common = match launch.args {
            Args::Dispatch(with) => with.args.common,
            Args::Combine(with) => with.args.common,
            Args::Counts(args) => args.common,
            Args::GiveUp(args) => args.common,
            Args::Links(_) | Args::Silu(_) => panic!("a kernel that nobody asked for"),
        };
        assert_eq!(
            (common.deadline_ns, common.debug_checks, common.rank),
            (7_000_000, 1, 0)
        );
        assert_eq!(
            (common.shape, common.fault_page),
            (*rank.plan().shape(), 64)
        );
    }
    let inputs = |launch: &Launch| match launch.args {
        Args::Dispatch(DispatchWith { args, .. }) => {
            [args.x, args.topk_ids, args.topk_weights, args.input_scale]
        }
        _ => panic!("not a dispatch"),
    };
    assert_eq!(inputs(&launches[2]), [4096, 4096, 0, 0]);
    // The input is free by now.
    assert_eq!(inputs(&launches[3]), [0; 4]);
    let Args::Dispatch(DispatchWith { args, .. }) = launches[3].args else {
        panic!("not a dispatch")
    };
    assert_eq!((args.output_tokens, args.common.tokens), (16384, 2));
    let Args::Combine(CombineWith { args, .. }) = launches[5].args else {
        panic!("not a combine")
    };
    assert_eq!(
        (args.combined, args.common.tokens, args.row_capacity),
        (8192, 2, 6)
    );
    rank.close().unwrap();
}

#[test]
fn ranks_that_were_configured_differently_name_the_fields() {
    // Fingerprint, experts, top_k, hidden, max_tokens_per_rank, p2p_world_size, format, combine, receive.
    let theirs = [0xabc, 2, 1, 16, 4, 2, 1, 0, 0];
    let notes = Arc::new(Notes {
        rank_1_says: Mutex::new(theirs.to_vec()),
        ..Notes::default()
    });
    let refused = start(&notes, 2, config()).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "rank 0 and rank 1 were configured differently: hidden is 8 on rank 0 and 16 on rank 1, format is \
         bf16 on rank 0 and fp8 on rank 1, combine is exact on rank 0 and reduced on rank 1"
    );
}

/// Builds differ, and fields do not.
#[test]
fn ranks_of_other_builds_name_both_fingerprints() {
    let notes = Arc::new(Notes {
        rank_1_says: Mutex::new(vec![0xabc]),
        ..Notes::default()
    });
    let refused = start(&notes, 2, config()).unwrap_err();
    let Error::ShapeMismatch {
        rank: Rank(0),
        peer: Rank(1),
        ours,
        theirs: 0xabc,
        ref fields,
    } = refused
    else {
        panic!("{refused}")
    };
    assert_eq!(fields, &[]);
    assert!(
        refused.to_string().contains("0x0000000000000abc"),
        "{refused}"
    );
    assert!(
        refused.to_string().contains(&format!("{ours:#018x}")),
        "{refused}"
    );
    assert_eq!(notes.take(), ["all_gather"; 13]);
    let fabric = NotedFabric { notes, ranks: 2 };
    let group = Group::with_fabric(Box::new(fabric)).unwrap();
    assert_eq!(ours, fingerprint(&Plan::new(&group, config()).unwrap()));
}

/// Fingerprint of everything that ranks must agree on, including layout and protocol.
fn fingerprint(plan: &Plan) -> u64 {
    Common::of(plan.shape()).fingerprint(PROTOCOL_VERSION, false, false)
}

#[test]
fn a_rank_that_fails_to_begin_is_named_and_nothing_is_kept() {
    let says = |notes: &Notes, plan: &[u64]| *notes.rank_1_says.lock().unwrap() = plan.to_vec();
    let notes = Arc::<Notes>::default();
    let rank = start(&notes, 2, config()).unwrap();
    let same = fingerprint(rank.plan());
    rank.close().unwrap();
    notes.take();

    says(&notes, &[same, 0]);
    let refused = start(&notes, 2, config()).unwrap_err();
    assert!(
        matches!(refused, Error::PeerFailed { rank: Rank(1), .. }),
        "{refused}"
    );
    let kept = [
        "all_gather",
        "alloc",
        "alloc",
        "all_gather",
        "free",
        "free",
        "drop page",
    ];
    assert_eq!(notes.take(), kept);

    says(&notes, &[same, 1, 0]);
    let refused = start(&notes, 2, config()).unwrap_err();
    assert!(
        matches!(refused, Error::PeerFailed { rank: Rank(1), .. }),
        "{refused}"
    );
    let calls = notes.take();
    assert_eq!(
        calls[calls.len() - 4..],
        ["free_windows", "free", "free", "drop page"]
    );
}

#[test]
fn a_rank_that_fails_itself_still_tells_the_others() {
    let notes = Arc::new(Notes {
        refuse_alloc: true,
        ..Notes::default()
    });
    assert!(matches!(
        start(&notes, 2, config()),
        Err(Error::RankCount { ranks: 0 })
    ));
    assert_eq!(
        notes.take(),
        ["all_gather", "alloc", "drop page", "all_gather"]
    );
}

#[test]
fn dropped_without_close_and_at_work_nothing_is_freed() {
    let notes = Arc::default();
    let mut rank = start(&notes, 1, config()).unwrap();
    round(&mut rank, Stream::DEFAULT).unwrap();
    notes.take();
    drop(rank);
    assert_eq!(notes.take(), [""; 0]);
}

#[test]
fn after_a_timeout_close_waits_for_nobody() {
    for (ranks, then) in [(1, &["barrier", "free_windows"][..]), (2, &[])] {
        let notes = Arc::default();
        let mut rank = start(&notes, ranks, config()).unwrap();
        let (input, output) = empty_tensors(&rank);
        notes.take();
        *notes.page.lock().unwrap() = FaultPage::of(&timeout(), 1);
        let refused = rank.dispatch(Stream::DEFAULT, &input, &output);
        assert!(matches!(refused, Err(Error::Poisoned(fault)) if fault == timeout()));
        assert!(matches!(rank.check(), Err(Error::Poisoned(_))));
        rank.close().unwrap();
        assert_eq!(
            notes.take(),
            [&["free", "free", "drop page"][..], then].concat()
        );
    }
}

#[test]
fn input_faults_do_not_stop_launches_and_are_told_once() {
    let notes = Arc::default();
    let mut rank = start(&notes, 2, config()).unwrap();
    let (input, output) = empty_tensors(&rank);
    let fault = Fault {
        kind: FaultKind::DuplicateExpert,
        ..timeout()
    };
    *notes.page.lock().unwrap() = FaultPage::of(&fault, 1);
    assert!(rank.dispatch(Stream::DEFAULT, &input, &output).is_ok());
    assert_eq!(rank.check().unwrap().fault(), Some(InputFault(fault)));
    assert_eq!(rank.check().unwrap().fault(), None);
    let apart = Tensor::contiguous(memory(8192), DataType::Bf16, [2, 1, 8]);
    rank.combine(
        Stream::DEFAULT,
        &CombineInput::new(output.tokens.unwrap()),
        &CombineOutput::Apart(apart),
    )
    .unwrap();
    rank.close().unwrap();
}

#[test]
fn a_page_that_makes_no_sense_is_shown() {
    let notes = Arc::<Notes>::default();
    let rank = start(&notes, 2, config()).unwrap();
    *notes.page.lock().unwrap() = FaultPage {
        kind: 99,
        ..FaultPage::of(&timeout(), 1)
    };
    assert!(matches!(
        rank.check(),
        Err(Error::FaultPageDamaged { rank: Rank(0), .. })
    ));
    rank.close().unwrap();
}
