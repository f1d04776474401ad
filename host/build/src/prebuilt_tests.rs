//! Tests of folders of PTX that are used or refused.

use std::path::PathBuf;

use tempfile::TempDir;

use crate::package::FOLDER_VARIABLE;

use super::*;

const NODE: [Package; 3] = [
    Package::NodeKernels,
    Package::NodeOptions,
    Package::NodeRows,
];
const ALL: [Package; 3] = [Package::Kernels, Package::Options, Package::Rows];

/// PTX with all kernels of a package, whose bodies are empty.
fn text(package: Package, variant: Variant, fingerprint: u64) -> String {
    let mut text = format!(
        ".version 8.3\n.target {variant}\n.address_size 64\n\
         .visible .global .align 8 .u64 {FINGERPRINT_VARIABLE} = {fingerprint};\n"
    );
    for kernel in kernels(package) {
        let mut names = vec![kernel.entry(false)];
        if package.calls_nvshmem() && kernel.entry(true) != kernel.entry(false) {
            names.push(kernel.entry(true));
        }
        for name in names {
            text.push_str(&format!(".visible .entry {name}(\n)\n{{\n\tret;\n}}\n"));
        }
    }
    text
}

/// A folder of PTX.
struct Folder(TempDir);

impl Folder {
    fn new(packages: [Package; 3]) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        for subfolder in ["options", "rows"] {
            fs::create_dir_all(folder.0.path().join(subfolder)).unwrap();
        }
        for package in packages {
            for variant in Variant::ALL {
                folder.write(
                    package,
                    variant,
                    &text(package, variant, LAYOUT_FINGERPRINT),
                );
            }
        }
        folder
    }

    fn write(&self, package: Package, variant: Variant, text: &str) {
        fs::write(self.0.path().join(place(package, variant)), text).unwrap();
    }

    /// The refusal's path, below this folder, and its reason.
    fn refused(&self, packages: [Package; 3]) -> (PathBuf, PrebuiltProblem) {
        match prebuilt(self.0.path(), &packages) {
            Err(Error::Prebuilt { path, problem }) => {
                (path.strip_prefix(self.0.path()).unwrap().into(), problem)
            }
            other => panic!("not refused: {other:?}"),
        }
    }
}

#[test]
fn a_whole_folder_is_taken_and_more_kernels_are_allowed() {
    let node = Folder::new(NODE);
    let taken = prebuilt(node.0.path(), &NODE).unwrap();
    assert_eq!(taken.len(), 9);
    assert!(taken[5].ptx_path.ends_with("options/sm_100a.ptx"));
    assert!(taken[8].ptx_path.ends_with("rows/sm_100a.ptx"));
    let all = Folder::new(ALL);
    assert!(prebuilt(all.0.path(), &NODE).is_ok() && prebuilt(all.0.path(), &ALL).is_ok());
}

#[test]
fn a_folder_that_is_none_is_refused_and_the_text_says_what_would_do() {
    for (folder, wanted) in [
        ("target/ptx", PrebuiltProblem::NotAbsolute),
        ("/nowhere/ptx", PrebuiltProblem::NoFolder),
    ] {
        let error = prebuilt(Path::new(folder), &NODE).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Prebuilt { problem, .. } if problem == wanted));
        for part in [
            folder,
            FOLDER_VARIABLE,
            "cargo xtask build-ptx",
            "target/ptx",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
}

#[test]
fn a_missing_file_is_named() {
    let folder = Folder::new(NODE);
    // The last one first: the first one that is missing is named.
    for file in ["rows/sm_90a.ptx", "options/sm_90a.ptx"] {
        fs::remove_file(folder.0.path().join(file)).unwrap();
        let wanted = (file.into(), PrebuiltProblem::NoFile);
        assert_eq!(folder.refused(NODE), wanted);
    }
}

#[test]
fn ptx_of_another_layout_or_without_a_layout_is_refused() {
    let folder = Folder::new(NODE);
    let (package, variant) = (Package::NodeKernels, Variant::Sm80);
    let other = LAYOUT_FINGERPRINT ^ 1;
    folder.write(package, variant, &text(package, variant, other));
    let wanted = PrebuiltProblem::Layout {
        wanted: LAYOUT_FINGERPRINT,
        found: Some(other),
    };
    assert_eq!(folder.refused(NODE), ("sm_80.ptx".into(), wanted));
    let none = text(package, variant, other).replace(FINGERPRINT_VARIABLE, "another");
    folder.write(package, variant, &none);
    let (_, problem) = folder.refused(NODE);
    assert!(problem.to_string().contains("is missing"), "{problem}");
}

#[test]
fn a_text_that_is_none_or_for_another_generation_or_lacks_a_kernel_is_refused() {
    let folder = Folder::new(NODE);
    let (package, variant) = (Package::NodeOptions, Variant::Sm90a);
    let wrong = [
        (String::new(), "it is not PTX"),
        (
            text(package, Variant::Sm80, LAYOUT_FINGERPRINT),
            "its .target is `sm_80`, not sm_90a",
        ),
        (
            text(Package::NodeKernels, variant, LAYOUT_FINGERPRINT),
            "it has no kernel ferry_dispatch_local",
        ),
    ];
    for (text, wanted) in wrong {
        folder.write(package, variant, &text);
        let (path, problem) = folder.refused(NODE);
        assert_eq!(path, Path::new("options/sm_90a.ptx"));
        assert!(problem.to_string().contains(wanted), "{problem}");
    }
}

#[test]
fn kernels_for_rows_have_no_local_ones_and_each_of_the_others() {
    let folder = Folder::new(NODE);
    let (package, variant) = (Package::NodeRows, Variant::Sm100a);
    let whole = text(package, variant, LAYOUT_FINGERPRINT);
    assert!(!whole.contains("_local") && !whole.contains("silu"));
    let kernel = "ferry_combine_wait".to_owned();
    let other = whole.replace(&format!(" {kernel}("), " other(");
    folder.write(package, variant, &other);
    let problem = PrebuiltProblem::NoKernel { kernel };
    assert_eq!(folder.refused(NODE), ("rows/sm_100a.ptx".into(), problem));
}

#[test]
fn kernels_of_one_node_do_not_do_for_nvshmem() {
    let folder = Folder::new(NODE);
    let (path, problem) = folder.refused(ALL);
    assert_eq!(path, Path::new("sm_80.ptx"));
    let kernel = "ferry_dispatch_async_shmem".to_owned();
    assert_eq!(problem, PrebuiltProblem::WithoutNvshmem { kernel });
}
