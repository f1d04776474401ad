//! Names of formats and modes are read back as the same values.

use ferry_layout::{CombineMode, Rank, ScaleLayout, TokenFormat};

#[test]
fn every_name_is_read_back() {
    for format in TokenFormat::ALL {
        assert_eq!(format.to_string().parse(), Ok(format));
        assert!(format.to_string().starts_with(format.name()));
    }
    for layout in [ScaleLayout::Tiled, ScaleLayout::RowMajor] {
        assert_eq!(layout.to_string().parse(), Ok(layout));
    }
    for mode in [CombineMode::Reduced, CombineMode::Exact] {
        assert_eq!(mode.to_string().parse(), Ok(mode));
    }
    assert_eq!("mxfp4".parse(), Ok(TokenFormat::Mxfp4(ScaleLayout::Tiled)));
    assert_eq!(format!("{:>3}", Rank(7)), "  7");
}

#[test]
fn what_names_nothing_is_answered_with_what_there_is() {
    for text in [
        "",
        "fp7",
        "BF16",
        "bf16:tiled",
        "fp8:row-major",
        "mxfp8:",
        "mxfp8:square",
    ] {
        let refused = text.parse::<TokenFormat>().unwrap_err().to_string();
        for name in TokenFormat::ALL.map(TokenFormat::name) {
            assert!(refused.contains(name), "{text}: {refused}");
        }
        assert!(refused.contains(":tiled") && refused.contains(":row-major"));
    }
    let refused = "sum".parse::<CombineMode>().unwrap_err();
    assert_eq!(
        refused.to_string(),
        "no such mode of combine: there are reduced and exact"
    );
}
