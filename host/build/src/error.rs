//! Errors, each with a command that helps.

use std::path::PathBuf;

use ferry_layout::FINGERPRINT_VARIABLE;

use crate::package::{FOLDER_VARIABLE, Variant};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reason why PTX was not found or built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tool that the build needs is not installed.
    #[error("{tool} is missing: {needed_for}; get it with `{get}`")]
    MissingTool {
        /// The program or component.
        tool: String,
        /// Its purpose.
        needed_for: &'static str,
        /// The command that gets it.
        get: String,
    },
    /// A tool ran and failed.
    #[error("`{command}` failed with {status}\n{output}")]
    ToolFailed {
        /// The command line.
        command: String,
        /// Its exit status.
        status: std::process::ExitStatus,
        /// Its output.
        output: String,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    File {
        /// The attempted action.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// NVSHMEM was found, but it is not the version that Ferry links.
    #[error(
        "{path} is NVSHMEM {found}, but Ferry links NVSHMEM {wanted}; get it with `{get}` \
         or unset NVSHMEM_HOME",
        path = path.display()
    )]
    NvshmemVersion {
        /// The bitcode file.
        path: PathBuf,
        /// The version that the file names.
        found: String,
        /// The version that Ferry links.
        wanted: String,
        /// The command that gets it.
        get: String,
    },
    /// A file in the place of NVSHMEM's bitcode has an unknown sum.
    #[error(
        "{path} has the sha256 {found}, but NVSHMEM's is {wanted}; get it with `{get}`, \
         or unset NVSHMEM_HOME",
        path = path.display()
    )]
    NvshmemSum {
        /// The bitcode file.
        path: PathBuf,
        /// Its sum.
        found: String,
        /// The sums of the version that Ferry links.
        wanted: String,
        /// The command that gets it.
        get: String,
    },
    /// `NVSHMEM_HOME` is set, but holds no device bitcode.
    #[error(
        "NVSHMEM_HOME is {home}, which has no lib/libnvshmem_device.bc; unset it, or point it at \
         NVSHMEM 3.4.5",
        home = home.display()
    )]
    NvshmemHome {
        /// The value of the variable.
        home: PathBuf,
    },
    /// PTX that was built before cannot be used.
    #[error(
        "{path} cannot be used: {problem}; set {FOLDER_VARIABLE} to a folder of PTX of this version, which \
         `cargo xtask build-ptx` writes to target/ptx, or unset it to use the package's own or build it",
        path = path.display()
    )]
    Prebuilt {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        problem: PrebuiltProblem,
    },
    /// A copy of the host library's package alone, with neither PTX nor the kernels' sources.
    #[error(
        "there is no PTX beside {folder} and no source of the kernels; set {FOLDER_VARIABLE} to a folder of \
         PTX of this version, which `cargo xtask build-ptx` writes to target/ptx, or depend on the \
         package as `cargo xtask package` makes it",
        folder = folder.display()
    )]
    NoSources {
        /// The package's folder.
        folder: PathBuf,
    },
    /// A build script's function was called outside a build script.
    #[error("{variable} is not set: only a build script may call this")]
    NoBuildScript {
        /// The variable that cargo sets for build scripts.
        variable: &'static str,
    },
    /// The compiler succeeded but did not write its output.
    #[error("no {what} in {path} after the build", path = path.display())]
    MissingOutput {
        /// The missing file, in words.
        what: &'static str,
        /// Its place.
        path: PathBuf,
    },
    /// The text of a PTX file, of `ptxas -v` or of a digest cannot be read.
    #[error("cannot read {what}: {detail}")]
    Parse {
        /// The text.
        what: &'static str,
        /// The problem.
        detail: String,
    },
}

/// Reason why PTX that was built before cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PrebuiltProblem {
    /// The path is relative, but a build script runs in another folder than the user's shell.
    #[error("it is not an absolute path")]
    NotAbsolute,
    /// There is no such folder.
    #[error("there is no such folder")]
    NoFolder,
    /// A file is missing.
    #[error("there is no such file")]
    NoFile,
    /// The text is not PTX.
    #[error("it is not PTX: {reason}")]
    NotPtx {
        /// The missing part.
        reason: String,
    },
    /// The PTX is for another GPU generation than its name says.
    #[error("its .target is `{found}`, not {wanted}")]
    Target {
        /// The variant in the file's name.
        wanted: Variant,
        /// The variant in its `.target` line.
        found: String,
    },
    /// The PTX was built from another memory layout than this version's.
    #[error(
        "its {FINGERPRINT_VARIABLE} is {}, but this version's layout has {wanted:#018x}",
        found.map_or_else(|| "missing".to_owned(), |found| format!("{found:#018x}"))
    )]
    Layout {
        /// The fingerprint of this version.
        wanted: u64,
        /// The one in the PTX; `None` if it has none.
        found: Option<u64>,
    },
    /// A kernel is missing.
    #[error("it has no kernel {kernel}")]
    NoKernel {
        /// Its name.
        kernel: String,
    },
    /// A kernel is missing that only builds with NVSHMEM have.
    #[error(
        "it has no kernel {kernel}: it was built without NVSHMEM, which the feature `nvshmem` needs"
    )]
    WithoutNvshmem {
        /// Its name.
        kernel: String,
    },
}

/// Adds the path and the attempted action to an I/O error.
pub trait FileContext<T> {
    /// Turns an I/O error into [`Error::File`]; `action` is a verb: "read".
    fn file(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T>;
}

impl<T> FileContext<T> for std::io::Result<T> {
    fn file(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T> {
        self.map_err(|source| Error::File {
            action,
            path: path.into(),
            source,
        })
    }
}
