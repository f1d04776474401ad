//! Texts as compilers write them.

use super::*;

const PTX: &str = "\
//
// .version 1.0 and .entry nobody( are in a comment
//
.version 8.3
.target sm_90a, debug
.address_size 64
.extern .func (.param .b32 func_retval0) missing
(
	.param .b64 missing_param_0
)
;
.func helper
()
;
.visible .global .align 8 .b8 fingerprint[8] = {114, 103, 212};
.visible .global .align 8 .u64 number = 5;
.visible .const .align 4 .b8 short[2] = {3, 0, 0};
.visible .entry put(
	.param .u64 .ptr .align 1 put_param_0, // .entry weird(
	.param .align 16 .b8 put_param_1[336],
	.param .b32 put_param_2
)
.maxntid 1024
.maxnreg 96
{
	{ .reg .pred p; }
	ret; /* } */
}
.func (.param .b32 func_retval0) helper()
{
	ret;
}
.visible .entry none()
{
}
";

#[test]
fn what_it_was_made_for_is_read() {
    let module = Module::parse(PTX).unwrap();
    let Module {
        version,
        target,
        address_bits,
        ..
    } = &module;
    assert_eq!((version.as_str(), target.as_str()), ("8.3", "sm_90a"));
    assert_eq!(*address_bits, 64);
    assert_eq!(Module::parse("hello").unwrap_err(), NotPtx);
    assert_eq!(Module::parse("\n.version 8.0").unwrap().target, "");
}

#[test]
fn kernels_functions_and_externals_are_told_apart() {
    let module = Module::parse(PTX).unwrap();
    assert_eq!(module.external_functions, ["missing"]);
    let names = module.functions.iter().map(|function| &function.name);
    assert_eq!(names.collect::<Vec<_>>(), ["put", "helper", "none"]);
    let kernels = module.kernels().map(|kernel| &kernel.name);
    assert_eq!(kernels.collect::<Vec<_>>(), ["put", "none"]);
    assert!(module.kernel("helper").is_none());
}

#[test]
fn parameters_and_limits_are_read() {
    let module = Module::parse(PTX).unwrap();
    let put = module.kernel("put").unwrap();
    let read = put.parameters.iter();
    let read: Vec<_> = read.map(|p| (p.name.as_str(), p.bytes, p.align)).collect();
    let wanted = [
        ("put_param_0", 8, 8),
        ("put_param_1", 336, 16),
        ("put_param_2", 4, 4),
    ];
    assert_eq!(read, wanted);
    assert_eq!(put.max_registers, Some(96));
    let none = module.kernel("none").unwrap();
    assert_eq!((none.parameters.len(), none.max_registers), (0, None));
}

#[test]
fn parameters_are_read_whatever_a_kernel_is_called() {
    for name in ["e", "entry", "visible", "param"] {
        let ptx = PTX.replace(".entry put(", &format!(".entry {name}("));
        let module = Module::parse(&ptx).unwrap();
        let kernel = module.kernel(name).expect(name);
        let bytes: Vec<_> = kernel.parameters.iter().map(|p| p.bytes).collect();
        assert_eq!(bytes, [8, 336, 4], "{name}");
    }
}

#[test]
fn a_parameter_that_is_too_long_has_no_bytes() {
    let ptx = PTX.replace(
        "b8 put_param_1[336]",
        "b64 put_param_1[2305843009213693994]",
    );
    let module = Module::parse(&ptx).unwrap();
    assert_eq!(module.kernel("put").unwrap().parameters[1].bytes, 0);
}

#[test]
fn what_begins_a_comment_is_text_in_a_string() {
    let file = ".file 1 \"/a//b/*.rs\" // not this\n";
    let module = Module::parse(&PTX.replace(".extern", &format!("{file}.extern"))).unwrap();
    assert!(
        module.text().contains("\"/a//b/*.rs\""),
        "{}",
        module.text()
    );
    assert!(!module.text().contains("not this"));
    assert_eq!(module.kernels().count(), 2);
}

#[test]
fn places_are_those_in_the_text_with_its_comments() {
    let module = Module::parse(PTX).unwrap();
    let put = module.kernel("put").unwrap();
    let text = &PTX[put.place.clone()];
    assert!(text.starts_with(".visible .entry put(") && text.ends_with("/* } */\n}"));
    assert_eq!(&PTX[put.body.start - 1..put.body.start], "{");
    assert_eq!(module.body(put).trim_end(), "\n\t{ .reg .pred p; }\n\tret;");
    assert_eq!(module.text().len(), PTX.len());
}

#[test]
fn bytes_outside_functions_are_read() {
    let module = Module::parse(PTX).unwrap();
    let wanted = [114, 103, 212, 0, 0, 0, 0, 0];
    assert_eq!(module.variable("fingerprint"), Some(wanted));
    assert_eq!(module.variable::<2>("short"), None);
    for other in ["short", "finger", "nothing", "missing"] {
        assert_eq!(module.variable::<8>(other), None, "{other}");
    }
}

#[test]
fn a_variable_that_no_memory_holds_is_refused() {
    let ptx = PTX.replace("fingerprint[8]", "fingerprint[9999999999999999]");
    let module = Module::parse(&ptx).unwrap();
    assert_eq!(module.variable::<8>("fingerprint"), None);
}

#[test]
fn operands_in_brackets_stay_together() {
    let line = "\tld.global.v4.b32 \t{%r1, %r2, %r3, %r4}, [%rd1];";
    let Instruction { opcode, operands } = Instruction::of(line).unwrap();
    assert_eq!(opcode, "ld.global.v4.b32");
    assert_eq!(operands, ["{%r1, %r2, %r3, %r4}", "[%rd1]"]);
    for other in [
        "\t@%p1 mov.b32 %r1, 5;",
        "$L__BB0_1:",
        "\tcall.uni helper, ();",
        "\t{ mov.b32 %r1, 5; }",
    ] {
        assert_eq!(Instruction::of(other), None, "{other}");
    }
}

#[test]
fn white_space_is_as_good_as_a_space() {
    for white in ["\t", "\n", " \t "] {
        let ptx = PTX
            .replace(".entry put(", &format!(".entry{white}put{white}("))
            .replace(".func (", &format!(".func{white}("));
        let module = Module::parse(&ptx).unwrap();
        let names = module.functions.iter().map(|function| &function.name);
        assert_eq!(
            names.collect::<Vec<_>>(),
            ["put", "helper", "none"],
            "{white:?}"
        );
        assert_eq!(
            module.kernel("put").unwrap().parameters.len(),
            3,
            "{white:?}"
        );
    }
}

#[test]
fn a_variable_that_is_a_number_is_read() {
    fn read<const BYTES: usize>(declared: &str) -> Option<[u8; BYTES]> {
        let ptx = PTX.replace(".u64 number = 5", declared);
        Module::parse(&ptx).unwrap().variable("number")
    }
    let five = Some([5, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(read(".u64 number = 5"), five);
    assert_eq!(read(".b64 number = 0x5U"), five);
    assert_eq!(read(".b32 number\t=\t258"), Some([2, 1, 0, 0]));
    assert_eq!(read(".b8 number [2] = {0x7f}"), Some([0x7f, 0]));
    assert_eq!(read::<4>(".u64 number = 5"), None);
    assert_eq!(read::<1>(".b8 number = 256"), None);
    assert_eq!(read::<8>(".u64 number = other"), None);
    assert_eq!(read::<4>(".f32 number = 5"), None);
    assert_eq!(read::<4>(".u16 number[2] = {1, 2}"), None);
    assert_eq!(read::<2>(".u16 number[2] = {1, 2}"), None);
}
