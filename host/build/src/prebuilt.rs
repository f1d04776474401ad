//! PTX that was built before, in a folder of the user's or in the published package.

use std::fs;
use std::path::Path;

use ferry_layout::{FINGERPRINT_VARIABLE, Kernel, LAYOUT_FINGERPRINT};
use ferry_ptx::Module;

use crate::error::{Error, FileContext, PrebuiltProblem, Result};
use crate::package::{Artifact, Package, Variant, place};

/// Finds these packages' PTX in a folder that is laid out like `target/ptx`: `sm_90a.ptx`, with options
/// `options/sm_90a.ptx`, for rows that stay as they came `rows/sm_90a.ptx`. Each file must have this
/// version's memory layout and all kernels of its package; more are allowed.
///
/// # Errors
///
/// [`Error::Prebuilt`], with the first path that cannot be used.
pub(crate) fn prebuilt(folder: &Path, packages: &[Package]) -> Result<Vec<Artifact>> {
    let refused = |path: &Path, problem| {
        Err(Error::Prebuilt {
            path: path.into(),
            problem,
        })
    };
    if !folder.is_absolute() {
        return refused(folder, PrebuiltProblem::NotAbsolute);
    }
    if !folder.is_dir() {
        return refused(folder, PrebuiltProblem::NoFolder);
    }
    let mut artifacts = Vec::new();
    for &package in packages {
        for variant in Variant::ALL {
            let ptx_path = folder.join(place(package, variant));
            if !ptx_path.is_file() {
                return refused(&ptx_path, PrebuiltProblem::NoFile);
            }
            let text = fs::read_to_string(&ptx_path).file("read", &ptx_path)?;
            require(&ptx_path, &text, package, variant)?;
            artifacts.push(Artifact {
                package,
                variant,
                ptx_path,
            });
        }
    }
    Ok(artifacts)
}

/// Checks that a file's text is a package's PTX with this version's memory layout.
pub(crate) fn require(path: &Path, text: &str, package: Package, variant: Variant) -> Result<()> {
    check(text, package, variant).map_err(|problem| Error::Prebuilt {
        path: path.into(),
        problem,
    })
}

/// Checks that a text is a package's PTX with this version's memory layout.
fn check(text: &str, package: Package, variant: Variant) -> Result<(), PrebuiltProblem> {
    let module = Module::parse(text).map_err(|error| PrebuiltProblem::NotPtx {
        reason: error.to_string(),
    })?;
    if module.target != variant.target_cpu() {
        return Err(PrebuiltProblem::Target {
            wanted: variant,
            found: module.target,
        });
    }
    let found = module
        .variable(FINGERPRINT_VARIABLE)
        .map(u64::from_le_bytes);
    if found != Some(LAYOUT_FINGERPRINT) {
        return Err(PrebuiltProblem::Layout {
            wanted: LAYOUT_FINGERPRINT,
            found,
        });
    }
    for kernel in kernels(package) {
        let name = kernel.entry(false);
        if module.kernel(name).is_none() {
            let kernel = name.to_owned();
            return Err(PrebuiltProblem::NoKernel { kernel });
        }
        let name = kernel.entry(true);
        if package.calls_nvshmem() && module.kernel(name).is_none() {
            let kernel = name.to_owned();
            return Err(PrebuiltProblem::WithoutNvshmem { kernel });
        }
    }
    Ok(())
}

/// The kernels that a package's PTX has.
fn kernels(package: Package) -> impl Iterator<Item = Kernel> {
    Kernel::ALL.into_iter().filter(move |kernel| match package {
        Package::Options | Package::NodeOptions => {
            !kernel.has_no_options() && !matches!(kernel, Kernel::GiveUp | Kernel::DispatchCounts)
        }
        Package::Rows | Package::NodeRows => !kernel.has_no_options() && !kernel.needs_options(),
        _ => !kernel.needs_options(),
    })
}

#[cfg(test)]
#[path = "prebuilt_tests.rs"]
mod tests;
