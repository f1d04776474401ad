//! Tests of the digest, on a module with one kernel.

use super::*;

fn digest(ptx: &str, needs: Resources) -> Digest {
    let variant = Variant::Sm90a;
    let module = PtxModule::parse(ptx).unwrap();
    let kernels: Vec<_> = module
        .kernels()
        .map(|kernel| (kernel.name.clone(), needs))
        .collect();
    let violations = violations(
        Package::Kernels,
        CodeGenerator::Stock,
        variant,
        &module,
        &kernels,
    );
    let text = section(Package::Kernels, variant, &module, &kernels);
    Digest {
        package: Package::Kernels,
        generator: CodeGenerator::Stock,
        sections: vec![Section {
            variant,
            text,
            kernels,
        }],
        violations,
    }
}

const PTX: &str = ".version 8.3
.visible .entry send(.param .u64 a)
{
	st.release.sys.global.u64 [%rd1], %rd2;
	ret;
}
";

#[test]
fn the_same_code_has_no_difference() {
    let digest = digest(
        PTX,
        Resources {
            registers: 20,
            ..Resources::default()
        },
    );
    assert_eq!(digest.violations, [""; 0]);
    let header = header(Package::Kernels, CodeGenerator::Stock);
    let committed = format!(
        "{header}\n[sm_80]\nptx 8.0\n{}\n[sm_100a]\nptx 8.6\n",
        digest.sections[0].text
    );
    assert_eq!(digest.compare(&committed), "");
}

#[test]
fn a_digest_of_the_second_generator_is_stale_once_the_stock_one_beside_it_changed() {
    let scratch = tempfile::tempdir().unwrap();
    let root = scratch.path();
    let package = Package::Kernels;
    let [stock, nvvm] = [CodeGenerator::Stock, CodeGenerator::Nvvm]
        .map(|generator| root.join(generator.digest_file(package)));
    fs::create_dir_all(stock.parent().unwrap()).unwrap();
    let text = "\n[sm_80]\nptx 8.0\n\n[sm_90a]\nptx 8.3\n\n[sm_100a]\nptx 8.6\n";
    fs::write(&stock, text).unwrap();
    let of = |variant: Variant| {
        let mut digest = digest(PTX, Resources::default());
        digest.generator = CodeGenerator::Nvvm;
        let section = &mut digest.sections[0];
        section.text = section.text.replace("sm_90a", variant.target_cpu());
        section.variant = variant;
        digest
    };
    let stale = |text: &str| stale_variants(&fs::read_to_string(&nvvm).unwrap(), text);
    of(Variant::Sm90a).bless(root).unwrap();
    assert_eq!(stale(text), [Variant::Sm100a], "it is not there");
    of(Variant::Sm100a).bless(root).unwrap();
    assert_eq!(stale(text), []);
    assert_eq!(of(Variant::Sm90a).compare_with_committed(root).unwrap(), "");
    assert_eq!(
        stale(&text.replace("8.0", "8.1")),
        [],
        "of no variant that both have"
    );
    let changed = text.replace("8.3", "8.4");
    assert_eq!(stale(&changed), [Variant::Sm90a]);
    assert_eq!(stale(&text.replace("8.6", "8.7")), [Variant::Sm100a]);
    fs::write(&stock, changed).unwrap();
    let report = of(Variant::Sm90a).compare_with_committed(root).unwrap();
    assert_eq!(report.matches("stock").count(), 2, "{report}");
    assert_eq!(
        of(Variant::Sm100a).compare_with_committed(root).unwrap(),
        ""
    );
}

#[test]
fn the_hashes_of_crates_neither_show_nor_order_functions() {
    let with = |first: &str, second: &str| {
        let function =
            |name: &str, hash: &str| format!(".func _RNvC{hash}_{name}()\n{{\n\tret;\n}}\n");
        let functions = function("3gpu5write", first) + &function("4more4read", second);
        digest(&format!("{PTX}{functions}"), Resources::default()).sections[0]
            .text
            .clone()
    };
    let text = with("sA1", "sB22");
    assert_eq!(text, with("sb", "sa"));
    assert!(
        text.contains("function _RNvC3gpu5write (sm_90a)\n"),
        "{text}"
    );
}

#[test]
fn a_brief_digest_has_a_line_a_kernel() {
    let variant = Variant::Sm90a;
    let of = |registers| {
        let needs = Resources {
            registers,
            stack_bytes: 8,
            ..Resources::default()
        };
        let kernels = vec![("send".to_owned(), needs)];
        let text = section(
            Package::Probes,
            variant,
            &PtxModule::parse(PTX).unwrap(),
            &kernels,
        );
        Section {
            variant,
            text,
            kernels,
        }
    };
    let mut digest = digest(PTX, Resources::default());
    digest.sections = vec![of(20)];
    let text = of(20).text;
    assert_eq!(text, "\n[sm_90a]\nptx 8.3\n  send registers 20 stack 8\n");
    assert_eq!(digest.compare(&text), "");
    let difference = "[sm_90a]\n-  send registers 24 stack 8\n+  send registers 20 stack 8\n";
    assert_eq!(digest.compare(&of(24).text), difference);
}

#[test]
fn a_weakened_store_shows_as_a_difference() {
    let committed = digest(PTX, Resources::default()).sections[0].text.clone();
    let weaker = digest(
        &PTX.replace("st.release.sys", "st.relaxed.gpu"),
        Resources::default(),
    );
    let report = weaker.compare(&committed);
    assert!(report.contains("kernel send (sm_90a)"), "{report}");
    assert!(
        report.contains("-  st.release.sys.global.u64 1"),
        "{report}"
    );
    assert!(
        report.contains("+  st.relaxed.gpu.global.u64 1"),
        "{report}"
    );
}

#[test]
fn more_registers_and_a_lost_kernel_show_as_differences() {
    let committed = digest(
        PTX,
        Resources {
            registers: 20,
            ..Resources::default()
        },
    );
    let committed = committed.sections[0].text.clone();
    let more = digest(
        PTX,
        Resources {
            registers: 24,
            ..Resources::default()
        },
    );
    let report = more.compare(&committed);
    assert!(
        report.contains("-  registers 20\n+  registers 24"),
        "{report}"
    );
    let lost = digest(".version 8.3\n", Resources::default());
    assert!(lost.compare(&committed).contains("-  registers 20"));
    assert_eq!(lost.violations, ["sm_90a: no kernel"]);
}
