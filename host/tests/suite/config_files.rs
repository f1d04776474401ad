//! Configurations in files.
#![cfg(feature = "serde")]

use std::time::Duration;

use ferry::{CombineMode, Config, ReceiveFields, ReceiveLayout, ScaleLayout, TokenFormat};

#[test]
fn a_configuration_is_written_in_words_and_read_back() {
    for format in TokenFormat::ALL {
        let config = Config {
            format,
            combine: CombineMode::Exact,
            deadline: Duration::from_millis(1500),
            max_sms: Some(20),
            ..Config::new(256, 8, 7168, 128)
        };
        let text = serde_json::to_string(&config).unwrap();
        assert!(
            text.contains(&format!(r#""format":"{format}","combine":"exact""#)),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), config);
    }
}

/// Reads a file with the four sizes, and `more`.
fn read(more: &str) -> serde_json::Result<Config> {
    let sizes = r#""experts": 256, "top_k": 8, "hidden": 7168, "max_tokens_per_rank": 128"#;
    serde_json::from_str(&format!("{{{sizes}{more}}}"))
}

/// Every field that a layout takes is on the same level as the others.
#[test]
fn the_fields_of_every_layout_are_read() {
    let new = Config::new(256, 8, 7168, 128);
    for receive in ReceiveLayout::ALL {
        let keeps_rows = receive.keeps_rows();
        let fields = ReceiveFields {
            transposed_scales: receive != ReceiveLayout::ByExpert,
            clear_absent: receive == ReceiveLayout::Strided,
            combine_weights: keeps_rows,
            expert_alignment: if receive == ReceiveLayout::ByExpert {
                64
            } else {
                1
            },
            clear_padding: !keeps_rows,
            row_sources: !keeps_rows,
            m_indices: !keeps_rows,
            ..ReceiveFields::new(receive)
        };
        let config = Config {
            receive: fields.try_into().unwrap(),
            ..new
        };
        let ReceiveFields {
            transposed_scales,
            clear_absent,
            combine_weights,
            expert_alignment,
            ..
        } = fields;
        let more = format!(
            r#", "receive": "{receive}", "transposed_scales": {transposed_scales},
            "clear_absent": {clear_absent}, "combine_weights": {combine_weights},
            "expert_alignment": {expert_alignment}, "clear_padding": {by_expert},
            "row_sources": {by_expert}, "m_indices": {by_expert}"#,
            by_expert = !keeps_rows,
        );
        assert_eq!(read(&more).unwrap(), config);
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), config);
    }
}

#[test]
fn what_a_file_does_not_say_is_as_in_new() {
    let new = Config::new(256, 8, 7168, 128);
    assert_eq!(read("").unwrap(), new);
    let deadline = Duration::from_secs(2);
    assert_eq!(
        read(r#", "deadline": { "secs": 2, "nanos": 0 }"#).unwrap(),
        Config { deadline, ..new }
    );
    let format = TokenFormat::Nvfp4(ScaleLayout::Tiled);
    assert_eq!(
        read(r#", "format": "nvfp4""#).unwrap(),
        Config { format, ..new }
    );
    let wrong = read(r#", "receive": "view", "m_indices": true"#).unwrap_err();
    assert!(
        wrong
            .to_string()
            .contains("m_indices is true, but receive is view"),
        "{wrong}"
    );
    let twice = read(r#", "m_indices": true, "m_indices": false"#).unwrap_err();
    assert!(
        twice.to_string().contains("duplicate field `m_indices`"),
        "{twice}"
    );
    let unknown = read(r#", "format": "fp7""#).unwrap_err().to_string();
    assert!(
        unknown.contains("\"fp7\" is not one: no such token format")
            && unknown.contains("nvfp4-row"),
        "{unknown}"
    );
    let misspelt = read(r#", "specialize": true"#).unwrap_err().to_string();
    assert!(
        misspelt.contains("specialize") && misspelt.contains("specialise"),
        "{misspelt}"
    );
}
