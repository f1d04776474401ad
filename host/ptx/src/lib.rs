//! Reads PTX text: its kernels, their parameters, and its target.
//!
//! The only reader of PTX. The host library checks and specialises kernels with it, the builder of Ferry's
//! kernels makes their digest with it.
#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Range;

mod instruction;
mod parameter;

pub use instruction::{Instruction, opcode};
pub use parameter::Parameter;

/// Text that is not PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotPtx;

impl fmt::Display for NotPtx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it has no .version")
    }
}

impl std::error::Error for NotPtx {}

/// A PTX file.
#[derive(Clone, Debug)]
pub struct Module {
    /// The text with spaces in place of comments.
    text: String,
    /// The number in the `.version` line: "8.3".
    pub version: String,
    /// The first word of the `.target` line: "sm_90a". Empty if there is no such line.
    pub target: String,
    /// Bits of an address: 32 unless the `.address_size` line says 64.
    pub address_bits: u32,
    /// All functions with a body, in the order of the text.
    pub functions: Vec<Function>,
    /// Functions declared `.extern`.
    pub external_functions: Vec<String>,
}

/// A kernel, or a function that was not inlined into one. Ranges are of the module's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Whether the host can launch it.
    pub is_kernel: bool,
    /// Its parameters, without a function's results.
    pub parameters: Vec<Parameter>,
    /// The number in its `.maxnreg`.
    pub max_registers: Option<u32>,
    /// The whole function, from its first directive to the closing brace.
    pub place: Range<usize>,
    /// The body between the braces.
    pub body: Range<usize>,
}

impl Module {
    /// Reads PTX text.
    ///
    /// # Errors
    /// The text has no `.version`.
    pub fn parse(text: &str) -> Result<Self, NotPtx> {
        let text = without_comments(text);
        let directive = |name: &str| {
            let mut lines = text.lines();
            let rest = lines.find_map(|line| line.trim_start().strip_prefix(name))?;
            rest.starts_with(char::is_whitespace).then(|| rest.trim())
        };
        let version = directive(".version").ok_or(NotPtx)?.to_owned();
        let target = directive(".target").unwrap_or_default();
        let target = target.split([',', ' ']).next().unwrap_or_default();
        let bits = directive(".address_size").and_then(|bits| bits.parse().ok());
        let mut module = Self {
            version,
            target: target.to_owned(),
            address_bits: bits.unwrap_or(32),
            functions: Vec::new(),
            external_functions: Vec::new(),
            text: String::new(),
        };
        let mut rest = text.as_str();
        while let Some((header, body, after)) = next_function(rest) {
            let name = function_name(header).to_owned();
            let end = text.len() - after.len();
            match body {
                Some(body) => module.functions.push(Function {
                    is_kernel: header.contains(".entry"),
                    parameters: parameter::parameters(&from_name(header)[name.len()..]),
                    max_registers: max_registers(header),
                    place: end - 1 - body.len() - 1 - header.len()..end,
                    body: end - 1 - body.len()..end - 1,
                    name,
                }),
                None if header.starts_with(".extern") => module.external_functions.push(name),
                None => {}
            }
            rest = after;
        }
        module.text = text;
        Ok(module)
    }

    /// The text with spaces in place of comments.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The text between a function's braces.
    pub fn body(&self, function: &Function) -> &str {
        &self.text[function.body.clone()]
    }

    /// The functions that the host can launch.
    pub fn kernels(&self) -> impl Iterator<Item = &Function> {
        self.functions.iter().filter(|function| function.is_kernel)
    }

    /// Finds a kernel by its name.
    pub fn kernel(&self, name: &str) -> Option<&Function> {
        self.kernels().find(|kernel| kernel.name == name)
    }

    /// Value of a variable of `BYTES` bytes outside functions: `.b8 name[8] = {1, 2}`, in which unlisted
    /// bytes are 0, or a whole number: `.u64 name = 258`. `None` if it has another size.
    pub fn variable<const BYTES: usize>(&self, name: &str) -> Option<[u8; BYTES]> {
        let places = self.functions.iter().map(|function| &function.place);
        let starts = std::iter::once(0).chain(places.clone().map(|place| place.end));
        let ends = places.map(|place| place.start).chain([self.text.len()]);
        let mut between = starts.zip(ends).map(|(start, end)| &self.text[start..end]);
        between.find_map(|text| text.split(';').find_map(|text| bytes_of(text, name)))
    }
}

/// The bytes that a statement sets `name` to, if it does.
fn bytes_of<const BYTES: usize>(statement: &str, name: &str) -> Option<[u8; BYTES]> {
    let (declared, value) = statement.split_once('=')?;
    // There may be a space before the bracket.
    let (declared, count) = match declared.split_once('[') {
        Some((declared, count)) => (declared, Some(count.trim().strip_suffix(']')?.trim())),
        None => (declared, None),
    };
    let mut words = declared.split_whitespace().rev();
    if words.next()? != name {
        return None;
    }
    let kind = words.next()?;
    let Some(count) = count else {
        let bytes = parameter::type_bytes(kind).filter(|_| !kind.starts_with(".f"))?;
        return number_bytes(value.trim()).filter(|_| bytes == BYTES as u64);
    };
    if ![".b8", ".u8"].contains(&kind) || count.parse() != Ok(BYTES) {
        return None;
    }
    let listed = value.trim().strip_prefix('{')?.strip_suffix('}')?;
    let mut bytes = [0; BYTES];
    for (index, byte) in listed.split(',').enumerate() {
        *bytes.get_mut(index)? = number(byte.trim())?.try_into().ok()?;
    }
    Some(bytes)
}

/// A whole number in so many bytes, the lowest first; `None` if it needs more.
fn number_bytes<const BYTES: usize>(text: &str) -> Option<[u8; BYTES]> {
    let bytes = number(text)?.to_le_bytes();
    let (kept, rest) = bytes.split_first_chunk()?;
    rest.iter().all(|&byte| byte == 0).then_some(*kept)
}

/// Reads an unsigned number, decimal or hexadecimal after `0x`, with an optional suffix `U`.
fn number(text: &str) -> Option<u64> {
    let digits = text.strip_suffix('U').unwrap_or(text);
    match digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => digits.parse().ok(),
    }
}

/// Replaces `//` and `/* */` comments by spaces. Lines and positions stay the same, and so do strings.
pub fn without_comments(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(['/', '"']) {
        let comment = &rest[start..];
        let end = if let Some(string) = comment.strip_prefix('"') {
            // The name of a source file may contain the start of a comment.
            let end = start + string.find('"').map_or(1, |end| end + 2);
            kept.push_str(&rest[..end]);
            rest = &rest[end..];
            continue;
        } else if comment.starts_with("//") {
            comment.find('\n')
        } else if let Some(inside) = comment.strip_prefix("/*") {
            inside.find("*/").map(|end| end + 4)
        } else {
            kept.push_str(&rest[..=start]);
            rest = &rest[start + 1..];
            continue;
        };
        kept.push_str(&rest[..start]);
        let end = end.unwrap_or(comment.len());
        let blank = comment[..end].bytes();
        kept.extend(blank.map(|byte| if byte == b'\n' { '\n' } else { ' ' }));
        rest = &comment[end..];
    }
    kept.push_str(rest);
    kept
}

/// The next function of a text without comments: the header with its directives, the body, and the rest of
/// the text.
///
/// A declaration, which ends with a semicolon, has no body.
pub fn next_function(text: &str) -> Option<(&str, Option<&str>, &str)> {
    let keyword = keyword(text)?;
    let start = text[..keyword].rfind('\n').map_or(0, |newline| newline + 1);
    let text = &text[start..];
    // Parameter arrays use brackets, so the first brace opens the body.
    let end = text.find(['{', ';'])?;
    let (header, rest) = text.split_at(end);
    if let Some(after) = rest.strip_prefix(';') {
        return Some((header, None, after));
    }
    let mut depth = 0_usize;
    let close = rest.char_indices().find_map(|(index, character)| {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        (depth == 0).then_some(index)
    })?;
    Some((header, Some(&rest[1..close]), &rest[close + 1..]))
}

/// Position of the first `.entry` or `.func`.
fn keyword(text: &str) -> Option<usize> {
    let of = |keyword: &str| {
        let mut all = text.match_indices(keyword);
        let found = all.find(|(at, _)| {
            let next = text[at + keyword.len()..].chars().next();
            next.is_some_and(|next| next.is_whitespace() || next == '(')
        });
        found.map(|(at, _)| at)
    };
    [of(".entry"), of(".func")].into_iter().flatten().min()
}

/// The name in `.visible .entry name(..)` or `.func (.param .b32 result) name(..)`.
pub fn function_name(header: &str) -> &str {
    let end = |character: char| character == '(' || character.is_whitespace();
    from_name(header).split(end).next().unwrap_or_default()
}

/// The part of a function's header from its name on.
fn from_name(header: &str) -> &str {
    let after_keyword = [".entry", ".func"]
        .iter()
        .find_map(|keyword| header.split_once(keyword))
        .map_or(header, |(_, after)| after)
        .trim_start();
    let after_result = match after_keyword.strip_prefix('(') {
        Some(result) => result.split_once(')').map_or("", |(_, after)| after),
        None => after_keyword,
    };
    after_result.trim_start()
}

fn max_registers(header: &str) -> Option<u32> {
    let (_, after) = header.split_once(".maxnreg")?;
    after.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests;
