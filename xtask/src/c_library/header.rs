//! `cargo xtask c-header`: generates `host/c/include/ferry.h`.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use cbindgen::{Builder, Config, DocumentationStyle, Language, Style};

use super::entries::Entries;
use crate::generated;

/// Path of the header below the workspace.
pub(super) const HEADER: &str = "host/c/include/ferry.h";

const ABOUT: &str = include_str!("about.h");

/// Generates the header, or with `check` compares it with the committed one.
pub(super) fn run(root: &Path, check: bool) -> Result<()> {
    let files = [(HEADER.to_owned(), generate(root)?)];
    generated::renew(root, &files, check, "cargo xtask c-header")
}

fn generate(root: &Path) -> Result<String> {
    let sources = root.join("host/c/src");
    let entries = Entries::read(&sources)?;
    entries.require_guards()?;
    let mut config = Config {
        language: Language::C,
        style: Style::Type,
        cpp_compat: true,
        documentation: true,
        documentation_style: DocumentationStyle::C99,
        include_guard: Some("FERRY_H".to_owned()),
        no_includes: true,
        sys_includes: vec!["stddef.h".to_owned(), "stdint.h".to_owned()],
        header: Some(ABOUT.trim_end().to_owned()),
        after_includes: Some(format!(
            "{}\n// Every field's default: zero, and the size.\n{}",
            versions(),
            entries.initialisers()?
        )),
        usize_is_size_t: true,
        line_length: 110,
        tab_width: 4,
        ..Config::default()
    };
    // Enums that functions take as numbers.
    config.export.include = [
        "ferry_activation",
        "ferry_call_kind",
        "ferry_combine_mode",
        "ferry_fault_kind",
        "ferry_format",
        "ferry_kernel",
        "ferry_receive_layout",
        "ferry_region",
        "ferry_round",
        "ferry_type",
    ]
    .map(str::to_owned)
    .to_vec();
    let bindings = Builder::new()
        .with_config(config)
        .with_src(sources.join("lib.rs"))
        .generate()
        .map_err(|error| anyhow!("cbindgen failed: {error}"))?;
    let mut text = Vec::new();
    bindings.write(&mut text);
    let text = String::from_utf8(text).context("cbindgen's output is not UTF-8")?;
    for name in entries.names() {
        if !text.contains(&format!(" {name}(")) && !text.contains(&format!("*{name}(")) {
            bail!("{name} is an entry of host/c/src, but cbindgen did not find it");
        }
    }
    Ok(text)
}

/// The workspace's version, which is also this program's.
fn versions() -> String {
    let number = |text: &str| text.parse::<u32>().unwrap_or(0);
    let [major, minor, patch] = [
        number(env!("CARGO_PKG_VERSION_MAJOR")),
        number(env!("CARGO_PKG_VERSION_MINOR")),
        number(env!("CARGO_PKG_VERSION_PATCH")),
    ];
    format!(
        "\n// The version of this header; ferry_version is the library's.\n#define FERRY_VERSION \"{}\"\n\
         #define FERRY_VERSION_NUMBER {}\n",
        env!("CARGO_PKG_VERSION"),
        major * 1_000_000 + minor * 1_000 + patch
    )
}
