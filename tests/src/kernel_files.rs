//! PTX files from the command line, made by another compiler.

use std::path::{Path, PathBuf};

#[cfg(feature = "cuda")]
use anyhow::{Context, Result};
#[cfg(feature = "cuda")]
use ferry::Kernels;
#[cfg(feature = "cuda")]
use ferry::error::KernelsError;

#[cfg(feature = "cuda")]
use crate::probes::ProbePtx;

const KERNELS: &str = "--kernels";
const OPTIONS_KERNELS: &str = "--options-kernels";
const ROWS_KERNELS: &str = "--rows-kernels";
const PROBE_KERNELS: &str = "--probe-kernels";

/// PTX to load in place of the embedded one, for one architecture each.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct KernelFiles {
    /// PTX of Ferry's kernels from another compiler, in place of the embedded one
    #[arg(long, value_name = "FILE")]
    pub kernels: Option<PathBuf>,
    /// PTX of the kernels with options from another compiler
    #[arg(long, value_name = "FILE")]
    pub options_kernels: Option<PathBuf>,
    /// PTX of the kernels for rows that stay as they came from another compiler
    #[arg(long, value_name = "FILE")]
    pub rows_kernels: Option<PathBuf>,
    /// PTX of the probes (which measure the machine and check its arithmetic) from another compiler
    #[arg(long, value_name = "FILE")]
    pub probe_kernels: Option<PathBuf>,
}

impl KernelFiles {
    /// Flags that were given, each with its file.
    pub fn given<'a>(&'a self) -> impl Iterator<Item = (&'static str, &'a Path)> {
        let all = [
            (KERNELS, &self.kernels),
            (OPTIONS_KERNELS, &self.options_kernels),
            (ROWS_KERNELS, &self.rows_kernels),
            (PROBE_KERNELS, &self.probe_kernels),
        ];
        let given = |(flag, file): (_, &'a Option<PathBuf>)| Some((flag, file.as_deref()?));
        all.into_iter().filter_map(given)
    }

    /// Kernels that a group loads.
    ///
    /// # Errors
    /// A file cannot be read, or any [`KernelsError`]; the flag and the file are named.
    #[cfg(feature = "cuda")]
    pub fn kernels(&self) -> Result<Kernels> {
        let plain = read(KERNELS, self.kernels.as_deref(), |text| {
            // SAFETY: the file has Ferry's own kernels, which touch their arguments' memory alone and end:
            // documented on `--kernels`.
            unsafe { Kernels::from_ptx(text) }
        })?;
        let file = self.options_kernels.as_deref();
        let both = read(OPTIONS_KERNELS, file, |text| {
            // SAFETY: the file has Ferry's own kernels, as above: documented on `--options-kernels`.
            unsafe { plain.clone().with_options(text) }.map(Some)
        })?;
        let both = both.unwrap_or(plain);
        let all = read(ROWS_KERNELS, self.rows_kernels.as_deref(), |text| {
            // SAFETY: the file has Ferry's own kernels, as above: documented on `--rows-kernels`.
            unsafe { both.clone().with_rows(text) }.map(Some)
        })?;
        Ok(all.unwrap_or(both))
    }

    /// Probes that devices load.
    ///
    /// # Errors
    /// As [`kernels`](Self::kernels).
    #[cfg(feature = "cuda")]
    pub fn probes(&self) -> Result<ProbePtx> {
        read(PROBE_KERNELS, self.probe_kernels.as_deref(), |text| {
            // SAFETY: the file has the probes, which touch their arguments' memory alone and end: documented
            // on `--probe-kernels`.
            unsafe { ProbePtx::from_ptx(text) }
        })
    }
}

/// Loads a flag's file; without one, returns the embedded PTX.
#[cfg(feature = "cuda")]
fn read<T: Default>(
    flag: &str,
    file: Option<&Path>,
    take: impl FnOnce(String) -> Result<T, KernelsError>,
) -> Result<T> {
    let Some(file) = file else {
        return Ok(T::default());
    };
    let of_file = || format!("{flag} {}", file.display());
    let text = std::fs::read_to_string(file).with_context(of_file)?;
    take(text).with_context(of_file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    use crate::bench::BenchArgs;
    use crate::gpu::GpuArgs;

    #[derive(clap::Parser)]
    enum Program {
        Gpu(GpuArgs),
        Bench(BenchArgs),
    }

    #[test]
    fn both_programs_take_all_files() {
        for program in ["gpu", "bench"] {
            let line = [
                "ferry-tests",
                program,
                "--kernels",
                "a.ptx",
                "--options-kernels",
                "b.ptx",
                "--rows-kernels",
                "c.ptx",
                "--probe-kernels",
                "d.ptx",
            ];
            let files = match Program::try_parse_from(line).unwrap() {
                Program::Gpu(args) => args.files,
                Program::Bench(args) => args.files,
            };
            let given: Vec<_> = files.given().collect();
            let wanted = [
                ("--kernels", "a.ptx"),
                ("--options-kernels", "b.ptx"),
                ("--rows-kernels", "c.ptx"),
                ("--probe-kernels", "d.ptx"),
            ];
            assert_eq!(given, wanted.map(|(flag, file)| (flag, Path::new(file))));
        }
        assert_eq!(KernelFiles::default().given().count(), 0);
    }
}

#[cfg(all(test, feature = "cuda"))]
#[path = "kernel_files_tests.rs"]
mod tests_of_ptx;
