//! What can go wrong, each with the command that helps.

use std::path::PathBuf;

use crate::prebuilt::{FOLDER_VARIABLE, PrebuiltProblem};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why PTX was not built, assembled or compared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tool that the build needs is not installed.
    #[error("{tool} is missing: {needed_for}; get it with `{get}`")]
    MissingTool {
        /// The program or component.
        tool: String,
        /// What it is needed for.
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
        /// What it printed.
        output: String,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
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
    /// A file that calls itself NVSHMEM's bitcode and is not.
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
        "{path} cannot be used: {problem}; {FOLDER_VARIABLE} names a folder of PTX of this very version, as \
         `cargo xtask build-ptx` writes to target/ptx; unset it for the package's own, or to build it",
        path = path.display()
    )]
    Prebuilt {
        /// The file or folder.
        path: PathBuf,
        /// Why not.
        problem: PrebuiltProblem,
    },
    /// A copy of the host library's package alone: it has neither PTX nor what it is built from.
    #[error(
        "there is no PTX beside {folder} and no source of the kernels; set {FOLDER_VARIABLE} to a folder of \
         PTX of this very version, which `cargo xtask build-ptx` writes to target/ptx, or depend on the \
         package as `cargo xtask package` makes it",
        folder = folder.display()
    )]
    NoSources {
        /// The package's folder.
        folder: PathBuf,
    },
    /// A build script's function was called by something else.
    #[error("{variable} is not set: only a build script may call this")]
    NoBuildScript {
        /// What cargo sets for build scripts.
        variable: &'static str,
    },
    /// A folder that was named as a checkout of rust-cuda lacks something.
    #[error("{path} {problem}; get a checkout that works with `{get}`", path = path.display())]
    RustCuda {
        /// The folder.
        path: PathBuf,
        /// What it lacks.
        problem: String,
        /// The command that makes one.
        get: String,
    },
    /// The compiler finished without the file that it should have written.
    #[error("no {what} in {path} after the build", path = path.display())]
    MissingOutput {
        /// What should be there.
        what: &'static str,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The text of a PTX file, of `ptxas -v` or of a digest was not understood.
    #[error("cannot read {what}: {detail}")]
    Parse {
        /// Which text.
        what: &'static str,
        /// What is wrong with it.
        detail: String,
    },
}

/// Adds the path and what was tried to an I/O error.
pub(crate) trait FileContext<T> {
    /// Turns an I/O error into [`Error::File`].
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
