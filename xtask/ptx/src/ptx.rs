//! Reads PTX text: the facts that matter to a reviewer.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use ferry_build::{Error, FileContext, Result};
use ferry_ptx::{Function, opcode};

/// First components of the opcodes that access or order memory.
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

/// Whether an instruction is one by which threads share something, or one that a compiler drops or doubles if
/// it mistakes a type: bits that are counted or found, and conversions.
pub(crate) fn is_shared_or_converts(opcode: &str) -> bool {
    let base = base(opcode);
    match base {
        "shfl" | "vote" | "match" | "redux" | "activemask" | "call" => true,
        "popc" | "clz" | "bfind" | "fns" | "brev" | "bfe" | "bfi" | "bmsk" | "cvt" => true,
        _ => is_memory_operation(opcode),
    }
}

/// Whether an instruction accesses or orders memory; a function's parameters are none.
fn is_memory_operation(opcode: &str) -> bool {
    MEMORY_OPCODES.contains(&base(opcode)) && !opcode.contains(".param")
}

fn base(opcode: &str) -> &str {
    opcode.split('.').next().unwrap_or_default()
}

/// A kernel, or a function that was not inlined into one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PtxFunction {
    /// Its name.
    pub name: String,
    /// Whether the host can launch it.
    pub is_kernel: bool,
    /// Number of occurrences of each memory operation, by its full opcode (order, scope, width).
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
    /// Functions that are declared but not defined: a module with any does not load.
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
        let read = ferry_ptx::Module::parse(text).map_err(|error| Error::Parse {
            what: "PTX",
            detail: error.to_string(),
        })?;
        let functions = read.functions.iter();
        let mut module = PtxModule {
            isa: read.version.clone(),
            functions: functions.map(|f| facts(f, read.body(f))).collect(),
            external_functions: read.external_functions.clone(),
        };
        module.functions.sort_by(|a, b| a.name.cmp(&b.name));
        module.external_functions.sort();
        Ok(module)
    }

    /// The functions that the host can launch, sorted by name.
    pub fn kernels(&self) -> impl Iterator<Item = &PtxFunction> {
        self.functions.iter().filter(|function| function.is_kernel)
    }
}

fn facts(function: &Function, body: &str) -> PtxFunction {
    let mut facts = PtxFunction {
        name: function.name.clone(),
        is_kernel: function.is_kernel,
        ..PtxFunction::default()
    };
    for statement in body.split([';', '{', '}']) {
        let statement = statement.trim();
        if statement.starts_with(".local") {
            facts.local_bytes += declared_bytes(statement);
            continue;
        }
        let opcode = opcode(statement);
        if base(opcode) == "call" {
            facts.calls += 1;
        } else if is_memory_operation(opcode) {
            *facts
                .memory_operations
                .entry(opcode.to_owned())
                .or_default() += 1;
        }
    }
    facts
}

/// Removes each `s7YiMj5BHxIM_` after the `C` of a crate in Rust's mangling: this hash changes with the
/// crate's version and features.
pub(crate) fn without_crate_hashes(name: &str) -> String {
    let mut text = String::new();
    let mut rest = name;
    while let Some(start) = rest.find("Cs").filter(|_| name.starts_with("_R")) {
        let (before, hash) = rest.split_at(start + 1);
        text.push_str(before);
        rest = hash.split_once('_').map_or("", |(_, rest)| rest);
    }
    text + rest
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
    fn names_of_rust_lose_the_hashes_of_crates_alone() {
        let generic = "_RINvNtCs9xjxMia6a3s_9ferry_gpu5fault10signal_allKb0_ECsSRho0oKV1i_7kernels";
        let without = "_RINvNtC9ferry_gpu5fault10signal_allKb0_EC7kernels";
        assert_eq!(without_crate_hashes(generic), without);
        for other in ["_Z9putCs1_IlEvPvT_", "nvshmemCs_quiet"] {
            assert_eq!(without_crate_hashes(other), other);
        }
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
