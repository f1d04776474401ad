//! Single instructions.

/// A line that is a single instruction without a predicate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction<'a> {
    /// Its name with all suffixes: "ld.global.v4.b32".
    pub opcode: &'a str,
    /// Operands, which commas separate, except those in brackets and braces.
    pub operands: Vec<&'a str>,
}

impl<'a> Instruction<'a> {
    /// Reads a line without comments. `None` for all other lines.
    pub fn of(line: &'a str) -> Option<Self> {
        let text = line.trim().strip_suffix(';')?;
        let (opcode, operands) = text.split_once(char::is_whitespace)?;
        let is_plain = opcode.starts_with(|first: char| first.is_ascii_lowercase());
        if !is_plain || text.contains(';') || opcode.starts_with("call") {
            return None;
        }
        let mut depth = 0;
        let operands = operands.split(|letter| {
            depth += match letter {
                '{' | '[' => 1,
                '}' | ']' => -1,
                _ => 0,
            };
            letter == ',' && depth == 0
        });
        Some(Self {
            opcode,
            operands: operands.map(str::trim).collect(),
        })
    }
}

/// The opcode of a statement, without its labels and predicate.
pub fn opcode(statement: &str) -> &str {
    statement
        .split_whitespace()
        .find(|word| !word.ends_with(':') && !word.starts_with('@'))
        .unwrap_or_default()
}
