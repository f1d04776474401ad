//! Padded blocks: memory that the device does not have, weights that combine needs, experts with too many
//! rows.

use std::sync::Arc;

use ferry::layout::Region;
use ferry::*;

use crate::noted::{Notes, start};

fn config() -> Config {
    Config {
        receive: Receive::of(ReceiveLayout::Padded),
        ..Config::new(4, 2, 8, 3)
    }
}

#[test]
fn outputs_that_the_device_has_no_memory_for_are_refused_before_anything_is_allocated() {
    for (free, is_enough) in [(300, false), (1 << 20, true)] {
        let notes = Arc::new(Notes {
            free_memory: Some(free),
            ..Notes::default()
        });
        let rank = start(&notes, 2, config()).unwrap();
        notes.take();
        let made = DispatchBuffers::new(rank.device(), rank.plan());
        match made {
            Ok(_) => assert!(is_enough),
            Err(error) => {
                let told = error.to_string();
                // 12 rows of 16 bytes, src_info, offsets, numbers, counts, ends and ranges.
                let needed = 12 * 16 + 12 * 8 + 3 * 4 + 2 * 4 + 2 * 4 + 2 * 4 + 4 * 8;
                assert!(!is_enough, "{told}");
                for text in ["rows is 12", "receive padded", "300 bytes free", "noted"] {
                    assert!(told.contains(text), "{told}");
                }
                assert!(told.contains(&format!("take {needed} bytes")), "{told}");
                assert!(notes.take().is_empty());
            }
        }
        std::mem::forget(rank);
    }
}

/// A rank that has dispatched two tokens to its two experts.
fn dispatched(combine: CombineMode, ids: &[i32]) -> (Communicator, DispatchBuffers) {
    let group = Group::simulated(1, 7).unwrap();
    let plan = Plan::new(
        &group,
        Config {
            combine,
            receive: Receive::of(ReceiveLayout::Padded),
            ..Config::new(2, 2, 8, 2)
        },
    )
    .unwrap();
    let mut rank = Communicator::new(&group, &plan).unwrap().remove(0);
    let mut rows = DispatchBuffers::new(rank.device(), &plan).unwrap();
    let input = rows.upload(&[0x3f80_u16; 16], ids, None).unwrap();
    rank.dispatch(Stream::DEFAULT, &input, rows.output())
        .unwrap();
    (rank, rows)
}

#[test]
fn combine_takes_the_weights() {
    for (combine, tensor) in [
        (CombineMode::Reduced, "row_weights"),
        (CombineMode::Exact, "topk_weights"),
    ] {
        let (mut rank, rows) = dispatched(combine, &[1, 0, -1, 1]);
        assert!(rank.synchronize(Stream::DEFAULT).unwrap().fault().is_none());
        let received = rank.download(rows.output()).unwrap();
        assert_eq!(received.row_offsets, [0, 2, 4]);
        assert_eq!(received.expert_counts, [1, 2]);
        assert_eq!(received.row_ends, [1, 4]);
        assert_eq!(received.source_ranges, [1, 2]);
        assert_eq!((received.rows_of(0), received.rows_of(1)), (0..1, 2..4));
        let sums = CombineBuffers::new(rank.device(), rank.plan()).unwrap();
        let mut answers = CombineInput::new(rows.output().tokens.unwrap());
        let apart = CombineBuffers::apart(rank.device(), rank.plan());
        let output = apart.map_or(sums.output(2), |apart| apart.output(2));
        let refused = rank.combine(Stream::DEFAULT, &answers, &output.unwrap());
        let told = refused.unwrap_err().to_string();
        for text in [tensor, "receive", "padded"] {
            assert!(told.contains(text), "{told}");
        }
        let device = rank.device().clone();
        match combine {
            CombineMode::Reduced => {
                let weights = device.upload_tensor([4], &[0.5_f32, f32::NAN, 0.25, 2.0]);
                answers.row_weights = Some(weights.unwrap());
            }
            CombineMode::Exact => {
                let weights = device.upload_tensor([2, 2], &[0.25_f32, 0.5, f32::NAN, 2.0]);
                answers.topk_weights = Some(weights.unwrap());
            }
        }
        rank.combine(Stream::DEFAULT, &answers, &sums.output(2).unwrap())
            .unwrap();
        assert!(rank.synchronize(Stream::DEFAULT).unwrap().fault().is_none());
        let sums: Vec<half::bf16> = sums.download(2).unwrap();
        let wanted = [[0.75_f32; 8], [2.0; 8]].as_flattened().to_vec();
        assert!(sums.iter().map(|sum| sum.to_f32()).eq(wanted));
        rank.close().unwrap();
    }
}

#[test]
fn an_expert_that_gets_more_rows_than_its_block_holds_is_named() {
    let (rank, rows) = dispatched(CombineMode::Reduced, &[1, 1, 0, 1]);
    let fault = rank
        .synchronize(Stream::DEFAULT)
        .unwrap()
        .fault()
        .expect("a fault");
    assert_eq!(fault.kind, FaultKind::OutputTooSmall);
    assert_eq!((fault.region, fault.index), (Region::ExpertBlock, 1));
    assert_eq!((fault.saw, fault.wanted), (3, 2));
    let told = fault.to_string();
    assert!(
        told.contains("3 rows for expert 1") && told.contains("holds 2"),
        "{told}"
    );
    let received = rank.download(rows.output()).unwrap();
    assert_eq!(
        (received.expert_counts, received.source_ranges),
        (vec![1, 2], vec![1, 2])
    );
    std::mem::forget(rank);
}
