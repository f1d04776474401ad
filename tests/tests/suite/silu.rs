//! Fused SiLU on a simulated device: what is refused, and which rows are written. What it computes is a
//! subject of `ferry-tests gpu`.

use ferry::{
    Activation, Capacity, DataType, DevicePtr, Error, FusedSilu, Group, Rank, ScaleTensor, Stream,
    Tensor, TokenFormat,
};
use ferry_reference::bf16;
use ferry_rig::formats::{Images, Layout};
use ferry_rig::verify::POISON;

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let group = Group::simulated(1, 3).unwrap();
    let device = group.device(Rank(0)).unwrap();
    let at = device.alloc(1 << 16).unwrap();
    let silu = FusedSilu {
        input: Tensor::contiguous(at, DataType::Bf16, [4, 256]),
        interleaved: false,
        row_offsets: Tensor::contiguous(at, DataType::U32, [3]),
        activation: Activation::Silu,
        format: TokenFormat::Bf16,
        input_scales: None,
        output: Tensor::contiguous(at, DataType::Bf16, [4, 128]),
        scales: None,
    };
    let told = |silu: FusedSilu| {
        let error = device.fused_silu(Stream::DEFAULT, &silu, None).unwrap_err();
        (error.to_string(), error)
    };
    let (text, error) = told(FusedSilu {
        output: Tensor::contiguous(at, DataType::Bf16, [4, 120]),
        ..silu
    });
    assert!(matches!(error, Error::SiluColumns { columns: 120, .. }));
    assert!(
        text.contains("120 columns") && text.contains("multiple of 16"),
        "{text}"
    );
    // SAFETY: nothing is launched.
    let many = unsafe { DevicePtr::new(at.address(), u64::MAX) };
    for experts in [1 << 31, 1 << 32, (1 << 32) + 1] {
        let (text, error) = told(FusedSilu {
            row_offsets: Tensor::contiguous(many, DataType::U32, [experts + 1]),
            ..silu
        });
        assert!(matches!(error, Error::SiluColumns { .. }), "{text}");
    }
    let (text, _) = told(FusedSilu {
        input: Tensor::contiguous(at, DataType::Bf16, [4, 128]),
        ..silu
    });
    assert!(
        text.contains("input") && text.contains("[4, 256]"),
        "{text}"
    );
    let (text, error) = told(FusedSilu {
        format: TokenFormat::BlockwiseFp8,
        output: Tensor::contiguous(at, DataType::E4m3, [4, 128]),
        ..silu
    });
    assert!(matches!(error, Error::WrongScales { .. }), "{text}");
    assert!(text.contains("no scales"), "{text}");
    for limit in [0.0, -0.0, -7.0, f32::NEG_INFINITY, f32::NAN] {
        let (text, error) = told(FusedSilu {
            activation: Activation::Clamped { alpha: 1.7, limit },
            ..silu
        });
        assert!(matches!(error, Error::SiluLimit { .. }), "{text}");
        assert!(text.contains(&format!("limit is {limit}")), "{text}");
    }
    let (text, error) = told(FusedSilu {
        input_scales: Some(Tensor::contiguous(at, DataType::F32, [2])),
        ..silu
    });
    assert!(matches!(error, Error::UnusedInputScale { .. }), "{text}");
}

/// Number of rows of 384 that were written, from the first one on, of three experts at these offsets.
fn written(format: TokenFormat, offsets: [u32; 4]) -> usize {
    let layout = Layout {
        blocks: None,
        format,
        hidden: 128,
        capacity: Capacity {
            rows: 384,
            scale_blocks: 5,
            ..Capacity::default()
        },
    };
    let group = Group::simulated(1, 3).unwrap();
    let device = group.device(Rank(0)).unwrap();
    let mut images = Images::poisoned(layout, POISON);
    let [tokens, scales] = [&images.tokens, &images.scales].map(|bytes| {
        let at = device.alloc(bytes.len().max(16) as u64).unwrap();
        device.upload(at, bytes).unwrap();
        at
    });
    let ones = bf16::ONE.to_bits();
    let block_offsets = device.upload_tensor([3], &[0u32, 1, u32::MAX]).unwrap();
    let silu = FusedSilu {
        input: device
            .upload_tensor([384, 256], &[ones; 384 * 256])
            .unwrap(),
        interleaved: false,
        row_offsets: device.upload_tensor([4], &offsets).unwrap(),
        activation: Activation::Silu,
        format,
        input_scales: None,
        output: Tensor::contiguous(tokens, DataType::of_tokens(format), [384, 128]),
        scales: layout.scale_tensor(scales, block_offsets.at, 3),
    };
    device.fused_silu(Stream::DEFAULT, &silu, None).unwrap();
    device.synchronize(Stream::DEFAULT).unwrap();
    device.download(tokens, &mut images.tokens).unwrap();
    let mut rows = images.tokens.chunks(layout.row_bytes());
    let is_written = |row: &[u8]| row.iter().any(|&byte| byte != POISON);
    let count = rows.by_ref().take_while(|row| is_written(row)).count();
    assert!(!rows.any(is_written), "{format:?}, {offsets:?}");
    count
}

#[test]
fn the_last_row_offset_bounds_the_rows_whatever_the_others_are() {
    for format in ferry_tests::silu::formats() {
        for (offsets, rows) in [
            ([0, 100, 300, 350], 350),
            ([0, 300, 4, 8], 8),
            ([300, 8, 200, 100], 100),
            ([0, 200, 150, 4000], 384),
            ([u32::MAX, 7, u32::MAX - 130, 0], 0),
        ] {
            assert_eq!(written(format, offsets), rows, "{format:?}, {offsets:?}");
        }
    }
}

/// Runs fused SiLU on `rows` rows, with transposed scales `place` bytes into an allocation.
fn transposed(rows: usize, place: u64) -> Result<(), Error> {
    let group = Group::simulated(1, 3).unwrap();
    let device = group.device(Rank(0)).unwrap();
    let at = device.alloc(1 << 16).unwrap();
    device.fill(at, 0, 1 << 16).unwrap();
    let scales = Tensor::contiguous(at.plus(place), DataType::F32, [1, rows]);
    let silu = FusedSilu {
        input: Tensor::contiguous(at, DataType::Bf16, [rows, 256]),
        interleaved: false,
        row_offsets: Tensor::contiguous(at, DataType::U32, [3]),
        activation: Activation::Silu,
        format: TokenFormat::BlockwiseFp8,
        input_scales: None,
        output: Tensor::contiguous(at, DataType::E4m3, [rows, 128]),
        scales: Some(ScaleTensor::Transposed(scales)),
    };
    device.fused_silu(Stream::DEFAULT, &silu, None)?;
    device.synchronize(Stream::DEFAULT)
}

#[test]
fn transposed_scales_stand_where_bulk_copies_can_read_them() {
    transposed(4, 16).unwrap();
    transposed(0, 0).unwrap();
    let said = |rows, place| transposed(rows, place).unwrap_err().to_string();
    let text = said(4, 4);
    assert!(
        text.contains("tensor scales: wanted an address that is a multiple of 16"),
        "{text}"
    );
    for rows in [1, 2, 3, 5, 6] {
        let text = said(rows, 0);
        assert!(
            text.contains("tensor scales: wanted a number of rows that is a multiple of 4"),
            "{text}"
        );
        assert!(text.contains(&format!("given {rows}")), "{text}");
    }
}
