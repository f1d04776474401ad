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

use crate::ptx::{InstructionKind, PtxModule, without_crate_hashes};

mod names;

use names::{Names, is_mangled, is_register_count, with_names};

/// Lines shown before and after the first line that differs.
const CONTEXT: usize = 3;

/// Two PTX files, compared.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Kernels by name, then functions that were not inlined, then the declarations outside functions.
    pub parts: Vec<PartComparison>,
}

/// A kernel, a function, or the module's declarations, in both files.
#[derive(Clone, Debug)]
pub struct PartComparison {
    /// Its name, mangled or not.
    pub name: String,
    /// Whether both files have the same.
    pub verdict: Verdict,
    /// Instructions whose numbers differ: kind, opcode, number before, number after.
    pub counts: Vec<(InstructionKind, String, u32, u32)>,
    /// Numbers of instructions of all kinds, before and after.
    pub instructions: (usize, usize),
}

/// Outcome of the comparison of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The same text.
    Same,
    /// The same text if registers are numbered in the order of their first use.
    OtherRegisterNumbers,
    /// Another text.
    Differs(Difference),
    /// The second file does not have it.
    OnlyBefore,
    /// The first file does not have it.
    OnlyAfter,
}

/// The first line that differs, with lines around it. Lines begin with their number in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Lines before it, as in the first file.
    pub leading: Vec<String>,
    /// The line and its successors, in the first file.
    pub before: Vec<String>,
    /// The same, in the second file.
    pub after: Vec<String>,
}

impl Comparison {
    /// Compares PTX texts.
    ///
    /// # Errors
    ///
    /// A text is not PTX.
    pub fn of(before: &str, after: &str) -> Result<Comparison> {
        let [before, after] = [Source::read(before)?, Source::read(after)?];
        let names = SharedNames::of(&before, &after);
        let mut parts = Vec::new();
        let kernels: BTreeSet<_> = [&before, &after]
            .iter()
            .flat_map(|source| source.kernels())
            .collect();
        for name in kernels {
            let part = |source: &Source, names| source.named(name).map(|f| f.text(names));
            let [b, a] = [part(&before, &names.before), part(&after, &names.after)];
            parts.push(PartComparison::of(name, b.as_ref(), a.as_ref()));
        }
        for (b, a) in &names.pairs {
            let name = b.or(*a).map_or("", |index| {
                let source = if b.is_some() { &before } else { &after };
                &source.functions[index].name
            });
            let b = b.map(|index| before.functions[index].text(&names.before));
            let a = a.map(|index| after.functions[index].text(&names.after));
            parts.push(PartComparison::of(name, b.as_ref(), a.as_ref()));
        }
        let outside = [
            before.outside.text(&names.before),
            after.outside.text(&names.after),
        ]
        .map(Text::sorted);
        parts.push(PartComparison::of(
            "declarations outside functions",
            Some(&outside[0]),
            Some(&outside[1]),
        ));
        Ok(Comparison { parts })
    }

    /// Whether every part is the same.
    pub fn is_same(&self) -> bool {
        self.parts.iter().all(|part| part.verdict == Verdict::Same)
    }
}

impl PartComparison {
    fn of(name: &str, before: Option<&Text>, after: Option<&Text>) -> PartComparison {
        let name = name.to_owned();
        let (verdict, counts) = match (before, after) {
            (Some(before), Some(after)) => (Verdict::of(before, after), counts(before, after)),
            (Some(_), None) => (Verdict::OnlyBefore, Vec::new()),
            _ => (Verdict::OnlyAfter, Vec::new()),
        };
        let instructions = |text: Option<&Text>| text.map_or(0, |text| text.opcodes().count());
        PartComparison {
            name,
            verdict,
            counts,
            instructions: (instructions(before), instructions(after)),
        }
    }
}

impl Verdict {
    fn of(before: &Text, after: &Text) -> Verdict {
        let same = |pick: fn(&Line) -> &String| {
            let [b, a] = [before, after].map(|text| text.lines.iter().map(pick));
            b.eq(a)
        };
        if same(|line| &line.plain) {
            return Verdict::Same;
        }
        if same(|line| &line.renumbered) {
            return Verdict::OtherRegisterNumbers;
        }
        let pairs = before.lines.iter().zip(&after.lines);
        let first = pairs
            .take_while(|(before, after)| before.renumbered == after.renumbered)
            .count();
        let shown = |text: &Text, from: usize, to: usize| {
            let lines = text.lines.iter().take(to).skip(from);
            lines
                .map(|line| format!("{}: {}", line.number, line.original))
                .collect()
        };
        let last = first + 1 + CONTEXT;
        Verdict::Differs(Difference {
            leading: shown(before, first.saturating_sub(CONTEXT), first),
            before: shown(before, first, last),
            after: shown(after, first, last),
        })
    }
}

/// Opcodes of a counted kind whose counts differ.
fn counts(before: &Text, after: &Text) -> Vec<(InstructionKind, String, u32, u32)> {
    let [before, after] = [before, after].map(Text::counts);
    let keys: BTreeSet<_> = before.keys().chain(after.keys()).cloned().collect();
    let differing = keys.into_iter().filter_map(|key| {
        let [before, after] =
            [&before, &after].map(|counts| counts.get(&key).copied().unwrap_or(0));
        (before != after).then_some((key.0, key.1, before, after))
    });
    differing.collect()
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.parts.iter().try_for_each(|part| write!(f, "{part}"))
    }
}

impl fmt::Display for PartComparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match &self.verdict {
            Verdict::Same => writeln!(f, "{name}: same")?,
            Verdict::OtherRegisterNumbers => {
                writeln!(f, "{name}: same, but registers have other numbers")?;
            }
            Verdict::OnlyBefore => writeln!(f, "{name}: only in the first file")?,
            Verdict::OnlyAfter => writeln!(f, "{name}: only in the second file")?,
            Verdict::Differs(difference) => {
                writeln!(f, "{name}: differs, first here:")?;
                let Difference {
                    leading,
                    before,
                    after,
                } = difference;
                for (sign, lines) in [(' ', leading), ('-', before), ('+', after)] {
                    for line in lines {
                        writeln!(f, "  {sign} {line}")?;
                    }
                }
                let (before, after) = self.instructions;
                writeln!(f, "    instructions {before} -> {after}")?;
                if self.counts.is_empty() {
                    writeln!(
                        f,
                        "    memory, shuffles, votes, barriers, calls, bits, conversions: unchanged"
                    )?;
                }
            }
        }
        for (kind, opcode, before, after) in &self.counts {
            writeln!(f, "    {kind}: {opcode} {before} -> {after}")?;
        }
        Ok(())
    }
}

/// A PTX file, cut into functions.
struct Source {
    functions: Vec<Function>,
    /// The lines outside functions.
    outside: Function,
}

/// A function's lines, unchanged.
struct Function {
    name: String,
    is_kernel: bool,
    /// Number in the file, and text.
    lines: Vec<(usize, String)>,
}

impl Source {
    fn read(text: &str) -> Result<Source> {
        // Refuses other text.
        PtxModule::parse(text)?;
        let text = without_comments(text);
        let mut source = Source {
            functions: Vec::new(),
            outside: Function::new(String::new(), false),
        };
        let mut rest = text.as_str();
        let mut number = 1;
        while let Some((header, body, after)) = next_function(rest) {
            // All three are slices of `rest`: the header begins after the text outside functions.
            let start = header.as_ptr() as usize - rest.as_ptr() as usize;
            let end = rest.len() - after.len();
            source.outside.push_lines(number, &rest[..start]);
            number += newlines(&rest[..start]);
            if body.is_some() {
                let is_kernel = header.contains(".entry");
                let mut function = Function::new(function_name(header).to_owned(), is_kernel);
                function.push_lines(number, &rest[start..end]);
                source.functions.push(function);
            } else if header.starts_with(".extern") {
                source.outside.push_lines(number, header);
            }
            number += newlines(&rest[start..end]);
            rest = after;
        }
        source.outside.push_lines(number, rest);
        Ok(source)
    }

    fn kernels(&self) -> impl Iterator<Item = &str> {
        let kernels = self.functions.iter().filter(|function| !function.is_free());
        kernels.map(|function| function.name.as_str())
    }

    fn named(&self, name: &str) -> Option<&Function> {
        self.functions.iter().find(|function| function.name == name)
    }

    /// Indices of the functions that are compared by content, not by name.
    fn free(&self) -> Vec<usize> {
        (0..self.functions.len())
            .filter(|&index| self.functions[index].is_free())
            .collect()
    }

    /// Names for variables with mangled names, made of their declarations.
    fn variables(&self) -> HashMap<String, String> {
        let lines = self.outside.lines.iter().map(|(_, line)| line);
        let declared = lines.filter(|line| !line.starts_with(".extern"));
        let named = declared.filter_map(|line| {
            let mut name = None;
            let blank = with_names(line, |word| {
                is_mangled(word).then(|| {
                    name.get_or_insert_with(|| word.to_owned());
                    "variable".to_owned()
                })
            });
            let mut hasher = DefaultHasher::new();
            blank.hash(&mut hasher);
            Some((name?, format!("v{:x}", hasher.finish())))
        });
        named.collect()
    }

    /// A digest of each function with a mangled name and of all that it calls, by name.
    fn digests(&self) -> HashMap<String, u64> {
        let free: Vec<_> = self.free();
        let variables = self.variables();
        let mut digests: HashMap<String, u64> = HashMap::new();
        // Each pass covers callees one level deeper; recursion settles, too.
        for _ in 0..=free.len() {
            let called = digests.iter();
            let called = called.map(|(name, digest)| (name.clone(), format!("{digest:x}")));
            let names = variables.clone().into_iter().chain(called).collect();
            let next = free.iter().map(|&index| {
                let function = &self.functions[index];
                (function.name.clone(), function.text(&names).digest())
            });
            digests = next.collect();
        }
        digests
    }
}

impl Function {
    fn new(name: String, is_kernel: bool) -> Function {
        Function {
            name,
            is_kernel,
            lines: Vec::new(),
        }
    }

    /// Whether its name may change: it is not a kernel, and a compiler made the name.
    fn is_free(&self) -> bool {
        !self.is_kernel && is_mangled(&self.name)
    }

    /// Keeps the lines that are code.
    fn push_lines(&mut self, first_number: usize, text: &str) {
        let mut in_section = false;
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            in_section |= line.starts_with(".section");
            let is_table = line.starts_with(".loc") && !line.starts_with(".local");
            let is_file = line.starts_with(".file");
            if !(line.is_empty() || in_section || is_table || is_file) {
                self.lines.push((first_number + index, line.to_owned()));
            }
            in_section &= !line.ends_with('}');
        }
    }

    /// Its text with compiler-made names replaced, by those of `names` first.
    fn text(&self, names: &HashMap<String, String>) -> Text {
        let mut replaced = Names::new(&self.name, names);
        let mut registers = Names::new("", names);
        let lines = self.lines.iter().map(|(number, original)| {
            let plain = with_names(original, |word| replaced.name(word));
            let renumbered = if is_register_count(&plain) {
                String::new()
            } else {
                with_names(&plain, |word| registers.register(word))
            };
            Line {
                number: *number,
                original: original.clone(),
                plain,
                renumbered,
            }
        });
        Text {
            lines: lines.collect(),
        }
    }
}

/// A function with its names replaced.
struct Text {
    lines: Vec<Line>,
}

struct Line {
    number: usize,
    original: String,
    /// The line with the names of labels, functions and parameters replaced.
    plain: String,
    /// `plain` with registers numbered by their first use.
    renumbered: String,
}

impl Text {
    fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for line in &self.lines {
            line.plain.hash(&mut hasher);
        }
        hasher.finish()
    }

    fn sorted(mut self) -> Text {
        self.lines.sort_by(|a, b| a.plain.cmp(&b.plain));
        self
    }

    /// Number of occurrences of each opcode of a counted kind.
    fn counts(&self) -> BTreeMap<(InstructionKind, String), u32> {
        let mut counts = BTreeMap::new();
        for opcode in self.opcodes() {
            if let Some(kind) = InstructionKind::of(opcode) {
                *counts.entry((kind, opcode.to_owned())).or_default() += 1;
            }
        }
        counts
    }

    /// The opcodes of all instructions.
    fn opcodes(&self) -> impl Iterator<Item = &str> {
        let lines = self.lines.iter();
        let statements = lines.flat_map(|line| line.plain.split([';', '{', '}']));
        let opcodes = statements.map(|statement| opcode(statement.trim()));
        opcodes.filter(|opcode| opcode.starts_with(|first: char| first.is_ascii_alphabetic()))
    }
}

/// New names for functions and variables with mangled names, the same for both files.
struct SharedNames {
    before: HashMap<String, String>,
    after: HashMap<String, String>,
    /// Functions that are compared: index in the first file, index in the second.
    pairs: Vec<(Option<usize>, Option<usize>)>,
}

impl SharedNames {
    /// Pairs functions with the same code, then with the same name, then the rest.
    fn of(before: &Source, after: &Source) -> SharedNames {
        let [digests_before, digests_after] = [before, after].map(Source::digests);
        let mut left = (before.free(), after.free());
        let mut pairs = Vec::new();
        let key = |digests: &HashMap<String, u64>, name: &str| digests.get(name).copied();
        pair_up(&mut left, &mut pairs, |b, a| {
            let (b, a) = (&before.functions[b].name, &after.functions[a].name);
            key(&digests_before, b) == key(&digests_after, a)
        });
        let same_code = pairs.len();
        pair_up(&mut left, &mut pairs, |b, a| {
            let (b, a) = (&before.functions[b].name, &after.functions[a].name);
            without_crate_hashes(b) == without_crate_hashes(a)
        });
        pair_up(&mut left, &mut pairs, |_, _| true);
        let mut names = SharedNames {
            before: before.variables(),
            after: after.variables(),
            pairs: Vec::new(),
        };
        for (index, &(b, a)) in pairs.iter().enumerate() {
            let b = before.functions[b].name.clone();
            let a = after.functions[a].name.clone();
            // Functions with the same code are interchangeable.
            let name = match digests_before.get(&b) {
                Some(digest) if index < same_code => format!("f{digest:x}"),
                _ => format!("pair{index}"),
            };
            names.before.insert(b, name.clone());
            names.after.insert(a, name);
        }
        names.pairs = pairs.iter().map(|&(b, a)| (Some(b), Some(a))).collect();
        names.pairs.extend(left.0.iter().map(|&b| (Some(b), None)));
        names.pairs.extend(left.1.iter().map(|&a| (None, Some(a))));
        names
    }
}

/// Moves each pair that matches, in order, from `left` to `pairs`.
fn pair_up(
    left: &mut (Vec<usize>, Vec<usize>),
    pairs: &mut Vec<(usize, usize)>,
    matches: impl Fn(usize, usize) -> bool,
) {
    let (before, after) = left;
    before.retain(|&b| {
        let Some(place) = after.iter().position(|&a| matches(b, a)) else {
            return true;
        };
        pairs.push((b, after.remove(place)));
        false
    });
}

fn newlines(text: &str) -> usize {
    text.matches('\n').count()
}

#[cfg(test)]
mod tests;
