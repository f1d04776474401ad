//! Fused SiLU on a simulated device.

use ferry::{Activation, Error, FusedSilu, Group, Rank, Stream, Tensor, TokenFormat, fused_silu};
use ferry_tests::silu::cases;

#[test]
fn every_format_gives_what_the_portable_arithmetic_says() {
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
        input: Tensor::contiguous(at, [4, 256]),
        interleaved: false,
        row_offsets: Tensor::contiguous(at, [3]),
        activation: Activation::Silu,
        format: TokenFormat::Bf16,
        input_scales: None,
        output: Tensor::contiguous(at, [4, 128]),
        scales: None,
    };
    let told = |silu: FusedSilu| {
        let error = fused_silu(&*device, Stream::DEFAULT, &silu, None).unwrap_err();
        (error.to_string(), error)
    };
    let (text, error) = told(FusedSilu {
        output: Tensor::contiguous(at, [4, 120]),
        ..silu
    });
    assert!(matches!(error, Error::SiluColumns { columns: 120, .. }));
    assert!(
        text.contains("120 columns") && text.contains("multiple of 16"),
        "{text}"
    );
    let (text, _) = told(FusedSilu {
        input: Tensor::contiguous(at, [4, 128]),
        ..silu
    });
    assert!(
        text.contains("input") && text.contains("[4, 256]"),
        "{text}"
    );
    let (text, error) = told(FusedSilu {
        format: TokenFormat::BlockwiseFp8,
        ..silu
    });
    assert!(matches!(error, Error::WrongScales { .. }), "{text}");
    assert!(text.contains("no scales"), "{text}");
    let (text, error) = told(FusedSilu {
        input_scales: Some(Tensor::contiguous(at, [2])),
        ..silu
    });
    assert!(matches!(error, Error::UnusedInputScale { .. }), "{text}");
}
