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

fn verdict<'a>(comparison: &'a Comparison, name: &str) -> &'a PartComparison {
    let mut parts = comparison.parts.iter();
    parts.find(|part| part.name.contains(name)).unwrap()
}

fn compared(after: &str) -> Comparison {
    Comparison::of(BEFORE, after).unwrap()
}

#[test]
fn moved_and_renamed_functions_are_the_same() {
    let comparison = compared(&moved());
    assert!(comparison.is_same(), "{comparison}");
    assert_eq!(comparison.parts.len(), 5);
}

#[test]
fn another_instruction_is_shown_with_its_context_and_counted() {
    let after = moved().replace("ld.global.u32 	%r2", "ld.relaxed.gpu.global.u32 	%r2");
    let comparison = compared(&after);
    assert!(!comparison.is_same());
    let text = comparison.to_string();
    assert!(text.contains("empty: same"), "{text}");
    assert!(
        text.contains("    memory: ld.global.u32 1 -> 0\n"),
        "{text}"
    );
    assert!(
        text.contains("    memory: ld.relaxed.gpu.global.u32 0 -> 1\n"),
        "{text}"
    );
    let Verdict::Differs(difference) = &verdict(&comparison, "send").verdict else {
        panic!("{text}")
    };
    assert!(text.contains("    instructions 9 -> 9\n"), "{text}");
    assert!(!text.contains("unchanged"), "{text}");
    assert_eq!(difference.leading.len(), 3);
    assert_eq!(difference.before[0], "18: ld.global.u32 \t%r2, [%rd1];");
    assert_eq!(difference.before.len(), 4);
    assert!(difference.after[0].contains("ld.relaxed"));
}

#[test]
fn shuffles_votes_and_barriers_are_counted() {
    let after = BEFORE
        .replace(
            "	bar.sync 	0;",
            "	bar.sync 	0;\n	bar.sync 	0;\n	vote.sync.any.pred %p1, %p2, -1;",
        )
        .replace("	shfl.sync.idx.b32 	%r3, %r2, 0, 31, -1;\n", "");
    let comparison = compared(&after);
    let counts = &verdict(&comparison, "send").counts;
    assert_eq!(
        counts[..],
        [
            (InstructionKind::Shuffle, "shfl.sync.idx.b32".into(), 1, 0),
            (InstructionKind::Vote, "vote.sync.any.pred".into(), 0, 1),
            (InstructionKind::Barrier, "bar.sync".into(), 1, 2),
        ]
    );
}

#[test]
fn bits_that_are_not_counted_any_more_and_conversions_show() {
    let counting = "	popc.b64 	%r1, %rd2;\n	clz.b32 	%r2, %r1;\n	mov.b32 	%r1, 7";
    let before = BEFORE.replace("	mov.b32 	%r1, 7", counting);
    let after = before
        .replace("	popc.b64 	%r1, %rd2;\n", "")
        .replace("clz.b32", "cvt.u32.u64");
    let comparison = Comparison::of(&before, &after).unwrap();
    assert_eq!(
        verdict(&comparison, "send").counts[..],
        [
            (InstructionKind::Bit, "clz.b32".into(), 1, 0),
            (InstructionKind::Bit, "popc.b64".into(), 1, 0),
            (InstructionKind::Conversion, "cvt.u32.u64".into(), 0, 1),
        ]
    );
    let text = comparison.to_string();
    assert!(text.contains("bits: popc.b64 1 -> 0"), "{text}");
}

#[test]
fn calls_of_other_functions_are_no_other_names() {
    let swapped = BEFORE
        .replace("call.uni _RNvCs7Yi_3gpu5write", "call.uni X")
        .replace(
            "call.uni _RNvCs7Yi_3gpu4read",
            "call.uni _RNvCs7Yi_3gpu5write",
        )
        .replace("call.uni X", "call.uni _RNvCs7Yi_3gpu4read");
    let comparison = compared(&swapped);
    assert!(matches!(
        verdict(&comparison, "send").verdict,
        Verdict::Differs(_)
    ));
}

#[test]
fn another_body_of_a_function_is_not_laid_to_its_caller() {
    let after = moved().replace("st.global.u32 	[%rd1], 1", "st.global.u32 	[%rd1], 2");
    let comparison = compared(&after);
    assert_eq!(verdict(&comparison, "send").verdict, Verdict::Same);
    let equal = "calls, bits, conversions: unchanged";
    assert!(comparison.to_string().contains(equal), "{comparison}");
    assert!(matches!(
        verdict(&comparison, "write").verdict,
        Verdict::Differs(_)
    ));
    assert!(!comparison.is_same());
}

#[test]
fn other_register_numbers_are_said_to_be_that() {
    let after = BEFORE.replace("%r2", "%r9").replace("%r<4>", "%r<10>");
    let comparison = compared(&after);
    let part = verdict(&comparison, "send");
    assert_eq!(part.verdict, Verdict::OtherRegisterNumbers);
    assert!(!comparison.is_same());
    let other = BEFORE.replace("%r3, %r2", "%r2, %r3");
    assert!(matches!(
        verdict(&compared(&other), "send").verdict,
        Verdict::Differs(_)
    ));
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
    assert!(matches!(
        verdict(&other, "send").verdict,
        Verdict::Differs(_)
    ));
    let renamed = of(&before.replace("3ONE", "4LAST").replace("3TWO", "5FIRST"));
    assert!(renamed.is_same(), "{renamed}");
}

#[test]
fn missing_kernels_functions_and_declarations_differ() {
    let without = |start: &str, end: &str| {
        let (head, rest) = BEFORE.split_once(start).unwrap();
        format!("{head}{}", rest.split_once(end).unwrap().1)
    };
    let kernel = compared(&without(".visible .entry empty()", "}\n"));
    assert_eq!(verdict(&kernel, "empty").verdict, Verdict::OnlyBefore);
    let function = compared(&without(".func _RNvCs7Yi_3gpu4read()", "}\n"));
    assert_eq!(verdict(&function, "4read").verdict, Verdict::OnlyBefore);
    let shared = compared(&BEFORE.replace(".align 128", ".align 16"));
    assert!(matches!(
        verdict(&shared, "declarations").verdict,
        Verdict::Differs(_)
    ));
    let added = format!("{BEFORE}.visible .entry more()\n{{\n	ret;\n}}\n");
    assert_eq!(
        verdict(&compared(&added), "more").verdict,
        Verdict::OnlyAfter
    );
}

#[test]
fn text_that_is_not_ptx_is_refused() {
    assert!(Comparison::of(BEFORE, "hello").is_err());
}
