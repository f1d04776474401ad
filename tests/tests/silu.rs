//! Fused SiLU on a simulated device.

use ferry::{
    Activation, DataType, Error, FusedSilu, Group, Rank, ScaleTensor, Stream, Tensor, TokenFormat,
};
use ferry_tests::silu::cases;

#[test]
fn every_format_gives_what_the_oracle_says() {
    let group = Group::simulated(1, 3).unwrap();
    let device = group.device(Rank(0)).unwrap();
    for case in cases(false) {
        case.run(&*device, Stream::DEFAULT)
            .unwrap_or_else(|error| panic!("{}: {error:#}", case.name()));
    }
}

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

/// Rows, and where their scales are.
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
