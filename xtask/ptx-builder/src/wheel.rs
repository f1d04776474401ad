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
}

impl Wheel {
    /// NVSHMEM: device bitcode, host library, headers.
    pub const NVSHMEM: Wheel = Wheel {
        name: "nvidia-nvshmem-cu13",
        version: "3.4.5",
    };
    /// `ptxas`.
    pub const NVCC: Wheel = Wheel {
        name: "nvidia-cuda-nvcc",
        version: "13.0.88",
    };
    /// `cuda.h`, `cuda_runtime.h`.
    pub const RUNTIME: Wheel = Wheel {
        name: "nvidia-cuda-runtime",
        version: "13.0.96",
    };
    /// The runtime headers' inner half.
    pub const CRT: Wheel = Wheel {
        name: "nvidia-cuda-crt",
        version: "13.0.88",
    };
    /// `cuda/std`, which NVSHMEM's headers include.
    pub const CCCL: Wheel = Wheel {
        name: "nvidia-cuda-cccl",
        version: "13.0.85",
    };

    /// The command that gets this wheel.
    pub fn get_command(&self) -> String {
        format!("python3 -m pip install {}=={}", self.name, self.version)
    }

    /// The folder under `target_dir` that holds this wheel's files once fetched.
    fn folder(&self, target_dir: &Path) -> PathBuf {
        target_dir
            .join("wheels")
            .join(format!("{}-{}", self.name, self.version))
    }

    /// This wheel's files below `target_dir`, if they were fetched before.
    pub fn fetched(&self, target_dir: &Path) -> Option<PathBuf> {
        Some(self.folder(target_dir)).filter(|folder| folder.is_dir())
    }

    /// This wheel's files below `target_dir`, fetched with pip unless they are there.
    ///
    /// # Errors
    ///
    /// Python or pip is missing, or pip could not get the wheel.
    pub fn fetch(&self, target_dir: &Path) -> Result<PathBuf> {
        if let Some(folder) = self.fetched(target_dir) {
            return Ok(folder);
        }
        eprintln!("fetching {} {} with pip", self.name, self.version);
        let folder = self.folder(target_dir);
        let partial = folder.with_extension(format!("partial-{}", std::process::id()));
        fs::create_dir_all(&partial).file("create", &partial)?;
        let mut pip = Command::new("python3");
        pip.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--disable-pip-version-check",
        ])
        .env("PIP_ROOT_USER_ACTION", "ignore")
        .arg("--target")
        .arg(&partial)
        .arg(format!("{}=={}", self.name, self.version));
        output_of(&mut pip, missing_python)?;
        match fs::rename(&partial, &folder) {
            // Another build was quicker; its files are the same.
            Err(_) if folder.is_dir() => fs::remove_dir_all(&partial).file("remove", &partial)?,
            outcome => outcome.file("move into place", &folder)?,
        }
        Ok(folder)
    }
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
