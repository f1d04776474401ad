//! Fault records: the contents of a page, and the record that stays.

use ferry_layout::{Fault, FaultKind, FaultPage, Kernel, LastRecord, Rank, Region};
use proptest::prelude::*;

const KINDS: [FaultKind; 11] = [
    FaultKind::PeerTimeout,
    FaultKind::LocalTimeout,
    FaultKind::InvalidExpert,
    FaultKind::DuplicateExpert,
    FaultKind::TooManyOnDevice,
    FaultKind::LostScales,
    FaultKind::OutputTooSmall,
    FaultKind::RowOutOfBounds,
    FaultKind::TooManyTokens,
    FaultKind::OutOfTurn,
    FaultKind::NetworkStalled,
];

const REGIONS: [Region; 15] = [
    Region::Counts,
    Region::Presence,
    Region::DispatchRow,
    Region::Credit,
    Region::CombineRow,
    Region::RanksInExpert,
    Region::Offsets,
    Region::TopkIds,
    Region::Output,
    Region::TokensOnDevice,
    Region::ScaleBlocks,
    Region::LastLaunch,
    Region::InputScales,
    Region::ExpertBlock,
    Region::Channel,
];

proptest! {
    #[test]
    fn a_fault_page_says_what_was_written(
        kind in 0..KINDS.len(), kernel in 0..Kernel::ALL.len(), region in 0..REGIONS.len(),
        rank in any::<u32>(), peer in any::<u32>(), culprit in any::<u32>(), words in any::<[u64; 4]>(),
        number in 1..u64::MAX,
        patience_ms in proptest::option::of(0..u32::MAX),
    ) {
        let fault = Fault {
            kind: KINDS[kind],
            kernel: Kernel::ALL[kernel],
            rank: Rank(rank),
            peer: Rank(peer),
            culprit: Rank(culprit),
            region: REGIONS[region],
            index: words[0],
            wanted: words[1],
            saw: words[2],
            epoch: words[3],
            patience_ms,
            gpu_ranks: None,
            is_culprit_behind: false,
        };
        let page = FaultPage::of(&fault, number);
        prop_assert_eq!(page.fault(), Some(fault));
        prop_assert_eq!(FaultPage { begun: number + 1, ..page }.fault(), None);
        prop_assert_eq!(FaultPage { acknowledged: number, ..page }.fault(), None);
        prop_assert_eq!(FaultPage { kind: KINDS.len() as u64, ..page }.fault(), None);
        prop_assert_eq!(FaultPage { kernel: Kernel::ALL.len() as u64, ..page }.fault(), None);
        prop_assert_eq!(FaultPage { region: REGIONS.len() as u64, ..page }.fault(), None);
        let name = format!("rank {rank}");
        prop_assert!(fault.to_string().contains(&name));
    }
}

/// The record that stays if two come: first the cause, then a wait for it, then lost rows, then bad input,
/// unless the host has read that.
#[test]
fn a_record_gives_way_to_what_says_more() {
    let weight = |kind: FaultKind| match kind {
        FaultKind::LocalTimeout => 2,
        FaultKind::OutputTooSmall => 1,
        kind if kind.is_input() => 0,
        _ => 3,
    };
    for held in KINDS {
        for new in KINDS {
            let (held_word, new_word) = (held as u64, new as u64);
            assert_eq!(LastRecord(0).next(new_word, || 0), Some(1));
            let last = LastRecord::new(5, held_word, 3);
            let more = weight(new) > weight(held);
            for acknowledged in [0, 4, 5] {
                let is_read = held.is_input() && acknowledged == 5;
                let wanted = (more || is_read).then_some(6);
                let next = last.next(new_word, || acknowledged);
                assert_eq!(next, wanted, "{held:?}, then {new:?}, {acknowledged} read");
            }
            let culprit = (held == FaultKind::PeerTimeout).then_some(Rank(3));
            assert_eq!(last.culprit(), culprit);
        }
    }
    assert_eq!(LastRecord(0).culprit(), None);
}

#[test]
fn a_timeout_names_the_rank_that_its_peer_gave_up_on() {
    let page = FaultPage {
        peer: 2,
        culprit: 3,
        begun: 1,
        complete: 1,
        ..FaultPage::default()
    };
    let text = page.fault().unwrap().to_string();
    assert!(text.ends_with("; rank 2 had given up on rank 3"), "{text}");
    let text = FaultPage { culprit: 2, ..page }
        .fault()
        .unwrap()
        .to_string();
    assert!(text.ends_with("saw 0"), "{text}");
}

#[test]
fn a_launch_out_of_turn_names_the_launch_before() {
    let page = FaultPage {
        kind: FaultKind::OutOfTurn as u64,
        kernel: Kernel::DispatchAsync as u64,
        region: Region::LastLaunch as u64,
        rank: 1,
        index: Kernel::DispatchWait as u64,
        saw: 7,
        epoch: 7,
        begun: 1,
        complete: 1,
        ..FaultPage::default()
    };
    let fault = page.fault().unwrap();
    assert_eq!(fault.last_launch(), Some((Kernel::DispatchWait, 7)));
    let text = "rank 1 refused dispatch_async, round 7, out of turn: its last launch was";
    assert_eq!(fault.to_string(), format!("{text} dispatch_wait, round 7"));
    let first = Fault { saw: 0, ..fault };
    assert_eq!(first.last_launch(), None);
    assert_eq!(first.to_string(), format!("{text} none"));
    let other = Fault {
        kind: FaultKind::LocalTimeout,
        ..fault
    };
    assert_eq!(other.last_launch(), None);
}

#[test]
fn the_peer_is_a_slot_where_a_token_is_at_fault() {
    let fault = |kind| Fault {
        kind,
        kernel: Kernel::Dispatch,
        rank: Rank(1),
        peer: Rank(7),
        culprit: Rank(1),
        region: Region::TopkIds,
        index: 0,
        wanted: 4,
        saw: 4,
        epoch: 1,
        patience_ms: None,
        gpu_ranks: None,
        is_culprit_behind: false,
    };
    for kind in KINDS {
        let names_slot = fault(kind).to_string().contains("slot 7");
        assert_eq!(fault(kind).slot(), names_slot.then_some(7), "{kind:?}");
    }
}

#[test]
fn a_timeout_where_ranks_share_a_gpu_says_what_helps() {
    let fault = |kind, gpu_ranks| Fault {
        kind,
        kernel: Kernel::Combine,
        rank: Rank(1),
        peer: Rank(0),
        culprit: Rank(0),
        region: Region::CombineRow,
        index: 0,
        wanted: 2,
        saw: 1,
        epoch: 2,
        patience_ms: None,
        gpu_ranks,
        is_culprit_behind: false,
    };
    let says = |kind, gpu_ranks| {
        let text = fault(kind, gpu_ranks).to_string();
        text.contains("; 4 ranks of its process share its GPU")
            && text.contains("CUDA_DEVICE_MAX_CONNECTIONS=32")
    };
    for kind in KINDS {
        let is_timeout = matches!(kind, FaultKind::PeerTimeout | FaultKind::LocalTimeout);
        assert_eq!(says(kind, Some(4)), is_timeout, "{kind:?}");
        assert!(!says(kind, None), "{kind:?}");
    }
}

#[test]
fn a_timeout_on_a_rank_that_was_not_called_says_so() {
    let fault = |is_culprit_behind| Fault {
        kind: FaultKind::PeerTimeout,
        kernel: Kernel::Dispatch,
        rank: Rank(1),
        peer: Rank(0),
        culprit: Rank(0),
        region: Region::Counts,
        index: 0,
        wanted: 1,
        saw: 0,
        epoch: 1,
        patience_ms: None,
        gpu_ranks: None,
        is_culprit_behind,
    };
    let hint = "; rank 0 was not called: enqueue on all ranks before you wait for one (the guide, \"Why \
                did it time out?\")";
    assert!(fault(true).to_string().ends_with(hint), "{}", fault(true));
    assert!(!fault(false).to_string().contains("was not called"));
}
