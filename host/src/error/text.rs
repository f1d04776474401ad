//! Parts of error texts.

use std::path::PathBuf;

use ferry_layout::Fault;

pub(super) fn in_its_place(fault: &Fault) -> &'static str {
    if fault.kind.is_input() {
        "; why was not recorded, because this came first"
    } else {
        ""
    }
}

pub(super) fn green_context(max_sms: Option<u32>, multiprocessors: u32) -> String {
    let max_sms = max_sms.map_or("None (all)".to_owned(), |sms| sms.to_string());
    format!(
        "max_sms is {max_sms}, but the stream belongs to a green context with {multiprocessors} \
         multiprocessors: blocks that wait for each other must all find room; set max_sms to at most \
         {multiprocessors}"
    )
}

pub(super) fn paths(tried: &[PathBuf]) -> String {
    let tried: Vec<_> = tried
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    tried.join(", ")
}
