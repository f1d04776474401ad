//! Parts of sentences.

use std::path::PathBuf;

use ferry_layout::Fault;

pub(super) fn in_its_place(fault: &Fault) -> &'static str {
    if fault.kind.is_input() {
        "; why was not recorded, because this came first"
    } else {
        ""
    }
}

pub(super) fn paths(tried: &[PathBuf]) -> String {
    let tried: Vec<_> = tried
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    tried.join(", ")
}
