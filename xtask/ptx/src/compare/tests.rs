//! Tests of the comparison, on a text with two kernels and two functions.

use super::*;

const BEFORE: &str = "
.version 8.3
.target sm_90a
.extern .shared .align 128 .b8 ring[];
.func _RNvCs7Yi_3gpu5write
(
	.param .b64 _RNvCs7Yi_3gpu5write_param_0
)
;
.visible .entry send(
	.param .u64 send_param_0
)
{
	.reg .b32 	%r<4>;
	ld.param.b64 	%rd1, [send_param_0];
	mov.b32 	%r1, 7;
$L__BB0_1:                              // %loop
	ld.global.u32 	%r2, [%rd1];
	@%p1 bra $L__BB0_1;
	bar.sync 	0;
	shfl.sync.idx.b32 	%r3, %r2, 0, 31, -1;
	call.uni _RNvCs7Yi_3gpu5write, (%r3);
	call.uni _RNvCs7Yi_3gpu4read, (%r3);
	ret;
}
.visible .entry empty()
{
	ret;
}
.func _RNvCs7Yi_3gpu5write(
	.param .b64 _RNvCs7Yi_3gpu5write_param_0
)
{
	st.param.b64 	[_RNvCs7Yi_3gpu5write_param_0], %rd1;
	st.global.u32 	[%rd1], 1;
	ret;
}
.func _RNvCs7Yi_3gpu4read()
{
	ld.global.u32 	%r1, [%rd1];
	ret;
}
";

/// Other mangled names, comments and numbers of labels, and another order of functions.
fn moved() -> String {
    let text = BEFORE
        .replace("Cs7Yi_3gpu", "NtCs9zz_3gpu5fault")
        .replace("BB0_1", "BB3_4")
        .replace("// %loop", "// %other")
        .replace("	mov.b32", "	.loc 1 2 3\n	mov.b32");
    let (first, read) = text
        .split_once(".func _RNvNtCs9zz_3gpu5fault4read()")
        .unwrap();
    let (head, rest) = first.split_once(".visible .entry send(").unwrap();
    let read = format!(".func _RNvNtCs9zz_3gpu5fault4read(){read}");
    format!("{head}{read}.visible .entry send({rest}.section .debug_str\n{{\n.b8 1\n}}\n")
}

fn compared(after: &str) -> Comparison {
    Comparison::of(BEFORE, after).unwrap()
}

/// Whether a part is the same, by its name or a word of its code.
fn is_same(comparison: &Comparison, name: &str) -> bool {
    let has = |part: &&Part| {
        let mut lines = part.lines().into_iter().flatten();
        part.name == name || lines.any(|line| line.text.contains(&format!("{name}(")))
    };
    comparison.parts.iter().filter(has).all(Part::is_same)
}

#[test]
fn moved_and_renamed_functions_are_the_same() {
    let comparison = compared(&moved());
    assert!(comparison.is_same(), "{comparison}");
    assert_eq!(comparison.parts.len(), 5);
}

#[test]
fn another_instruction_is_shown_and_counted() {
    let after = moved().replace("ld.global.u32 	%r2", "ld.relaxed.gpu.global.u32 	%r2");
    let comparison = compared(&after);
    assert!(!comparison.is_same());
    let text = comparison.to_string();
    for part in [
        "empty: same\n",
        "send: differs, first here:\n  - 18: ld.global.u32 \t%r2, [%rd1];\n",
        "    instructions 9 -> 9\n    ld.global.u32 1 -> 0\n    ld.relaxed.gpu.global.u32 0 -> 1\n",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn what_lanes_share_and_what_a_compiler_may_drop_is_counted() {
    let counting = "	popc.b64 	%r1, %rd2;\n	clz.b32 	%r2, %r1;\n	mov.b32 	%r1, 7";
    let before = BEFORE.replace("	mov.b32 	%r1, 7", counting);
    let after = before
        .replace("	popc.b64 	%r1, %rd2;\n", "")
        .replace("clz.b32", "cvt.u32.u64")
        .replace(
            "	bar.sync 	0;",
            "	bar.sync 	0;\n	vote.sync.any.pred %p1, %p2, -1;",
        )
        .replace("	shfl.sync.idx.b32 	%r3, %r2, 0, 31, -1;\n", "")
        .replace("mov.b32", "add.s32");
    let comparison = Comparison::of(&before, &after).unwrap();
    let send = comparison.parts.iter().find(|part| part.name == "send");
    let counts = send.unwrap().counts();
    let counts: Vec<_> = counts
        .iter()
        .map(|(opcode, b, a)| (opcode.as_str(), *b, *a))
        .collect();
    assert_eq!(
        counts,
        [
            ("clz.b32", 1, 0),
            ("cvt.u32.u64", 0, 1),
            ("popc.b64", 1, 0),
            ("shfl.sync.idx.b32", 1, 0),
            ("vote.sync.any.pred", 0, 1),
        ]
    );
}

#[test]
fn calls_of_other_functions_and_other_registers_differ() {
    let swapped = BEFORE
        .replace("call.uni _RNvCs7Yi_3gpu5write", "call.uni X")
        .replace(
            "call.uni _RNvCs7Yi_3gpu4read",
            "call.uni _RNvCs7Yi_3gpu5write",
        )
        .replace("call.uni X", "call.uni _RNvCs7Yi_3gpu4read");
    for after in [swapped, BEFORE.replace("%r3, %r2", "%r2, %r3")] {
        let comparison = compared(&after);
        assert!(
            !is_same(&comparison, "send") && is_same(&comparison, "empty"),
            "{comparison}"
        );
    }
}

#[test]
fn another_body_of_a_function_is_shown_and_its_caller_calls_another() {
    let comparison =
        compared(&moved().replace("st.global.u32 	[%rd1], 1", "st.global.u32 	[%rd1], 2"));
    assert!(!is_same(&comparison, "send"), "{comparison}");
    let text = comparison.to_string();
    for file in ["first", "second"] {
        assert_eq!(
            text.matches(&format!(": only in the {file} file:\n"))
                .count(),
            1,
            "{text}"
        );
    }
    assert!(text.contains("fault5write("), "{text}");
}

#[test]
fn another_table_is_seen_and_another_name_of_it_is_not() {
    let tables = "\
.global .align 4 .b8 _RNvCs7Yi_3gpu3ONE[4] = {1, 2, 3, 4};
.global .align 4 .b8 _RNvCs7Yi_3gpu3TWO[4] = {5, 6, 7, 8};
.visible .entry empty()";
    let before = BEFORE.replace(".visible .entry empty()", tables).replace(
        "mov.b32 	%r1, 7",
        "ld.global.u32 	%r1, [_RNvCs7Yi_3gpu3ONE]",
    );
    let of = |after: &str| Comparison::of(&before, after).unwrap();
    let other = of(&before.replace("[_RNvCs7Yi_3gpu3ONE]", "[_RNvCs7Yi_3gpu3TWO]"));
    assert!(!is_same(&other, "send"), "{other}");
    let renamed = before.replace("3ONE", "4LAST").replace("3TWO", "5FIRST");
    let last = ".global .align 4 .b8 _RNvCs7Yi_3gpu4LAST[4] = {1, 2, 3, 4};\n";
    let renamed = of(&(renamed.replace(last, "") + last));
    assert!(renamed.is_same(), "{renamed}");
}

#[test]
fn missing_kernels_functions_and_declarations_differ() {
    let without = |start: &str, end: &str| {
        let (head, rest) = BEFORE.split_once(start).unwrap();
        format!("{head}{}", rest.split_once(end).unwrap().1)
    };
    for (after, part) in [
        (
            without(".visible .entry empty()", "}\n"),
            "empty: only in the first file:",
        ),
        (
            without(".func _RNvCs7Yi_3gpu4read()", "}\n"),
            ": only in the first file:\n  - 38: .func _RNvCs",
        ),
        (
            BEFORE.replace(".align 128", ".align 16"),
            "declarations outside functions: differs",
        ),
        (
            format!("{BEFORE}.visible .entry more()\n{{\n	ret;\n}}\n"),
            "more: only in the second file:",
        ),
    ] {
        let comparison = compared(&after);
        assert!(
            comparison.to_string().contains(part),
            "{part} in {comparison}"
        );
        assert!(!comparison.is_same());
    }
}

#[test]
fn text_that_is_not_ptx_is_refused() {
    assert!(Comparison::of(BEFORE, "hello").is_err());
}
