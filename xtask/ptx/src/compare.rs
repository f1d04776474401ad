//! Compares two PTX files function by function, to tell whether two builds made the same code.
//!
//! Moves and renames do not count: mangled names, the numbers of labels, comments, line tables and the order
//! of functions are ignored.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::hash::{Hash as _, Hasher as _};

use ferry_build::Result;
use ferry_ptx::{function_name, next_function, opcode, without_comments};

use crate::ptx::{PtxModule, is_shared_or_converts};

/// Lines shown of each file, from the first one that differs on.
const SHOWN: usize = 4;
/// Name of the part outside functions.
const DECLARATIONS: &str = "declarations outside functions";
/// Prefixes of names that a compiler made.
const MANGLED: [&str; 5] = ["_R", "_Z", "alloc_", "anon", "__unnamed_"];

/// Two PTX files, compared.
#[derive(Debug)]
pub struct Comparison {
    /// Kernels and functions, and the declarations outside functions.
    pub parts: Vec<Part>,
}

/// A kernel, a function that was not inlined, or all declarations, in both files.
#[derive(Debug)]
pub struct Part {
    /// Its name; where that is mangled, one made of the function's code.
    pub name: String,
    before: Option<Vec<Line>>,
    after: Option<Vec<Line>>,
}

/// A line of code.
#[derive(Clone, Debug)]
struct Line {
    /// Number in the file.
    number: usize,
    text: String,
    /// The text with the names that a compiler made replaced.
    plain: String,
}

impl Comparison {
    /// Compares PTX texts.
    ///
    /// # Errors
    ///
    /// A text is not PTX.
    pub fn of(before: &str, after: &str) -> Result<Comparison> {
        let [mut before, mut after] = [parts(before)?, parts(after)?];
        let names: BTreeSet<String> = before.keys().chain(after.keys()).cloned().collect();
        let parts = names.into_iter().map(|name| Part {
            before: before.remove(&name),
            after: after.remove(&name),
            name,
        });
        Ok(Comparison {
            parts: parts.collect(),
        })
    }

    /// Whether every part is the same.
    pub fn is_same(&self) -> bool {
        self.parts.iter().all(Part::is_same)
    }
}

impl Part {
    /// Whether both files have it.
    pub fn is_in_both(&self) -> bool {
        self.before.is_some() && self.after.is_some()
    }

    /// Whether both files have it with the same code.
    pub fn is_same(&self) -> bool {
        self.is_in_both() && self.first_difference().is_none()
    }

    /// Index of the first line that differs.
    fn first_difference(&self) -> Option<usize> {
        let [before, after] = self.lines();
        let pairs = before.iter().zip(after);
        let same = pairs.take_while(|(b, a)| b.plain == a.plain).count();
        (same < before.len().max(after.len())).then_some(same)
    }

    /// Opcodes by which threads share something or which convert, where their numbers differ: opcode, number
    /// before, number after.
    pub fn counts(&self) -> Vec<(String, usize, usize)> {
        let mut counts: BTreeMap<&str, [usize; 2]> = BTreeMap::new();
        for (file, lines) in self.lines().into_iter().enumerate() {
            for opcode in opcodes(lines).filter(|opcode| is_shared_or_converts(opcode)) {
                counts.entry(opcode).or_default()[file] += 1;
            }
        }
        let counts = counts.into_iter().filter(|(_, [b, a])| b != a);
        let counts = counts.map(|(opcode, [b, a])| (opcode.to_owned(), b, a));
        counts.collect()
    }

    fn lines(&self) -> [&[Line]; 2] {
        [&self.before, &self.after].map(|lines| lines.as_deref().unwrap_or_default())
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.parts.iter().try_for_each(|part| write!(f, "{part}"))
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, [before, after]) = (&self.name, self.lines());
        let Some(first) = self.first_difference() else {
            return writeln!(f, "{name}: same");
        };
        match (&self.before, &self.after) {
            (Some(_), None) => writeln!(f, "{name}: only in the first file:")?,
            (None, _) => writeln!(f, "{name}: only in the second file:")?,
            _ => writeln!(f, "{name}: differs, first here:")?,
        }
        for (sign, lines) in [('-', before), ('+', after)] {
            for Line { number, text, .. } in lines.iter().skip(first).take(SHOWN) {
                writeln!(f, "  {sign} {number}: {text}")?;
            }
        }
        if !self.is_in_both() {
            return Ok(());
        }
        let [b, a] = [before, after].map(|lines| opcodes(lines).count());
        writeln!(f, "    instructions {b} -> {a}")?;
        for (opcode, b, a) in self.counts() {
            writeln!(f, "    {opcode} {b} -> {a}")?;
        }
        Ok(())
    }
}

/// Opcodes of all instructions.
fn opcodes(lines: &[Line]) -> impl Iterator<Item = &str> {
    let statements = lines
        .iter()
        .flat_map(|line| line.text.split([';', '{', '}']));
    let opcodes = statements.map(|statement| opcode(statement.trim()));
    opcodes.filter(|opcode| opcode.starts_with(|first: char| first.is_ascii_alphabetic()))
}

/// A function, or a line outside functions, as it is in the file.
struct Item {
    /// Its name; none of a declaration without a mangled one.
    name: String,
    is_function: bool,
    /// Whether its name may change: it is not a kernel, and a compiler made the name.
    is_free: bool,
    /// Number and text of each line.
    lines: Vec<(usize, String)>,
}

/// Lines of a file by the parts that they belong to.
fn parts(text: &str) -> Result<BTreeMap<String, Vec<Line>>> {
    let items = items(text)?;
    let mut names = HashMap::new();
    // Each pass reaches callees one level deeper; recursion never settles.
    for _ in 0..=items.len() {
        let free = items.iter().filter(|item| item.is_free);
        let next: HashMap<String, String> = free
            .map(|item| (item.name.clone(), digest(&item.text(&names))))
            .collect();
        if next == names {
            break;
        }
        names = next;
    }
    let mut parts: BTreeMap<String, Vec<Line>> = BTreeMap::new();
    for item in items {
        let part = match (item.is_function, item.is_free) {
            (false, _) => DECLARATIONS,
            (true, true) => &names[&item.name],
            (true, false) => &item.name,
        };
        let lines = item.text(&names);
        parts.entry(part.to_owned()).or_default().extend(lines);
    }
    if let Some(lines) = parts.get_mut(DECLARATIONS) {
        lines.sort_by(|a, b| a.plain.cmp(&b.plain));
    }
    Ok(parts)
}

/// A name for what these lines say.
fn digest(lines: &[Line]) -> String {
    let mut hasher = DefaultHasher::new();
    lines.iter().for_each(|line| line.plain.hash(&mut hasher));
    format!("function {:016x}", hasher.finish())
}

fn items(text: &str) -> Result<Vec<Item>> {
    // Refuses other text.
    PtxModule::parse(text)?;
    let text = without_comments(text);
    let (mut items, mut outside) = (Vec::new(), Vec::new());
    let (mut rest, mut number) = (text.as_str(), 1);
    while let Some((header, body, after)) = next_function(rest) {
        // All three are slices of `rest`: the header begins after the text outside functions.
        let start = header.as_ptr() as usize - rest.as_ptr() as usize;
        let (before, function) = rest[..rest.len() - after.len()].split_at(start);
        outside.extend(code(number, before));
        number += newlines(before);
        if body.is_some() {
            let name = function_name(header).to_owned();
            items.push(Item {
                is_function: true,
                is_free: is_mangled(&name) && !header.contains(".entry"),
                name,
                lines: code(number, function).collect(),
            });
        } else if header.starts_with(".extern") {
            outside.extend(code(number, header));
        }
        number += newlines(function);
        rest = after;
    }
    outside.extend(code(number, rest));
    items.extend(outside.into_iter().map(|(number, line)| {
        let name = words(&line).find(|word| is_mangled(word));
        Item {
            name: name.unwrap_or_default().to_owned(),
            is_function: false,
            is_free: name.is_some(),
            lines: vec![(number, line)],
        }
    }));
    Ok(items)
}

/// Lines that are code, with their numbers.
fn code(first_number: usize, text: &str) -> impl Iterator<Item = (usize, String)> {
    let mut in_section = false;
    let lines = text.lines().map(str::trim).enumerate();
    lines.filter_map(move |(index, line)| {
        in_section |= line.starts_with(".section");
        let is_table = line.starts_with(".loc") && !line.starts_with(".local");
        let is_code = !(line.is_empty() || in_section || is_table || line.starts_with(".file"));
        in_section &= !line.ends_with('}');
        is_code.then(|| (first_number + index, line.to_owned()))
    })
}

impl Item {
    /// Its lines, with names that a compiler made replaced: by those of `names`, or by numbers in the order
    /// of their first use.
    fn text(&self, names: &HashMap<String, String>) -> Vec<Line> {
        let mut numbers = HashMap::new();
        let mut numbered = |word: &str| {
            let next = numbers.len();
            format!("name{}", *numbers.entry(word.to_owned()).or_insert(next))
        };
        let mut replaced = |word: &str| {
            if ["$", "__local_depot", "prototype_"]
                .iter()
                .any(|start| word.starts_with(start))
            {
                return numbered(word);
            }
            if !is_mangled(word) {
                return word.to_owned();
            }
            let base = word.rsplit_once("_param_").map_or(word, |(base, _)| base);
            let name: &str = match names.get(base) {
                _ if base == self.name => "own",
                Some(name) => name,
                None => &numbered(base),
            };
            word.replacen(base, name, 1)
        };
        let lines = self.lines.iter().map(|(number, text)| Line {
            number: *number,
            text: text.clone(),
            plain: with_words(text, &mut replaced),
        });
        lines.collect()
    }
}

/// Whether a character is part of a word.
fn is_in_word(character: char) -> bool {
    character.is_ascii_alphanumeric() || "_$%".contains(character)
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|character| !is_in_word(character))
        .filter(|word| !word.is_empty())
}

/// A line with each word replaced.
fn with_words(line: &str, mut replaced: impl FnMut(&str) -> String) -> String {
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    for word in words(line) {
        let start = word.as_ptr() as usize - rest.as_ptr() as usize;
        text += &rest[..start];
        text += &replaced(word);
        rest = &rest[start + word.len()..];
    }
    text + rest
}

fn is_mangled(word: &str) -> bool {
    MANGLED.iter().any(|beginning| word.starts_with(beginning))
}

fn newlines(text: &str) -> usize {
    text.matches('\n').count()
}

#[cfg(test)]
mod tests;
