//! Parameters of kernels.

/// A parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Alignment of its place.
    pub align: u64,
}

/// The parameters of a function, from the text between its name and its body. A parameter of an unknown form,
/// or whose size overflows, has 0 bytes.
pub(crate) fn parameters(after_name: &str) -> Vec<Parameter> {
    let list = after_name.trim_start().strip_prefix('(');
    let list = list.and_then(|list| list.split_once(')'));
    let list = list.map_or("", |(list, _)| list).trim();
    if list.is_empty() {
        return Vec::new();
    }
    list.split(',').map(parameter).collect()
}

/// Reads `.param .align 8 .b8 name[336]`, or `.param .u64 .ptr .align 1 name`, whose `.align` is that
/// of the memory it points to.
fn parameter(text: &str) -> Parameter {
    let words = || text.split_whitespace();
    let declared = words().next_back().unwrap_or_default();
    let (name, count) = match declared.split_once('[') {
        Some((name, count)) => (name, count.trim_end_matches(']').parse().unwrap_or(0)),
        None => (declared, 1),
    };
    let bytes = words().find_map(type_bytes).unwrap_or(0);
    let own = text.split(".ptr").next().unwrap_or_default();
    let align = own.split_once(".align").and_then(|(_, after)| {
        let number = after.split_whitespace().next()?;
        number.parse().ok()
    });
    Parameter {
        name: name.to_owned(),
        bytes: bytes.checked_mul(count).unwrap_or(0),
        align: align.unwrap_or(bytes),
    }
}

/// The bytes of a type: ".b8", ".u64", ".f32".
pub(crate) fn type_bytes(word: &str) -> Option<u64> {
    let bits = word
        .strip_prefix(['.'])?
        .strip_prefix(['b', 'u', 's', 'f'])?;
    bits.parse::<u64>().ok().map(|bits| bits / 8)
}
