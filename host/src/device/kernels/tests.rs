//! Acceptance and refusal of kernels by their text.

use super::*;

/// A PTX with every kernel, as the compiler writes it.
fn ptx() -> String {
    ptx_of(KernelSet::Plain.kernels(), argument_bytes)
}

/// A PTX with every kernel with options, whose epilogue has `epilogue` bytes.
fn ptx_with_options(epilogue: u64) -> String {
    ptx_of_set(KernelSet::WithOptions, epilogue)
}

/// A PTX with every kernel of a set that takes options, whose epilogue has `epilogue` bytes.
fn ptx_of_set(set: KernelSet, epilogue: u64) -> String {
    ptx_of(set.kernels(), |kernel| {
        let combines = kernel.name().contains("combine");
        option_bytes(kernel) + if combines { epilogue } else { 0 }
    })
}

fn ptx_of(kernels: impl Iterator<Item = Kernel>, bytes: impl Fn(Kernel) -> u64) -> String {
    let fingerprint = LAYOUT_FINGERPRINT.to_le_bytes();
    let fingerprint = fingerprint.map(|byte| byte.to_string()).join(", ");
    let mut text = format!(
        ".version 8.3\n.target sm_90a\n.address_size 64\n\
         .visible .global .align 8 .b8 {FINGERPRINT_VARIABLE}[8] = {{{fingerprint}}};\n"
    );
    for kernel in kernels {
        for shmem in [false, true] {
            let (entry, bytes) = (kernel.entry(shmem), bytes(kernel));
            // Some are the same with and without ranks of other nodes.
            if !text.contains(&format!(" {entry}(")) {
                let parameter = format!("\t.param .align 8 .b8 {entry}_param_0[{bytes}]\n");
                text += &format!(".visible .entry {entry}(\n{parameter})\n{{\n\tret;\n}}\n");
            }
        }
    }
    text
}

#[test]
fn an_epilogue_of_any_size_is_taken() {
    for bytes in [0, 8, 40, MAX_EPILOGUE_BYTES as u64] {
        // SAFETY: nothing is launched.
        let kernels = unsafe { Kernels::default().with_epilogue(ptx_with_options(bytes)) }.unwrap();
        assert_eq!(kernels.epilogue_bytes(), Some(bytes as usize));
        let text = "Kernels::default() with an epilogue for sm_90a";
        assert_eq!(format!("{kernels:?}"), text);
    }
    assert_eq!(Kernels::default().epilogue_bytes(), None);
}

#[test]
fn kernels_with_options_and_ferrys_own_steps_are_taken_as_those() {
    let steps = size_of::<Steps>() as u64;
    let given = |bytes: u64| {
        // SAFETY: nothing is launched.
        unsafe { Kernels::default().with_options(ptx_with_options(bytes)) }
    };
    let kernels = given(steps).unwrap();
    assert_eq!(kernels.epilogue_bytes(), None);
    let text = "Kernels::default() with options for sm_90a";
    assert_eq!(format!("{kernels:?}"), text);
    for other in [0, steps - 8, steps + 8] {
        let text = given(other).unwrap_err().to_string();
        let base = option_bytes(Kernel::Combine);
        let wanted = format!("[{}] bytes, but takes [{}]", base + steps, base + other);
        assert!(text.ends_with(&wanted), "{text}");
    }
}

#[test]
fn kernels_for_rows_are_taken_beside_the_others() {
    let steps = size_of::<Steps>() as u64;
    let rows = ptx_of_set(KernelSet::Rows, steps);
    assert!(rows.contains("ferry_dispatch_shmem(") && !rows.contains("_local("));
    // SAFETY: nothing is launched.
    let given = |text: String| unsafe { Kernels::default().with_rows(text) };
    let kernels = given(rows.clone()).unwrap();
    let text = "Kernels::default() with rows for sm_90a";
    assert_eq!(format!("{kernels:?}"), text);
    // SAFETY: nothing is launched.
    let all = unsafe { kernels.clone().with_epilogue(ptx_with_options(8)) }.unwrap();
    let text = "Kernels::default() with an epilogue for sm_90a with rows for sm_90a";
    assert_eq!(format!("{all:?}"), text);
    assert_eq!(all.epilogue_bytes(), Some(8));
    assert_ne!(all, kernels);
    assert_ne!(kernels, Kernels::default());
    // Those with options lack the kernels that take none.
    let text = given(ptx_with_options(steps)).unwrap_err().to_string();
    assert_eq!(text, "the PTX for sm_90a has no kernel ferry_give_up");
    let text = given(rows.replace("ferry_dispatch_wait", "other"))
        .unwrap_err()
        .to_string();
    assert_eq!(text, "the PTX for sm_90a has no kernel ferry_dispatch_wait");
    let base = option_bytes(Kernel::Combine);
    let text = given(ptx_of_set(KernelSet::Rows, 8))
        .unwrap_err()
        .to_string();
    let wanted = format!("[{}] bytes, but takes [{}]", base + steps, base + 8);
    assert!(text.ends_with(&wanted), "{text}");
}

#[test]
fn kernels_with_options_that_do_not_fit_are_refused() {
    let refused = |text: String| {
        checked_with_options(text, KernelSet::WithOptions, None)
            .err()
            .expect("refused")
            .to_string()
    };
    let base = option_bytes(Kernel::Combine);
    let text = refused(ptx_with_options(MAX_EPILOGUE_BYTES as u64 + 8));
    let most = base + MAX_EPILOGUE_BYTES as u64;
    let wanted = format!(
        "given parameters of [{most}] bytes, but takes [{}]",
        most + 8
    );
    assert!(text.ends_with(&wanted), "{text}");
    // One combine with another epilogue than the others.
    let given = format!("ferry_combine_wait_param_0[{}]", base + 16);
    let other = format!("ferry_combine_wait_param_0[{}]", base + 8);
    let text = refused(ptx_with_options(16).replace(&given, &other));
    let wanted = format!("[{}] bytes, but takes [{}]", base + 16, base + 8);
    assert!(
        text.contains("ferry_combine_wait") && text.ends_with(&wanted),
        "{text}"
    );
    let text = refused(ptx_with_options(8).replace("ferry_dispatch_wait", "other"));
    assert_eq!(text, "the PTX for sm_90a has no kernel ferry_dispatch_wait");
    // Those without options.
    let text = refused(ptx());
    assert!(
        text.contains("ferry_dispatch_async is given parameters of"),
        "{text}"
    );
    let text = refused(ptx_with_options(8).replace(FINGERPRINT_VARIABLE, "other"));
    assert!(text.contains("is missing"), "{text}");
}

fn refused(text: String) -> KernelsError {
    checked(text).err().expect("it must be refused")
}

#[test]
fn kernels_that_fit_are_taken_with_others_beside_them() {
    let more = ".visible .entry my_combine(\n\t.param .u32 my_combine_param_0\n)\n{\n\tret;\n}\n";
    let taken = checked(ptx() + more).unwrap();
    assert_eq!(taken.target, Target::SM_90A);
    assert!(taken.text.ends_with("}\n\0"));
    // SAFETY: nothing is launched.
    let kernels = unsafe { Kernels::from_ptx(ptx()) }.unwrap();
    assert_eq!(format!("{kernels:?}"), "Kernels for sm_90a");
}

/// The compiler of a driver may give them so many registers that no block fits.
#[test]
fn kernels_of_larger_blocks_are_limited_in_registers_unless_they_say_so() {
    let limit = format!(".maxnreg {}", Kernel::FusedSilu.max_registers());
    let header = |text: &str| {
        let (_, rest) = text.split_once(".entry ferry_fused_silu(").unwrap();
        rest.split_once('{').unwrap().0.to_owned()
    };
    let taken = checked(ptx()).unwrap();
    assert!(header(&taken.text).contains(&limit), "{}", taken.text);
    assert_eq!(taken.text.matches(".maxnreg").count(), 1);
    for own in [".maxnreg 64", ".maxntid 640, 1, 1", ".reqntid 640"] {
        let head = header(&ptx());
        let text = ptx().replace(&head, &format!("{head}{own}\n"));
        let taken = checked(text.clone()).unwrap();
        assert_eq!(taken.text.strip_suffix('\0'), Some(text.as_str()), "{own}");
    }
}

#[test]
fn text_that_is_no_ptx_is_refused() {
    let of = |text: String| refused(text).to_string();
    let text = of("int main() {}".into());
    assert_eq!(text, "the kernels' text is not PTX: it has no .version");
    let text = of(ptx() + "\0");
    assert!(
        text.ends_with(&format!("byte {} is zero", ptx().len())),
        "{text}"
    );
    let text = of(ptx().replace(".address_size 64", ".address_size 32"));
    assert!(
        text.ends_with("its addresses have 32 bits, not 64"),
        "{text}"
    );
}

#[test]
fn other_architectures_are_refused() {
    for name in ["sm_75", "compute_90", "sm_", "sm_9x", "sm_90b", "sm_+90"] {
        let error = refused(ptx().replace("sm_90a", name));
        let found = name.to_owned();
        assert_eq!(error, KernelsError::Target { found }, "{name}");
    }
    let error = refused(ptx().replace(".target sm_90a\n", ""));
    assert!(matches!(error, KernelsError::Target { found } if found.is_empty()));
}

#[test]
fn a_kernel_that_is_missing_is_named() {
    for kernel in Kernel::without_options() {
        for shmem in [false, true] {
            let entry = kernel.entry(shmem);
            let text = ptx().replace(&format!(" {entry}("), " other(");
            let text = refused(text).to_string();
            assert_eq!(text, format!("the PTX for sm_90a has no kernel {entry}"));
        }
    }
    // A function is not a kernel.
    let text = ptx().replace(".visible .entry ferry_combine(", ".func ferry_combine(");
    assert!(matches!(refused(text), KernelsError::Missing { .. }));
}

#[test]
fn kernels_of_one_node_are_taken_and_told_from_those_of_several() {
    let of = |text: &str| has_shmem(&read(text).unwrap());
    assert!(of(&ptx()) && of(&ptx_with_options(8)));
    let without = |text: String| {
        let functions = text.split_inclusive("}\n");
        functions
            .filter(|text| !text.contains("_shmem"))
            .collect::<String>()
    };
    let plain = without(ptx());
    assert!(plain.contains("ferry_combine(") && !of(&plain));
    assert!(checked(plain).is_ok());
    for set in [KernelSet::WithOptions, KernelSet::Rows] {
        let text = without(ptx_of_set(set, 8));
        assert!(!of(&text) && checked_with_options(text, set, None).is_ok());
    }
}

#[test]
fn a_kernel_of_other_arguments_is_named_with_both_sizes() {
    let wanted = argument_bytes(Kernel::Combine);
    let at = |bytes| format!("ferry_combine_param_0[{bytes}]");
    let error = refused(ptx().replace(&at(wanted), &at(wanted + 8)));
    assert_eq!(
        error.to_string(),
        format!(
            "the kernel ferry_combine is given parameters of [{wanted}] bytes, but takes [{}]",
            wanted + 8
        )
    );
    let two = format!("{},\n\t.param .b32 more", at(wanted));
    let error = refused(ptx().replace(&at(wanted), &two));
    let KernelsError::Parameters { found, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(found, [wanted, 4]);
}

#[test]
fn another_layout_is_refused_with_both_fingerprints() {
    let other_name = ptx().replace(FINGERPRINT_VARIABLE, "other");
    // Longer than any memory.
    let too_long = ptx().replace("fingerprint[8]", "fingerprint[9999999999999999]");
    for ptx in [other_name, too_long] {
        let text = refused(ptx).to_string();
        assert!(
            text.contains("ferry_layout_fingerprint is missing"),
            "{text}"
        );
    }
    let mut bytes = LAYOUT_FINGERPRINT.to_le_bytes();
    bytes[0] ^= 1;
    let first = |bytes: [u8; 8]| format!("= {{{}, ", bytes[0]);
    let other = ptx().replace(&first(LAYOUT_FINGERPRINT.to_le_bytes()), &first(bytes));
    let found = Some(u64::from_le_bytes(bytes));
    let wanted = LAYOUT_FINGERPRINT;
    assert_eq!(refused(other), KernelsError::Layout { wanted, found });
}

#[test]
fn devices_run_what_was_compiled_for_them() {
    let runs = |name: &str, major, minor| Target::parse(name).unwrap().runs_on(major, minor);
    assert!(runs("sm_80", 8, 0) && runs("sm_80", 8, 9) && runs("sm_80", 12, 0));
    assert!(!runs("sm_80", 7, 5) && !runs("sm_90", 8, 9));
    assert!(runs("sm_90a", 9, 0) && !runs("sm_90a", 10, 0) && !runs("sm_90a", 8, 0));
    assert!(runs("sm_100f", 10, 3) && !runs("sm_103f", 10, 0) && !runs("sm_100f", 12, 0));
    for target in [Target::SM_80, Target::SM_90A, Target::SM_100A] {
        assert_eq!(Target::parse(&target.to_string()), Some(target));
    }
}

#[test]
fn other_kernels_are_checked_by_name_parameter_and_layout() {
    let other =
        ".visible .entry other(\n\t.param .align 8 .b8 other_param_0[24]\n)\n{\n\tret;\n}\n";
    let text = ptx() + other;
    let check = |text: &str, bytes| Kernels::check_others(text, &[("other", bytes)]);
    assert_eq!(check(&text, 24), Ok(()));
    let missing = check(&ptx(), 24).unwrap_err().to_string();
    assert_eq!(missing, "the PTX for sm_90a has no kernel other");
    let parameters = check(&text, 32).unwrap_err().to_string();
    assert!(parameters.ends_with("of [32] bytes, but takes [24]"));
    let layout = check(&text.replace(FINGERPRINT_VARIABLE, "another"), 24);
    assert!(matches!(
        layout,
        Err(KernelsError::Layout { found: None, .. })
    ));
    assert!(matches!(check("", 24), Err(KernelsError::NotPtx { .. })));
    let target = check(&text.replace("sm_90a", "sm_75"), 24);
    assert!(matches!(target, Err(KernelsError::Target { .. })));
}
