//! Python wheels as a source of NVIDIA's files, for machines without a CUDA toolkit.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{output_of, stdout_of};
use crate::error::{Error, FileContext, Result};

/// A wheel of the Python package index, of one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wheel {
    /// The package's name.
    pub name: &'static str,
    /// The exact version.
    pub version: &'static str,
    /// SHA-256 sums of the files for Linux on x86_64 and on aarch64; pip refuses any other.
    pub sha256: [&'static str; 2],
}

impl Wheel {
    /// NVSHMEM: device bitcode, host library, headers.
    pub const NVSHMEM: Wheel = Wheel {
        name: "nvidia-nvshmem-cu13",
        version: "3.4.5",
        sha256: [
            "290f0a2ee94c9f3687a02502f3b9299a9f9fe826e6d0287ee18482e78d495b80",
            "6dc2a197f38e5d0376ad52cd1a2a3617d3cdc150fd5966f4aee9bcebb1d68fe9",
        ],
    };

    /// The command that gets this wheel.
    pub fn get_command(&self) -> String {
        format!("python3 -m pip install {}=={}", self.name, self.version)
    }

    /// Folder of this wheel's files under `target_dir`. Its name has the first 16 digits of the sum for
    /// x86_64, so that files fetched without a sum, or before that sum changed, are not used.
    fn folder(&self, target_dir: &Path) -> PathBuf {
        let sum = &self.sha256[0][..16];
        target_dir
            .join("wheels")
            .join(format!("{}-{}-{sum}", self.name, self.version))
    }

    /// Text of a requirements file, the only place where pip accepts sums.
    fn requirement(&self) -> String {
        let [x86_64, aarch64] = self.sha256;
        let (name, version) = (self.name, self.version);
        format!("{name}=={version} --hash=sha256:{x86_64} --hash=sha256:{aarch64}\n")
    }

    /// Whether this version is installed in one of Python's package folders.
    pub fn is_in(&self, packages: &Path) -> bool {
        let name = self.name.replace('-', "_");
        let record = format!("{name}-{}.dist-info", self.version);
        packages.join(record).is_dir()
    }

    /// Folder of this wheel's files below `target_dir`, if they were fetched before.
    pub fn fetched(&self, target_dir: &Path) -> Option<PathBuf> {
        Some(self.folder(target_dir)).filter(|folder| folder.is_dir())
    }

    /// Folder of this wheel's files below `target_dir`, fetched with pip if it does not exist.
    ///
    /// # Errors
    ///
    /// Python or pip is missing, or pip could not get the wheel, or its sum is not the known one.
    pub fn fetch(&self, target_dir: &Path) -> Result<PathBuf> {
        if let Some(folder) = self.fetched(target_dir) {
            return Ok(folder);
        }
        eprintln!("fetching {} {} with pip", self.name, self.version);
        let folder = self.folder(target_dir);
        let partial = folder.with_extension(format!("partial-{}", std::process::id()));
        fs::create_dir_all(&partial).file("create", &partial)?;
        let requirements = partial.with_extension(format!("{}.txt", std::process::id()));
        fs::write(&requirements, self.requirement()).file("write", &requirements)?;
        let fetched = output_of(&mut pip(&requirements, &partial), missing_python);
        fs::remove_file(&requirements).file("remove", &requirements)?;
        if let Err(error) = fetched {
            fs::remove_dir_all(&partial).file("remove", &partial)?;
            return Err(error);
        }
        match fs::rename(&partial, &folder) {
            // Another build moved the same files there first.
            Err(_) if folder.is_dir() => fs::remove_dir_all(&partial).file("remove", &partial)?,
            outcome => outcome.file("move into place", &folder)?,
        }
        Ok(folder)
    }
}

/// Command that installs the wheels in `requirements`, checked by their sums, into `folder`. Only wheels,
/// because they run no code of their own.
fn pip(requirements: &Path, folder: &Path) -> Command {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps"])
        .args(["--disable-pip-version-check", "--require-hashes"])
        .args(["--only-binary=:all:", "--target"])
        .arg(folder)
        .arg("--requirement")
        .arg(requirements)
        .env("PIP_ROOT_USER_ACTION", "ignore");
    pip
}

/// The folders that Python searches for packages; none without Python.
pub fn site_packages() -> Vec<PathBuf> {
    let mut python = Command::new("python3");
    python.args(["-c", "import sys; print('\\n'.join(sys.path))"]);
    let printed = stdout_of(&mut python, missing_python).unwrap_or_default();
    printed
        .lines()
        .filter(|line| !line.is_empty())
        .map(PathBuf::from)
        .collect()
}

fn missing_python() -> Error {
    Error::MissingTool {
        tool: "python3 with pip".into(),
        needed_for: "it fetches NVIDIA's files",
        get: "apt-get install python3-pip".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pip_takes_only_wheels_with_the_committed_sums() {
        let pip = pip(Path::new("list.txt"), Path::new("folder"));
        let arguments: Vec<_> = pip.get_args().map(|a| a.to_string_lossy()).collect();
        for needed in ["--require-hashes", "--only-binary=:all:", "--no-deps"] {
            assert!(arguments.iter().any(|a| a == needed), "{arguments:?}");
        }
        // The package is named only in the list, next to its sums.
        assert!(!arguments.iter().any(|a| a.contains("nvidia")));
        let wheel = Wheel::NVSHMEM;
        let requirement = wheel.requirement();
        assert!(requirement.starts_with(&format!("{}=={} ", wheel.name, wheel.version)));
        for sum in wheel.sha256 {
            assert_eq!(sum.len(), 64, "{requirement}");
            assert!(requirement.contains(&format!("--hash=sha256:{sum}")));
        }
    }
}
