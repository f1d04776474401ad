//! Python wheels as a source of NVIDIA's files, for machines without a CUDA toolkit.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{output_of, stdout_of};
use crate::error::{Error, FileContext, Result};

/// A wheel of the Python package index, at one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wheel {
    /// The package's name.
    pub name: &'static str,
    /// The exact version.
    pub version: &'static str,
    /// Sums of the files for Linux on x86_64 and on aarch64; pip takes no other.
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
    /// `ptxas`.
    pub const NVCC: Wheel = Wheel {
        name: "nvidia-cuda-nvcc",
        version: "13.0.88",
        sha256: [
            "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
            "c7ff28f86a24effdc6c034fa15230c549a273e4771b10a7fec14996f8cf3307f",
        ],
    };
    /// `cuda.h`, `cuda_runtime.h`.
    pub const RUNTIME: Wheel = Wheel {
        name: "nvidia-cuda-runtime",
        version: "13.0.96",
        sha256: [
            "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
            "ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55",
        ],
    };
    /// The runtime headers' inner half.
    pub const CRT: Wheel = Wheel {
        name: "nvidia-cuda-crt",
        version: "13.0.88",
        sha256: [
            "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
            "ee2ea2a97073e02ee62bb27841f437332be2c248e3eac013df07997ada39c003",
        ],
    };
    /// `cuda/std`, which NVSHMEM's headers include.
    pub const CCCL: Wheel = Wheel {
        name: "nvidia-cuda-cccl",
        version: "13.0.85",
        sha256: [
            "e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649",
            "6f0203e29fed809ee2b7fe9b1344df66ecab990c37d6a2e0e189b26d6c97ed7c",
        ],
    };

    /// libNVVM, its header and libdevice.
    pub const NVVM: Wheel = Wheel {
        name: "nvidia-nvvm",
        version: "13.0.88",
        sha256: [
            "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0",
            "c4376a291d72d22a315d9d2f69bdae8f8cd83a627f75bad395cee49a0fe65dc1",
        ],
    };

    /// The command that gets this wheel.
    pub fn get_command(&self) -> String {
        format!("python3 -m pip install {}=={}", self.name, self.version)
    }

    /// The folder under `target_dir` that holds this wheel's files once fetched. Its name has a
    /// part of the sum: what was fetched without one, or with another, is not taken.
    fn folder(&self, target_dir: &Path) -> PathBuf {
        let sum = &self.sha256[0][..16];
        target_dir
            .join("wheels")
            .join(format!("{}-{}-{sum}", self.name, self.version))
    }

    /// What stands in a requirements file: the only place where pip takes sums.
    fn requirement(&self) -> String {
        let [x86_64, aarch64] = self.sha256;
        let (name, version) = (self.name, self.version);
        format!("{name}=={version} --hash=sha256:{x86_64} --hash=sha256:{aarch64}\n")
    }

    /// Whether this very version is installed in one of Python's folders for packages.
    pub(crate) fn is_in(&self, packages: &Path) -> bool {
        let name = self.name.replace('-', "_");
        let record = format!("{name}-{}.dist-info", self.version);
        packages.join(record).is_dir()
    }

    /// This wheel's files below `target_dir`, if they were fetched before.
    pub fn fetched(&self, target_dir: &Path) -> Option<PathBuf> {
        Some(self.folder(target_dir)).filter(|folder| folder.is_dir())
    }

    /// This wheel's files below `target_dir`, fetched with pip unless they are there.
    ///
    /// # Errors
    ///
    /// Python or pip is missing, or pip could not get the wheel, or what it got has another sum.
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
            // Another build was quicker; its files are the same.
            Err(_) if folder.is_dir() => fs::remove_dir_all(&partial).file("remove", &partial)?,
            outcome => outcome.file("move into place", &folder)?,
        }
        Ok(folder)
    }
}

/// Installs what `requirements` names with its sums, and nothing else, into `folder`. Of wheels alone: they
/// run no code of theirs.
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

/// The folders that Python searches for packages; none where there is no Python.
pub(crate) fn site_packages() -> Vec<PathBuf> {
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
        // The package comes from the list, where its sums stand, alone.
        assert!(!arguments.iter().any(|a| a.contains("nvidia")));
        for wheel in [
            Wheel::NVSHMEM,
            Wheel::NVCC,
            Wheel::RUNTIME,
            Wheel::CRT,
            Wheel::CCCL,
            Wheel::NVVM,
        ] {
            let requirement = wheel.requirement();
            assert!(requirement.starts_with(&format!("{}=={} ", wheel.name, wheel.version)));
            for sum in wheel.sha256 {
                assert_eq!(sum.len(), 64, "{requirement}");
                assert!(requirement.contains(&format!("--hash=sha256:{sum}")));
            }
        }
    }
}
