//! Additions to libNVVM's PTX: its target, linked functions, the layout's fingerprint, limits.

use ferry_build::{Error, Package, Result, Variant, with_limits};
use ferry_layout::FINGERPRINT_VARIABLE as FINGERPRINT;
use ferry_ptx::Module;

fn error(detail: String) -> Error {
    Error::Parse {
        what: "the PTX of rustc_codegen_nvvm",
        detail,
    }
}

/// The PTX for another target. libNVVM compiles modern IR from compute_100 on; the assembler refuses
/// instructions that sm_90a lacks.
pub(super) fn retargeted(ptx: &str, variant: Variant) -> Result<String> {
    let mut targets = ptx.lines().filter(|line| line.starts_with(".target "));
    let (Some(target), None) = (targets.next(), targets.next()) else {
        return Err(error("it has not one .target".into()));
    };
    let compiled = target.trim_start_matches(".target ").trim();
    if !compiled.starts_with("sm_100") {
        return Err(error(format!("it is for {compiled}, not for sm_100")));
    }
    Ok(ptx.replacen(target, &format!(".target {variant}"), 1))
}

/// The PTX with another module's functions and variables, in place of its declarations of them.
///
/// A declaration that stays is refused: the module would not load.
pub(super) fn with_functions(ptx: &str, functions: &str) -> Result<String> {
    let linked = Module::parse(functions).map_err(|not_ptx| error(not_ptx.to_string()))?;
    let defines = |name: &str| {
        linked
            .functions
            .iter()
            .any(|function| function.name == name)
    };
    let mut rest = ptx;
    let mut text = String::with_capacity(ptx.len() + functions.len());
    while let Some(start) = rest.find(".extern .func") {
        let (before, declaration) = rest.split_at(start);
        let end = declaration
            .find(';')
            .ok_or_else(|| error("a declaration has no end".into()))?;
        let (declaration, after) = declaration.split_at(end + 1);
        let name = ferry_ptx::function_name(declaration);
        if !defines(name) {
            return Err(error(format!("nothing defines its function {name}")));
        }
        text.push_str(before);
        rest = after;
    }
    text.push_str(rest);
    let body = |module: &str| -> Option<usize> {
        let line = module.find(".address_size")?;
        Some(line + module[line..].find('\n')? + 1)
    };
    let none = || error("it has no .address_size".into());
    text.insert_str(
        body(&text).ok_or_else(none)?,
        &functions[body(functions).ok_or_else(none)?..],
    );
    Ok(text)
}

/// The PTX with kernels' parameters loaded by name, as by the stock compiler, rather than through a register:
/// the host finds by name the loads that it replaces in kernels for a shape.
pub(super) fn with_named_parameters(ptx: &str) -> Result<String> {
    let module = Module::parse(ptx).map_err(|not_ptx| error(not_ptx.to_string()))?;
    let ptx = module.text();
    let mut text = String::with_capacity(ptx.len());
    let mut kept = 0;
    for kernel in module.kernels() {
        text.push_str(&ptx[kept..kernel.place.start]);
        kept = kernel.place.end;
        let body = &ptx[kernel.place.clone()];
        text.push_str(&named(body, &format!("{}_param_0", kernel.name)));
    }
    text.push_str(&ptx[kept..]);
    Ok(text)
}

/// The kernel with loads through the register that holds `parameter`'s address replaced by loads by name.
/// Unchanged if the register has another use.
fn named(kernel: &str, parameter: &str) -> String {
    let moved = kernel.lines().find_map(|line| {
        let rest = line.trim_start().strip_prefix("mov.")?;
        let (_, operands) = rest.split_once(char::is_whitespace)?;
        let (register, from) = operands.trim().split_once(", ")?;
        (from.trim_end_matches(';') == parameter).then_some(register)
    });
    let Some(register) = moved else {
        return kernel.to_owned();
    };
    let address = format!("[{register}");
    let names_it = |text: &str| {
        let mut words = text.split(|c: char| !(c.is_alphanumeric() || c == '%' || c == '_'));
        words.any(|word| word == register)
    };
    let mut text = String::with_capacity(kernel.len());
    let mut moves = 0;
    for line in kernel.split_inclusive('\n') {
        if !names_it(line) {
            text.push_str(line);
            continue;
        }
        match line.split_once("ld.param.") {
            Some((before, load))
                if load.contains(&address) && !names_it(&load.replace(&address, "")) =>
            {
                let load = load.replace(&address, &format!("[{parameter}"));
                text.push_str(&format!("{before}ld.param::entry.{load}"));
            }
            _ => {
                moves += 1;
                text.push_str(line);
            }
        }
    }
    match moves {
        1 => text,
        _ => kernel.to_owned(),
    }
}

/// The PTX with the fingerprint, which only the host reads and libNVVM therefore drops. Its value is in the
/// LLVM module that the PTX was made of.
pub(super) fn finished(ptx: &str, module: &str, package: Package) -> Result<String> {
    let read = Module::parse(ptx).map_err(|not_ptx| error(not_ptx.to_string()))?;
    if let Some(name) = read.external_functions.first() {
        return Err(error(format!("nothing defines its function {name}")));
    }
    let mut text = match package {
        Package::Kernels | Package::NodeKernels => with_limits(ptx)?,
        _ => ptx.to_owned(),
    };
    if read.variable::<8>(FINGERPRINT).is_none() {
        let bytes = fingerprint(module)
            .ok_or_else(|| error(format!("the module that it is of has no {FINGERPRINT}")))?;
        let bytes = bytes.map(|byte| byte.to_string()).join(", ");
        text.push_str(&format!(
            "\n.visible .global .align 8 .b8 {FINGERPRINT}[8] = {{{bytes}}};\n"
        ));
    }
    Ok(text)
}

/// The bytes of the fingerprint in LLVM's assembly: `@name = .. c"\04;']\E9\02\A0\BA" ..`.
fn fingerprint(module: &str) -> Option<[u8; 8]> {
    let start = format!("@{FINGERPRINT} = ");
    let line = module.lines().find(|line| line.starts_with(&start))?;
    let (_, text) = line.split_once("c\"")?;
    let mut characters = text.chars();
    let mut bytes = [0; 8];
    for byte in &mut bytes {
        *byte = match characters.next()? {
            '"' => return None,
            '\\' => {
                let digits: String = characters.by_ref().take(2).collect();
                u8::from_str_radix(&digits, 16).ok()?
            }
            character => u8::try_from(character).ok()?,
        };
    }
    (characters.next()? == '"').then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = include_str!("test-kernels.ptx");
    const FUNCTIONS: &str = include_str!("test-functions.ptx");
    const MODULE: &str = "target triple = \"nvptx64-nvidia-cuda\"\n\
        @ferry_layout_fingerprint = internal addrspace(1) global <{ [8 x i8] }> \
        <{ [8 x i8] c\"\\04;']\\E9\\02\\A0\\BA\" }>, align 8\n";

    fn said(refused: Result<String>) -> String {
        refused.unwrap_err().to_string()
    }

    #[test]
    fn only_the_target_changes() {
        let ptx = retargeted(PTX, Variant::Sm90a).unwrap();
        assert_eq!(ptx.replace("sm_90a", "sm_100"), PTX);
        assert!(ptx.contains("\n.target sm_90a\n"), "{ptx}");
        let blackwell = retargeted(&PTX.replace("sm_100", "sm_100a"), Variant::Sm100a).unwrap();
        assert!(blackwell.contains(".target sm_100a\n"), "{blackwell}");
    }

    #[test]
    fn ptx_for_another_generation_or_none_is_not_retargeted() {
        let other = retargeted(&PTX.replace("sm_100", "sm_80"), Variant::Sm90a);
        assert!(said(other).contains("for sm_80, not for sm_100"));
        assert!(said(retargeted("hello", Variant::Sm90a)).contains(".target"));
    }

    #[test]
    fn declarations_are_replaced_by_the_functions() {
        let ptx = with_functions(PTX, FUNCTIONS).unwrap();
        let module = Module::parse(&ptx).unwrap();
        assert!(module.external_functions.is_empty(), "{ptx}");
        assert_eq!(ptx.matches(".version").count(), 1);
        assert!(
            ptx.contains(".extern .shared .align 128 .b8 ring[];"),
            "{ptx}"
        );
        let names: Vec<_> = module.functions.iter().map(|f| f.name.as_str()).collect();
        assert_eq!(names, ["inner", "put_signal", "ferry_dispatch"]);
        assert!(ptx.find(".func put_signal(").unwrap() < ptx.find(".entry").unwrap());
    }

    #[test]
    fn a_function_that_nothing_defines_is_refused_by_its_name() {
        let other = FUNCTIONS.replace("put_signal", "get_signal");
        assert!(said(with_functions(PTX, &other)).contains("function put_signal"));
        assert!(said(finished(PTX, MODULE, Package::Probes)).contains("function put_signal"));
    }

    #[test]
    fn parameters_are_loaded_by_name_unless_their_register_has_another_use() {
        let loads = concat!(
            "\tmov.u64 \t%rd2, ferry_dispatch_param_0;\n",
            "\tld.param.u64 \t%rd1, [%rd2+8];\n",
            "\tld.param.u32 \t%r1, [%rd2];\n",
            "\tld.param.u32 \t%r2, [%rd21];\n"
        );
        let load = "	ld.param.u64 	%rd1, [ferry_dispatch_param_0];\n";
        let ptx = with_functions(PTX, FUNCTIONS).unwrap().replace(load, loads);
        let named = with_named_parameters(&ptx).unwrap();
        for line in [
            "	ld.param::entry.u64 	%rd1, [ferry_dispatch_param_0+8];\n",
            "	ld.param::entry.u32 	%r1, [ferry_dispatch_param_0];\n",
            "	ld.param.u32 	%r2, [%rd21];\n",
        ] {
            assert!(named.contains(line), "{line}{named}");
        }
        for other in [
            "	add.s64 	%rd3, %rd2, 8;\n",
            "	mov.u64 	%rd2, %rd3;\n",
            "	ld.param.u64 	%rd2, [%rd2];\n",
        ] {
            let used = ptx.replace(loads, &format!("{loads}{other}"));
            assert_eq!(
                with_named_parameters(&used).unwrap(),
                ferry_ptx::without_comments(&used)
            );
        }
    }

    #[test]
    fn the_fingerprint_is_the_compiled_one() {
        let ptx = with_functions(PTX, FUNCTIONS).unwrap();
        let ptx = finished(&ptx, MODULE, Package::Probes).unwrap();
        let module = Module::parse(&ptx).unwrap();
        let wanted = [0x04, b';', b'\'', b']', 0xe9, 0x02, 0xa0, 0xba];
        assert_eq!(module.variable(FINGERPRINT), Some(wanted));
        let without = MODULE.replace("@ferry", "@other");
        assert!(
            said(finished(
                &ptx.replace(FINGERPRINT, "x"),
                &without,
                Package::Probes
            ))
            .contains(FINGERPRINT)
        );
    }
}
