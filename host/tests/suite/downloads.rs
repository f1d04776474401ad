//! Downloads of memory that no dispatch wrote.

use ferry::error::TensorError;
use ferry::*;

const FORMAT: TokenFormat = TokenFormat::Mxfp8(ScaleLayout::Tiled);

/// A rank of its own with 2 experts.
fn alone() -> (Communicator, Plan) {
    let group = Group::simulated(1, 1).unwrap();
    let config = Config {
        format: FORMAT,
        ..Config::new(2, 1, 128, 4)
    };
    let plan = Plan::new(&group, config).unwrap();
    (Communicator::new(&group, &plan).unwrap().remove(0), plan)
}

#[test]
fn offsets_that_no_dispatch_wrote_are_refused() {
    let (rank, plan) = alone();
    let rows = DispatchBuffers::new(rank.device(), &plan).unwrap();
    let at = rows.output().row_offsets.unwrap().at;
    for offsets in [[0, 3, 2], [7, 7, 7], [u32::MAX, 0, 4]] {
        rank.device()
            .upload(at, bytemuck::cast_slice(&offsets))
            .unwrap();
        let wanted = format!(
            "tensor row_offsets: wanted offsets of a dispatch: 0, and numbers that never decrease, given \
             {offsets:?}"
        );
        assert_eq!(rows.download().unwrap_err().to_string(), wanted);
        let received = ReceivedRows {
            tokens: vec![0; 128 * offsets[2] as usize],
            scales: vec![0; 512],
            scale_offsets: vec![0; 2],
            row_offsets: offsets.to_vec(),
            ..ReceivedRows::default()
        };
        let decoded = decode_rows(&plan, &received, None);
        assert_eq!(decoded.unwrap_err().to_string(), wanted);
    }
    rank.close().unwrap();
}

#[test]
fn offsets_beyond_the_capacity_are_refused() {
    let (rank, plan) = alone();
    let rows = DispatchBuffers::new(rank.device(), &plan).unwrap();
    let (at, capacity) = (
        rows.output().row_offsets.unwrap().at,
        plan.max_rows() as u32,
    );
    let upload = |offsets: [u32; 3]| {
        let bytes = bytemuck::cast_slice(&offsets);
        rank.device().upload(at, bytes).unwrap();
    };
    upload([0, 1, capacity]);
    assert_eq!(rows.download().unwrap().row_offsets, [0, 1, capacity]);
    upload([0, 1, capacity + 1]);
    assert_eq!(
        rows.download().unwrap_err().to_string(),
        format!(
            "tensor row_offsets: wanted at most {capacity}, the rows that there are, given [0, 1, {}]",
            capacity + 1
        )
    );
    rank.close().unwrap();
}

#[test]
fn a_download_before_the_first_dispatch_is_refused() {
    let (rank, plan) = alone();
    let rows = DispatchBuffers::new(rank.device(), &plan).unwrap();
    let refused = rows.download().unwrap_err();
    assert!(
        matches!(
            refused,
            Error::Tensor(TensorError {
                tensor: "row_offsets",
                ..
            })
        ),
        "{refused}"
    );
    rank.close().unwrap();
}

#[test]
fn numbers_of_compact_rows_that_no_dispatch_wrote_are_refused() {
    let group = Group::simulated(2, 1).unwrap();
    let config = Config {
        receive: Receive::of(ReceiveLayout::Compact),
        ..Config::new(2, 1, 8, 2)
    };
    let plan = Plan::new(&group, config).unwrap();
    let ranks = Communicator::new(&group, &plan).unwrap();
    let rows = DispatchBuffers::new(ranks[0].device(), &plan).unwrap();
    let at = rows.output().source_counts.unwrap().at;
    for (numbers, is_taken) in [
        ([2, 2], true),
        ([2, 3], false),
        ([-1, 2], false),
        ([i32::MAX, i32::MAX], false),
    ] {
        let bytes = bytemuck::cast_slice(&numbers);
        ranks[0].device().upload(at, bytes).unwrap();
        let received = rows.download();
        if is_taken {
            assert_eq!(received.unwrap().src_info.len(), 4);
            continue;
        }
        assert_eq!(
            received.unwrap_err().to_string(),
            format!(
                "tensor source_counts: wanted numbers of rows, at most 4 together, the rows that there are, \
                 given {numbers:?}"
            )
        );
    }
    Communicator::close_all(ranks).unwrap();
}

#[test]
fn transposed_scales_are_whole_and_the_capacity_says_how_to_read_them() {
    let group = Group::simulated(1, 1).unwrap();
    let format = TokenFormat::BlockwiseFp8;
    let config = Config {
        format,
        ..Config::new(2, 1, 256, 4)
    };
    let plan = Plan::new(&group, config).unwrap();
    let mut rank = Communicator::new(&group, &plan).unwrap().remove(0);
    let mut rows = DispatchBuffers::new(rank.device(), &plan).unwrap();
    // Two scales, of ones and of twos.
    let token: Vec<u16> = [[0x3f80; 128], [0x4000; 128]].concat();
    let input = rows.upload(&token, &[1], None).unwrap();
    rank.dispatch(Stream::DEFAULT, &input, rows.output())
        .unwrap();
    assert!(rank.synchronize(Stream::DEFAULT).unwrap().fault().is_none());
    let received = rows.download().unwrap();
    assert_eq!(received.capacity, plan.max_rows());
    assert_eq!(received.scales.len(), 4 * 2 * plan.max_rows());
    let scale = |group: usize| {
        let at = 4 * (group * received.capacity + received.row_offsets[1] as usize);
        f32::from_le_bytes(received.scales[at..at + 4].try_into().unwrap())
    };
    assert_eq!([0, 1].map(scale), [1.0 / 448.0, 2.0 / 448.0]);
    rank.give_up(Stream::DEFAULT).unwrap();
    rank.close().unwrap();
}

/// Offsets of padded blocks are known, so that others are of no dispatch, or of another layout.
#[test]
fn offsets_of_padded_blocks_are_those_of_the_blocks() {
    let tiled = TokenFormat::Mxfp8(ScaleLayout::Tiled);
    for format in [tiled, TokenFormat::BlockwiseFp8] {
        let group = Group::simulated(1, 1).unwrap();
        let by_expert = Config {
            format,
            ..Config::new(2, 1, 128, 4)
        };
        let padded = Config {
            receive: Receive::Padded(Padded {
                transposed_scales: format == TokenFormat::BlockwiseFp8,
                ..Padded::default()
            }),
            ..by_expert
        };
        let plan = Plan::new(&group, padded).unwrap();
        let mut rank = Communicator::new(&group, &plan).unwrap().remove(0);
        let mut rows = DispatchBuffers::new(rank.device(), &plan).unwrap();
        let input = rows.upload(&[0x3f80_u16; 128], &[1], None).unwrap();
        rank.dispatch(Stream::DEFAULT, &input, rows.output())
            .unwrap();
        assert_eq!(rank.synchronize(Stream::DEFAULT).unwrap().fault(), None);
        let whole = rows.download().unwrap();
        assert_eq!(decode_rows(&plan, &whole, None).unwrap()[4 * 128], 1.0);
        let at = rows.output().row_offsets.unwrap().at;
        for offsets in [[0, 3, 7], [9, 4, 0], [0, 0, 1], [0, u32::MAX, 8]] {
            let bytes = bytemuck::cast_slice(&offsets);
            rank.device().upload(at, bytes).unwrap();
            let refused = rows.download().unwrap_err().to_string();
            let wanted =
                "tensor row_offsets: wanted offsets of a dispatch: padded blocks have 4 rows each";
            assert!(refused.starts_with(wanted), "{refused}");
        }
        // Those of a plan of another layout, with as many rows as its offsets say.
        let other = ReceivedRows {
            tokens: vec![0; 3 * 128],
            scales: vec![0; 3 * 4],
            row_offsets: vec![0, 1, 3],
            ..whole.clone()
        };
        let refused = decode_rows(&plan, &other, None).unwrap_err();
        assert!(refused.to_string().contains("row_offsets"), "{refused}");
        std::mem::forget(rank);
    }
}
