//! Names that do not count in a comparison, and their replacements.

use std::collections::HashMap;

/// Prefixes of names that a compiler made.
const MANGLED: [&str; 5] = ["_R", "_Z", "alloc_", "anon", "__unnamed_"];

/// Registers that LLVM numbers: `%r12`.
const REGISTERS: [&str; 8] = ["p", "rs", "r", "rd", "rq", "f", "fd", "h"];

/// Replaces words one by one, a name always by the same word.
pub(super) struct Names<'a> {
    /// The function that the words are in.
    own: &'a str,
    shared: &'a HashMap<String, String>,
    running: HashMap<String, String>,
    /// The next number of each kind.
    next: HashMap<String, usize>,
}

impl<'a> Names<'a> {
    pub(super) fn new(own: &'a str, shared: &'a HashMap<String, String>) -> Names<'a> {
        Names {
            own,
            shared,
            running: HashMap::new(),
            next: HashMap::new(),
        }
    }

    pub(super) fn name(&mut self, word: &str) -> Option<String> {
        if word.starts_with('$') {
            return Some(self.running("$L", word));
        }
        if word.starts_with("__local_depot") {
            return Some("__local_depot".into());
        }
        if word.starts_with("prototype_") {
            return Some(self.running("prototype_", word));
        }
        if !is_mangled(word) {
            return None;
        }
        let (base, parameter) = match word.rsplit_once("_param_") {
            Some((base, parameter)) => (base, format!("_param_{parameter}")),
            None => (word, String::new()),
        };
        let base = if base == self.own {
            "own".to_owned()
        } else if let Some(name) = self.shared.get(base) {
            name.clone()
        } else {
            self.running("name", base)
        };
        Some(base + &parameter)
    }

    pub(super) fn register(&mut self, word: &str) -> Option<String> {
        let letters = word.strip_prefix('%')?;
        let kind = letters.trim_end_matches(|character: char| character.is_ascii_digit());
        if kind.len() == letters.len() || !REGISTERS.contains(&kind) {
            return None;
        }
        Some(self.running(&format!("%{kind}"), word))
    }

    fn running(&mut self, kind: &str, word: &str) -> String {
        if let Some(name) = self.running.get(word) {
            return name.clone();
        }
        let next = self.next.entry(kind.to_owned()).or_default();
        let name = format!("{kind}{next}");
        *next += 1;
        self.running.insert(word.to_owned(), name.clone());
        name
    }
}

/// Replaces the words of a line: letters, digits and `_`, `$`, `%`.
pub(super) fn with_names(line: &str, mut replace: impl FnMut(&str) -> Option<String>) -> String {
    let is_part = |character: char| character.is_ascii_alphanumeric() || "_$%".contains(character);
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(start) = rest.find(is_part) {
        text.push_str(&rest[..start]);
        let word = &rest[start..];
        let word = &word[..word.find(|c| !is_part(c)).unwrap_or(word.len())];
        match replace(word) {
            Some(name) => text.push_str(&name),
            None => text.push_str(word),
        }
        rest = &rest[start + word.len()..];
    }
    text + rest
}

pub(super) fn is_mangled(word: &str) -> bool {
    MANGLED.iter().any(|beginning| word.starts_with(beginning))
}

/// Whether a line only declares a number of registers: `.reg .b32 %r<2236>;`.
pub(super) fn is_register_count(line: &str) -> bool {
    line.starts_with(".reg ") && line.ends_with(">;")
}
