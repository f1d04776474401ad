//! Reads what matters to a reviewer out of PTX text.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fmt, fs};

use crate::error::{Error, FileContext, Result};

/// First parts of the opcodes that touch or order memory.
const MEMORY_OPCODES: [&str; 15] = [
    "ld",
    "ldu",
    "st",
    "atom",
    "red",
    "fence",
    "membar",
    "cp",
    "mbarrier",
    "multimem",
    "bar",
    "barrier",
    "prefetch",
    "griddepcontrol",
    "discard",
];

/// Kinds of instructions that threads share something with, counted where two builds differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstructionKind {
    /// Loads, stores, atomics, copies, prefetches.
    Memory,
    /// Exchanges between the lanes of a warp.
    Shuffle,
    /// Votes, matches and reductions of a warp.
    Vote,
    /// Barriers and fences.
    Barrier,
    /// Calls of functions that were not inlined.
    Call,
}

impl InstructionKind {
    /// The kind of an opcode, if it is one of these.
    pub fn of(opcode: &str) -> Option<InstructionKind> {
        let base = opcode.split('.').next().unwrap_or_default();
        match base {
            "shfl" => Some(Self::Shuffle),
            "vote" | "match" | "redux" | "activemask" => Some(Self::Vote),
            "bar" | "barrier" | "mbarrier" | "fence" | "membar" => Some(Self::Barrier),
            "call" => Some(Self::Call),
            _ if opcode.contains(".param") => None,
            _ => MEMORY_OPCODES.contains(&base).then_some(Self::Memory),
        }
    }
}

impl fmt::Display for InstructionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory",
            Self::Shuffle => "shuffle",
            Self::Vote => "vote",
            Self::Barrier => "barrier",
            Self::Call => "call",
        })
    }
}

/// A kernel, or a function that was not inlined into one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PtxFunction {
    /// Its name.
    pub name: String,
    /// Whether the host can launch it.
    pub is_kernel: bool,
    /// How often each memory operation occurs, by its full opcode (order, scope, width).
    pub memory_operations: BTreeMap<String, u32>,
    /// Calls of functions that were not inlined.
    pub calls: u32,
    /// Bytes of local memory that it declares.
    pub local_bytes: u64,
}

/// The functions of a PTX file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PtxModule {
    /// The `.version` line's number.
    pub isa: String,
    /// All functions with a body, sorted by name.
    pub functions: Vec<PtxFunction>,
    /// Functions that are only declared: the module does not load with any.
    pub external_functions: Vec<String>,
}

impl PtxModule {
    /// Reads a PTX file.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or has no `.version`.
    pub fn read(path: &Path) -> Result<PtxModule> {
        PtxModule::parse(&fs::read_to_string(path).file("read", path)?)
    }

    /// Reads PTX text.
    ///
    /// # Errors
    ///
    /// The text has no `.version`.
    pub fn parse(text: &str) -> Result<PtxModule> {
        let text = without_comments(text);
        let isa = text
            .lines()
            .find_map(|line| line.strip_prefix(".version "))
            .ok_or_else(|| Error::Parse {
                what: "PTX",
                detail: "it has no .version".into(),
            })?;
        let mut module = PtxModule {
            isa: isa.trim().into(),
            ..PtxModule::default()
        };
        let mut rest = text.as_str();
        while let Some((header, body, after)) = next_function(rest) {
            let name = function_name(header);
            match body {
                Some(body) => module.functions.push(read_body(name, header, body)),
                None if header.starts_with(".extern") => module.external_functions.push(name),
                None => {}
            }
            rest = after;
        }
        module.functions.sort_by(|a, b| a.name.cmp(&b.name));
        module.external_functions.sort();
        Ok(module)
    }

    /// The functions that the host can launch, sorted by name.
    pub fn kernels(&self) -> impl Iterator<Item = &PtxFunction> {
        self.functions.iter().filter(|function| function.is_kernel)
    }
}

/// Drops `//` and `/* */` comments.
pub(crate) fn without_comments(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find('/') {
        let comment = &rest[start..];
        let end = if comment.starts_with("//") {
            comment.find('\n')
        } else if comment.starts_with("/*") {
            comment.find("*/").map(|end| end + 2)
        } else {
            kept.push_str(&rest[..=start]);
            rest = &rest[start + 1..];
            continue;
        };
        kept.push_str(&rest[..start]);
        rest = end.map_or("", |end| &comment[end..]);
    }
    kept.push_str(rest);
    kept
}

/// The next function: from its directives to the body, the body, and what follows.
///
/// A declaration, which ends with a semicolon, has no body.
pub(crate) fn next_function(text: &str) -> Option<(&str, Option<&str>, &str)> {
    let keyword = [text.find(".entry "), text.find(".func ")]
        .into_iter()
        .flatten()
        .min()?;
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
    Some((header, Some(&rest[..close]), &rest[close + 1..]))
}

/// The name in `.visible .entry name(…)` or `.func (.param .b32 result) name(…)`.
pub(crate) fn function_name(header: &str) -> String {
    let after_keyword = [".entry", ".func"]
        .iter()
        .find_map(|keyword| header.split_once(keyword))
        .map_or(header, |(_, after)| after)
        .trim_start();
    let after_result = match after_keyword.strip_prefix('(') {
        Some(result) => result
            .split_once(')')
            .map_or("", |(_, after)| after)
            .trim_start(),
        None => after_keyword,
    };
    after_result
        .split(['(', '\n', ' '])
        .next()
        .unwrap_or_default()
        .to_owned()
}

fn read_body(name: String, header: &str, body: &str) -> PtxFunction {
    let is_kernel = header.contains(".entry");
    let mut function = PtxFunction {
        name,
        is_kernel,
        ..PtxFunction::default()
    };
    for statement in body.split([';', '{', '}']) {
        let statement = statement.trim();
        if statement.starts_with(".local") {
            function.local_bytes += declared_bytes(statement);
            continue;
        }
        let opcode = opcode(statement);
        let base = opcode.split('.').next().unwrap_or_default();
        if base == "call" {
            function.calls += 1;
        } else if MEMORY_OPCODES.contains(&base) && !opcode.contains(".param") {
            *function
                .memory_operations
                .entry(opcode.to_owned())
                .or_default() += 1;
        }
    }
    function
}

/// The opcode of a statement, without its labels and predicate.
pub(crate) fn opcode(statement: &str) -> &str {
    statement
        .split_whitespace()
        .find(|word| !word.ends_with(':') && !word.starts_with('@'))
        .unwrap_or_default()
}

/// The size in `.local .align 8 .b8 __local_depot0[16]`.
fn declared_bytes(statement: &str) -> u64 {
    let count = statement
        .split_once('[')
        .and_then(|(_, rest)| rest.trim_end_matches(']').parse().ok());
    let bits = statement
        .split_whitespace()
        .filter_map(|word| word.strip_prefix(".b").or(word.strip_prefix(".u")))
        .find_map(|bits| bits.parse::<u64>().ok())
        .unwrap_or(8);
    count.unwrap_or(1) * bits / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = "
.version 8.3
.target sm_90a
.extern .func (.param .b32 func_retval0) missing
(
	.param .b64 missing_param_0
)
;
.func helper
()
;
.visible .const .align 8 .b8 nvshmemi_device_state_d[776];
.visible .entry put(
	.param .u64 .ptr .align 1 put_param_0 // ld.weird
)
.maxntid 1024
{
	.local .align 8 .b8 	__local_depot0[16];
	.reg .b32 	%r<3>;
	ld.param.b64 	%rd1, [put_param_0];
$L__BB0_1:
	@%p1 bra $L__BB0_1;
	// begin inline asm
	{ .reg .pred p; st.release.sys.global.u64 [%rd1], %rd2; @p red.add.release.gpu.global.u32 [%rd1], 1; }
	// end inline asm
	ld.global.v4.b32 	{%r1, %r2, %r3, %r4}, [%rd1];
$L__BB0_2: ld.global.v4.b32 	{%r1, %r2, %r3, %r4}, [%rd1];
	call.uni helper, ();
	/* st.never */ ret;
}
.func helper()
{
	membar.sys;
	ret;
}
";

    #[test]
    fn kernels_functions_and_externals_are_told_apart() {
        let module = PtxModule::parse(PTX).unwrap();
        assert_eq!(module.isa, "8.3");
        assert_eq!(module.external_functions, ["missing"]);
        let names: Vec<_> = module
            .functions
            .iter()
            .map(|function| function.name.as_str())
            .collect();
        assert_eq!(names, ["helper", "put"]);
        assert_eq!(
            module
                .kernels()
                .map(|kernel| kernel.name.as_str())
                .collect::<Vec<_>>(),
            ["put"]
        );
    }

    #[test]
    fn memory_operations_calls_and_local_memory_are_counted() {
        let module = PtxModule::parse(PTX).unwrap();
        let put = module.kernels().next().unwrap();
        let operations: Vec<_> = put
            .memory_operations
            .iter()
            .map(|(name, count)| (name.as_str(), *count))
            .collect();
        assert_eq!(
            operations,
            [
                ("ld.global.v4.b32", 2),
                ("red.add.release.gpu.global.u32", 1),
                ("st.release.sys.global.u64", 1),
            ]
        );
        assert_eq!((put.calls, put.local_bytes), (1, 16));
        assert_eq!(module.functions[0].memory_operations["membar.sys"], 1);
    }

    #[test]
    fn text_that_is_not_ptx_is_refused() {
        assert!(
            PtxModule::parse("hello")
                .unwrap_err()
                .to_string()
                .contains(".version")
        );
    }
}
