//! The embedded kernels, and the reading of kernels.

use std::ffi::CStr;
use std::mem::offset_of;

use ferry_layout::{COMMON_OFFSET, Common};

use super::*;
use crate::device::kernels::specialize::{SHAPE, VARIABLES};

/// Sets of kernels that take options.
const WITH_OPTIONS: [KernelSet; 2] = [KernelSet::WithOptions, KernelSet::Rows];

/// Every set of kernels.
const SETS: [KernelSet; 3] = [KernelSet::Plain, KernelSet::WithOptions, KernelSet::Rows];

/// The embedded PTX of these sets.
fn of_sets(sets: &[KernelSet]) -> impl Iterator<Item = (KernelSet, &'static Ptx)> {
    let of = |&set: &KernelSet| embedded(set).iter().map(move |ptx| (set, ptx));
    sets.iter().flat_map(of)
}

fn read(ptx: &Ptx) -> Text {
    kernels::read(ptx.text().trim_end_matches('\0')).unwrap()
}

/// Whether kernels reach ranks of other nodes: false and, if there are such kernels, true.
const REACHES: &[bool] = if cfg!(feature = "nvshmem") {
    &[false, true]
} else {
    &[false]
};

/// Every kernel without options, with and without ranks of other nodes.
fn all() -> impl Iterator<Item = (Kernel, bool)> {
    let both = |kernel| REACHES.iter().map(move |&shmem| (kernel, shmem));
    KernelSet::Plain.kernels().flat_map(both)
}

#[test]
fn only_the_feature_nvshmem_brings_anything_of_nvshmem() {
    for (_, ptx) in of_sets(&SETS) {
        let wanted = cfg!(feature = "nvshmem");
        assert_eq!(kernels::has_shmem(&read(ptx)), wanted, "{}", ptx.target);
        assert_eq!(ptx.text().contains("nvshmem"), wanted, "{}", ptx.target);
    }
}

#[test]
fn the_most_special_ptx_that_a_device_runs_is_chosen() {
    let chosen = |major, minor| {
        let mut all = EMBEDDED.iter();
        let ptx = all.find(|ptx| ptx.target.runs_on(major, minor));
        ptx.map(|ptx| ptx.target.to_string())
    };
    assert_eq!(chosen(7, 5), None);
    for (major, minor, target) in [
        (8, 0, "sm_80"),
        (8, 9, "sm_80"),
        (9, 0, "sm_90a"),
        (10, 0, "sm_100a"),
        (10, 3, "sm_80"),
        (12, 0, "sm_80"),
    ] {
        assert_eq!(chosen(major, minor).as_deref(), Some(target));
    }
}

#[test]
fn kernels_that_load_through_rings_are_given_them() {
    for ptx in &EMBEDDED {
        let text = read(ptx);
        for (kernel, shmem) in all() {
            // Kernels that reach other nodes load without. Some are the same with and without such peers.
            let reaches_far = kernel.entry(shmem) != kernel.entry(false);
            let wanted = if ptx.target == Target::SM_80 || reaches_far {
                0
            } else {
                kernel.pipeline_bytes()
            };
            let given = Needs::of(&text, kernel, shmem).pipeline_bytes;
            assert_eq!(given, wanted, "{} {}", kernel.entry(shmem), ptx.target);
        }
    }
}

#[test]
fn kernels_with_options_take_them_behind_the_arguments() {
    for (set, ptx) in of_sets(&WITH_OPTIONS) {
        let text = read(ptx);
        for kernel in set.kernels() {
            for &shmem in REACHES {
                let epilogue = if kernel.combines() {
                    size_of::<ferry_layout::Steps>() as u64
                } else {
                    0
                };
                let wanted = [kernels::option_bytes(kernel) + epilogue];
                kernels::require(&text, kernel.entry(shmem), &wanted).unwrap();
            }
        }
    }
}

/// Loads of a kernel's parameter: the place of each in it, and its line.
fn loads(body: &str) -> impl Iterator<Item = (usize, &str)> {
    let load = |line: &str| {
        let (_, place) = line.split_once("_param_0")?;
        let place = place.strip_suffix("];")?.trim_start_matches('+');
        Some(match place {
            "" => 0,
            place => place.parse().expect("an offset"),
        })
    };
    let loads = (body.lines()).filter(|line| line.contains("ld.param::entry"));
    loads.filter_map(move |line| Some((load(line)?, line)))
}

#[test]
fn the_embedded_kernels_with_options_are_taken_as_given_ones() {
    for (set, ptx) in of_sets(&WITH_OPTIONS) {
        let text = ptx.text().trim_end_matches('\0');
        // SAFETY: nothing is launched.
        let given = unsafe {
            match set {
                KernelSet::Rows => Kernels::default().with_rows(text),
                _ => Kernels::default().with_options(text),
            }
        };
        let given = given.unwrap();
        assert_eq!(given.epilogue_bytes(), None, "{}", ptx.target);
        for of in SETS {
            let target = given.given(of).map(|ptx| ptx.target);
            assert_eq!(target, (of == set).then_some(ptx.target), "{of:?} {set:?}");
        }
    }
}

#[test]
fn kernels_that_may_begin_early_wait_for_those_before() {
    for ptx in &EMBEDDED {
        let text = read(ptx);
        for (kernel, shmem) in all() {
            let entry = kernel.entry(shmem);
            let body = text.body(text.kernel(entry).expect(entry));
            let wanted = ptx.target != Target::SM_80 && kernel != Kernel::FusedSilu;
            let waits = body.matches("griddepcontrol.wait;").count();
            assert_eq!(waits, usize::from(wanted), "{entry} {}", ptx.target);
            let needs = Needs::of(&text, kernel, shmem);
            assert_eq!(needs.waits_for_earlier, wanted, "{entry} {}", ptx.target);
        }
    }
}

#[test]
fn what_a_kernel_needs_is_in_its_text() {
    let of = |body: &str, helper: &str| {
        let entry = Kernel::Combine.entry(false);
        let ptx = format!(
            ".version 8.3\n.visible .entry {entry}()\n{{\n{body}\n}}\n\
             .func helper()\n{{\n{helper}\n}}\n"
        );
        Needs::of(&Text::parse(&ptx).unwrap(), Kernel::Combine, false)
    };
    let needs = |pipeline_bytes, waits_for_earlier| Needs {
        pipeline_bytes,
        waits_for_earlier,
    };
    let (bytes, ring) = (Kernel::Combine.pipeline_bytes(), "mov.u32 %r1, ferry_ring;");
    assert_eq!(of("ret;", "ret;"), needs(0, false));
    assert_eq!(of(ring, "ret;"), needs(bytes, false));
    assert_eq!(of("call helper;", ring), needs(bytes, false));
    assert_eq!(of("griddepcontrol.wait;", "ret;"), needs(0, true));
    // To let others begin is not to wait.
    assert_eq!(
        of("griddepcontrol.launch_dependents;", "ret;"),
        needs(0, false)
    );
}

#[test]
fn every_ptx_says_its_target_and_ends_with_its_only_zero_byte() {
    for ptx in &EMBEDDED {
        assert!(CStr::from_bytes_with_nul(ptx.text().as_bytes()).is_ok());
        let text = read(ptx);
        assert_eq!(text.target, ptx.target.to_string());
        assert!(text.version.starts_with('8'), "{}", title(&text));
    }
}

#[test]
fn the_embedded_kernels_are_such_as_are_taken_and_measure_nothing() {
    for ptx in &EMBEDDED {
        let text = ptx.text().trim_end_matches('\0');
        // SAFETY: nothing is launched.
        let taken = unsafe { Kernels::from_ptx(text) }.unwrap();
        assert_eq!(taken.given(KernelSet::Plain).unwrap().target, ptx.target);
    }
    for (set, ptx) in of_sets(&SETS) {
        let mut found: Vec<_> = read(ptx).kernels().map(|k| k.name.clone()).collect();
        let both = |kernel: Kernel| REACHES.iter().map(move |&shmem| kernel.entry(shmem));
        let mut wanted: Vec<_> = set.kernels().flat_map(both).collect();
        wanted.sort_unstable();
        wanted.dedup();
        found.sort_unstable();
        assert_eq!(found, wanted, "{set:?} {}", ptx.target);
    }
}

#[test]
fn a_ptx_that_is_too_new_is_told_from_a_broken_one() {
    let log = "ptxas fatal : Unsupported .version 8.3; current version is '7.8'";
    assert!(is_too_new(sys::INVALID_PTX, log));
    assert!(is_too_new(sys::UNSUPPORTED_PTX_VERSION, ""));
    assert!(!is_too_new(sys::INVALID_PTX, "ptxas fatal : syntax error"));
}

#[test]
fn no_embedded_kernel_loads_a_constant() {
    for (set, ptx) in of_sets(&SETS) {
        let special = specialised(&read(ptx), &SHAPE);
        let text = kernels::read(&special).unwrap();
        let mut entries: Vec<_> = text.kernels().map(|kernel| kernel.name.as_str()).collect();
        entries.sort_unstable();
        let of_round = set.kernels().filter(|kernel| KERNELS.contains(kernel));
        let mut wanted: Vec<_> = of_round.map(|kernel| kernel.entry(false)).collect();
        wanted.sort_unstable();
        assert_eq!(entries, wanted, "{set:?} {}", ptx.target);
        let constants = offset_of!(Common, shape)..size_of::<Common>();
        // Each of these, alone or with its neighbour, is loaded.
        let is_variable = |at| VARIABLES.iter().any(|of| at / 8 == of.start / 8);
        let left = loads(&special).filter(|(at, _)| {
            let at = at.checked_sub(COMMON_OFFSET);
            at.is_some_and(|at| constants.contains(&at) && !is_variable(at))
        });
        let left: Vec<_> = left.map(|(_, line)| line).collect();
        // The PTX for sm_80 says `ld.param` alone, and keeps all of its loads.
        let routes = COMMON_OFFSET + VARIABLES[1].start;
        let has_routes = loads(&special).any(|(at, _)| at == routes);
        assert!(
            has_routes || ptx.target == Target::SM_80,
            "{set:?} {}",
            ptx.target
        );
        assert_eq!(left, [""; 0], "{set:?} {}", ptx.target);
        let moves = special.matches("mov.b64 \t%rd").count();
        assert!(moves > 100, "{moves} moves in {set:?} {}", ptx.target);
    }
}

#[test]
fn no_kernel_for_a_shape_divides_by_what_the_shape_says() {
    for ptx in &EMBEDDED {
        let text = specialised(&read(ptx), &SHAPE);
        let divides = |line: &&str| line.contains("\tdiv.u32") || line.contains("\trem.u32");
        let divisions = text.lines().filter(divides).count();
        // Divisions by a variable remain. The conversion to e4m3 by hand divides, too.
        let most = if ptx.target == Target::SM_80 { 104 } else { 16 };
        assert!(divisions <= most, "{divisions} divisions in {}", ptx.target);
    }
}
