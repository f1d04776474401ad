//! PTX that each flag takes and refuses.

use std::fs;

use ferry_layout::{CombineWith, DispatchCountsArgs, GiveUpArgs, Steps};
use tempfile::NamedTempFile;

use super::*;

const PROBES: &str = include_str!(env!("FERRY_PTX_SM_90A"));
/// PTX of kernels that carry tokens: those with options have the names of those without.
const OTHERS: &str = include_str!(env!("FERRY_EPILOGUE_PTX_SM_90A"));

/// Loads a file with a text; returns the file's name, and the error if there is one.
fn given<T>(text: &str, load: impl FnOnce(PathBuf) -> Result<T>) -> (String, Option<String>) {
    let file = NamedTempFile::new().unwrap();
    fs::write(&file, text).unwrap();
    let error = load(file.path().into())
        .err()
        .map(|error| format!("{error:#}"));
    (file.path().display().to_string(), error)
}

fn probes(file: PathBuf) -> Result<ProbePtx> {
    let probe_kernels = Some(file);
    KernelFiles {
        probe_kernels,
        ..KernelFiles::default()
    }
    .probes()
}

/// Checks that a file with a text is refused as the probes', with the flag, the file and the reason.
fn refused(text: &str, reason: &str) {
    let (file, error) = given(text, probes);
    let wanted = format!("--probe-kernels {file}: {reason}");
    assert!(
        error.as_ref().is_some_and(|error| error.contains(&wanted)),
        "{error:?}, not {wanted}"
    );
}

#[test]
fn the_probes_are_taken_for_every_architecture() {
    let all = [
        PROBES,
        include_str!(env!("FERRY_PTX_SM_80")),
        include_str!(env!("FERRY_PTX_SM_100A")),
    ];
    for text in all {
        assert_eq!(given(text, probes).1, None);
    }
}

#[test]
fn other_kernels_are_no_probes_and_probes_no_other_kernels() {
    let reason = "the PTX for sm_90a has no kernel ferry_probe_empty";
    refused(OTHERS, reason);
    let kernels = |file| {
        let kernels = Some(file);
        KernelFiles {
            kernels,
            ..KernelFiles::default()
        }
        .kernels()
    };
    let (file, error) = given(PROBES, kernels);
    let wanted = format!("--kernels {file}: the PTX for sm_90a has no kernel ferry_");
    assert!(error.is_some_and(|error| error.starts_with(&wanted)));
}

/// Makes the files of a command line with one flag.
type Given = fn(PathBuf) -> KernelFiles;

/// The flags of kernels that take options, each with a file.
const WITH_OPTIONS: [(&str, Given); 2] = [
    ("--options-kernels", |file| KernelFiles {
        options_kernels: Some(file),
        ..KernelFiles::default()
    }),
    ("--rows-kernels", |file| KernelFiles {
        rows_kernels: Some(file),
        ..KernelFiles::default()
    }),
];

#[test]
fn kernels_with_another_epilogue_are_no_kernels_with_options_and_none_for_rows() {
    let wrong = [
        (
            OTHERS,
            "the kernel ferry_combine_async is given parameters of",
        ),
        (
            PROBES,
            "the PTX for sm_90a has no kernel ferry_dispatch_async",
        ),
    ];
    for (flag, files) in WITH_OPTIONS {
        for (text, reason) in wrong {
            let (file, error) = given(text, |file| files(file).kernels());
            let wanted = format!("{flag} {file}: {reason}");
            assert!(
                error
                    .as_ref()
                    .is_some_and(|error| error.starts_with(&wanted)),
                "{error:?}"
            );
        }
    }
}

#[test]
fn only_kernels_for_rows_may_lack_the_local_ones() {
    let bytes = size_of::<CombineWith<ferry_own_epilogue::LimitedWithOffsets>>();
    let with_steps = format!("_param_0[{}]", size_of::<CombineWith<Steps>>());
    let mut whole = OTHERS.replace(&format!("_param_0[{bytes}]"), &with_steps);
    // Kernels that those with options lack.
    for (kernel, bytes) in [
        ("ferry_give_up", size_of::<GiveUpArgs>()),
        ("ferry_dispatch_counts", size_of::<DispatchCountsArgs>()),
    ] {
        for name in [kernel.to_owned(), format!("{kernel}_shmem")] {
            let parameter = format!(".param .align 8 .b8 {name}_param_0[{bytes}]");
            whole += &format!(".visible .entry {name}(\n{parameter}\n)\n{{\nret;\n}}\n");
        }
    }
    let without = whole.replace(" ferry_combine_local(", " other(");
    let taken = WITH_OPTIONS.map(|(_, files)| {
        [&whole, &without].map(|text| {
            let load = |file| files(file).kernels();
            given(text, load).1
        })
    });
    let [[None, Some(refused)], [None, None]] = taken else {
        panic!("{taken:?}")
    };
    assert!(
        refused.ends_with("has no kernel ferry_combine_local"),
        "{refused}"
    );
}

#[test]
fn a_probe_that_is_missing_is_named() {
    let kernels = [
        "empty", "barrier", "copy", "ping", "convert", "write", "clear",
    ];
    for kernel in kernels.map(|name| format!("ferry_probe_{name}")) {
        let text = PROBES.replace(&format!(" {kernel}("), " other(");
        let reason = format!("the PTX for sm_90a has no kernel {kernel}");
        refused(&text, &reason);
    }
}

#[test]
fn probes_of_another_version_or_no_text_are_refused() {
    let text = PROBES.replace(
        "ferry_probe_convert_param_0[32]",
        "ferry_probe_convert_param_0[24]",
    );
    let reason = "the kernel ferry_probe_convert is given parameters of [32] bytes, but takes [24]";
    refused(&text, reason);
    let text = PROBES.replace("ferry_layout_fingerprint", "other");
    let reason = "the kernels' ferry_layout_fingerprint is missing";
    refused(&text, reason);
    refused("int main() {}", "the kernels' text is not PTX");
    let missing = PathBuf::from("no/such.ptx");
    let wanted = format!("--probe-kernels {}: ", missing.display());
    assert!(format!("{:#}", probes(missing).unwrap_err()).starts_with(&wanted));
}
